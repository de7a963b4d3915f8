"""Files as regions: any offset and length, aligned or not, and what can go wrong."""

# ruff: noqa: ASYNC240

import os
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings, strategies as st

from kvtide.runtime import SystemClock
from kvtide.transfer import (
    Corrupt,
    Endpoint,
    ReadSlice,
    SegmentFile,
    TransferError,
    Unreachable,
)

SECRET = b"the secret of this test's cluster"
SIZE = (3 << 20) + 777


def never() -> bool:
    return False


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "segment"
    path.write_bytes(os.urandom(SIZE))
    return path


@given(
    offset=st.integers(0, SIZE),
    length=st.one_of(st.integers(0, 10_000), st.integers(0, SIZE)),
    shift=st.integers(0, 5000),
)
@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_range(path: Path, offset: int, length: int, shift: int) -> None:
    length = min(length, SIZE - offset)
    file = SegmentFile(path, writable=False)
    memory = memoryview(bytearray(shift + length))
    digest = file.read_into(memory[shift:], offset, never)
    expected = path.read_bytes()[offset : offset + length]
    assert bytes(memory[shift:]) == expected
    assert digest == xxhash.xxh3_64_intdigest(expected)
    file.close()


def test_direct_io_is_used_where_it_can_be(path: Path) -> None:
    file = SegmentFile(path, writable=False)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        assert not file.direct
    else:
        assert file.direct
    file.close()


@pytest.mark.parametrize(("offset", "length"), [(0, 8192), (5, 100_000), (4096, 1)])
def test_write_and_read_back(path: Path, offset: int, length: int) -> None:
    file = SegmentFile(path, writable=True)
    news = os.urandom(length)
    assert file.write_from(memoryview(news), offset) == xxhash.xxh3_64_intdigest(news)
    file.sync()
    into = memoryview(bytearray(length))
    file.read_into(into, offset, never)
    assert into == news
    assert path.stat().st_size == SIZE
    file.close()


def test_a_file_that_ends_early_is_corrupt(path: Path) -> None:
    file = SegmentFile(path, writable=False)
    os.truncate(path, 1000)
    with pytest.raises(Corrupt, match="ends before"):
        file.read_into(memoryview(bytearray(2000)), 0, never)
    file.close()


def test_files_that_cannot_be_regions(tmp_path: Path, path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    for wrong in (tmp_path / "missing", link):
        with pytest.raises(Unreachable):
            SegmentFile(wrong, writable=False)
    endpoint = Endpoint(node="a", epoch=1, secret=SECRET, clock=SystemClock())
    (tmp_path / "empty").touch()
    with pytest.raises(TransferError, match="empty"):
        endpoint.register_file(tmp_path / "empty", name="empty")
    endpoint.close_blocking()


async def test_a_file_that_is_not_here_comes_by_network(path: Path) -> None:
    """As from another host: the path is there, but it is another file."""
    async with (
        Endpoint(node="a", epoch=1, secret=SECRET, clock=SystemClock()) as owner,
        Endpoint(node="b", epoch=1, secret=SECRET, clock=SystemClock()) as reader,
    ):
        data = path.read_bytes()
        region = owner.register_file(path, name="segment")
        peer = await reader.connect(owner.address)
        into = memoryview(bytearray(1000))
        here = await peer.read([ReadSlice(region.handle(), 5, into)], timeout_s=10)
        assert (here.path, bytes(into)) == ("file", data[5:1005])
        other = owner.register_file(path, name="segment")
        path.rename(path.with_name("away"))
        path.write_bytes(bytes(SIZE))
        into[:] = bytes(1000)
        there = await peer.read([ReadSlice(other.handle(), 5, into)], timeout_s=10)
        assert (there.path, bytes(into)) == ("tcp", data[5:1005])
