"""Shared-memory files: names, locks, sweeping, and what happens when it is full."""

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide.runtime import SystemClock
from kvtide.transfer import (
    Endpoint,
    OutOfBounds,
    ReadSlice,
    Refused,
    TransferError,
    Unreachable,
    sweep_shm,
)
from kvtide.transfer.shm import attach, boot_id, create, shm_host

SECRET = b"the secret of this test's cluster"


def leave_behind(folder: Path) -> str:
    """A file of a process that is dead."""
    code = (
        "import sys; from pathlib import Path; from kvtide.transfer.shm import create;"
        "print(create(Path(sys.argv[1]), 4096).name)"
    )
    return subprocess.run(  # noqa: S603
        [sys.executable, "-c", code, str(folder)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


def test_sweep(tmp_path: Path) -> None:
    mine = create(tmp_path, 4096)
    dead = leave_behind(tmp_path)
    foreign = ["kvtide-", "kvtide-notes.txt", "other-1-2-3", f"kvtide-{'0' * 8}-1-1-x"]
    for name in foreign:
        (tmp_path / name).touch()
    old_boot = f"kvtide-{'0' * 8}-{os.getpid()}-1-{'a' * 16}"
    (tmp_path / old_boot).touch()
    assert sorted(sweep_shm(tmp_path)) == sorted([dead, old_boot])
    assert {path.name for path in tmp_path.iterdir()} == {mine.name, *foreign}
    mine.dispose()
    assert not mine.path.exists()


def test_sweep_leaves_what_is_locked(tmp_path: Path) -> None:
    """As seen from another pid namespace, where every owner looks dead."""
    mine = create(tmp_path, 4096)
    disguise = f"kvtide-{boot_id()[:8]}-4194305-1-{'b' * 16}"
    mine.path.rename(tmp_path / disguise)
    assert sweep_shm(tmp_path) == []
    os.close(mine.fd)
    mine.mapping.close()
    assert sweep_shm(tmp_path) == [disguise]


def test_sweep_of_nothing(tmp_path: Path) -> None:
    assert sweep_shm(tmp_path / "missing") == []


def test_attach(tmp_path: Path) -> None:
    file = create(tmp_path, 4096)
    file.mapping[:3] = b"abc"
    assert attach(tmp_path, file.name, 4096, writable=False).view[:3] == b"abc"
    with pytest.raises(Refused, match="shorter"):
        attach(tmp_path, file.name, 4097, writable=False)
    for name in ("../x", "/etc/passwd", "", "kvtide-a"):
        with pytest.raises(Refused, match="no name"):
            attach(tmp_path, name, 1, writable=False)
    link = f"kvtide-{boot_id()[:8]}-1-1-{'c' * 16}"
    (tmp_path / link).symlink_to(file.path)
    with pytest.raises(Refused):
        attach(tmp_path, link, 1, writable=True)
    file.dispose()
    with pytest.raises(Unreachable):
        attach(tmp_path, file.name, 4096, writable=False)


def test_who_shares_memory(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    assert shm_host(tmp_path) == shm_host(tmp_path) != ""
    assert shm_host(tmp_path) != shm_host(other)
    assert shm_host(None) == shm_host(tmp_path / "missing") == ""


async def test_full_shared_memory_is_said_and_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = os.statvfs(tmp_path)
    full = os.statvfs_result([*space[:3], 0, 0, *space[5:]])

    def statvfs(_: Path) -> os.statvfs_result:
        return full

    monkeypatch.setattr(os, "statvfs", statvfs)
    async with (
        Endpoint(
            node="a", epoch=1, secret=SECRET, clock=SystemClock(), shm_dir=tmp_path
        ) as owner,
        Endpoint(
            node="b", epoch=1, secret=SECRET, clock=SystemClock(), shm_dir=tmp_path
        ) as reader,
    ):
        with caplog.at_level(logging.WARNING, "kvtide.transfer"):
            region = owner.allocate(5000, name="arena")
        (record,) = caplog.records
        assert "not in shared memory" in record.message
        assert os.listdir(tmp_path) == []  # noqa: PTH208
        handle = region.handle()
        assert handle.shm_name == ""
        region.view[:5] = b"hello"
        peer = await reader.connect(owner.address)
        into = memoryview(bytearray(5))
        result = await peer.read([ReadSlice(handle, 0, into)], timeout_s=10)
        assert (bytes(into), result.path) == (b"hello", "tcp")


def can_mount() -> bool:
    return os.geteuid() == 0 and shutil.which("mount") is not None


@pytest.mark.skipif(not can_mount(), reason="needs root")
def test_a_full_file_system_is_said_and_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if subprocess.run(words, check=False, capture_output=True).returncode:  # noqa: S603
        pytest.skip("no file system may be mounted here")
    try:
        endpoint = Endpoint(
            node="a", epoch=1, secret=SECRET, clock=SystemClock(), shm_dir=tmp_path
        )
        fits = endpoint.allocate(128 << 10, name="fits")
        fits.commit(0, fits.length)
        with caplog.at_level(logging.WARNING, "kvtide.transfer"):
            large = endpoint.allocate(192 << 10, name="large")
        assert "'large' of 196608 bytes is not in shared memory" in caplog.text
        assert (fits.shm_name != "", large.shm_name) == (True, "")
        large.view[:] = b"x" * large.length
        # promised when both fitted, and gone when it is wanted
        late = endpoint.allocate(64 << 10, name="late")
        (tmp_path / "other").write_bytes(bytes(96 << 10))
        with pytest.raises(TransferError, match="No space left"):
            late.commit(0, late.length)
        endpoint.close_blocking()
        (tmp_path / "other").unlink()
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)  # noqa: S603, S607


def test_files_are_ours_alone(tmp_path: Path) -> None:
    file = create(tmp_path, 1 << 20)
    found = file.path.stat()
    assert found.st_mode & 0o777 == 0o600
    assert found.st_size == 1 << 20
    # committed when touched, not before
    assert found.st_blocks * 512 < 1 << 20
    file.dispose()


@pytest.mark.parametrize("shared", [True, False])
async def test_commit_and_release(tmp_path: Path, shared: bool) -> None:
    page = 4096
    async with Endpoint(
        node="a",
        epoch=1,
        secret=SECRET,
        clock=SystemClock(),
        shm_dir=tmp_path if shared else None,
    ) as endpoint:
        region = endpoint.allocate(64 * page, name="arena")
        region.commit(page, 8 * page)
        if shared:
            found = (tmp_path / region.shm_name).stat()
            assert found.st_blocks * 512 >= 8 * page
        region.view[:] = b"x" * (64 * page)
        region.release(page + 1, 4 * page)
        # the first page of the range is not whole
        assert region.view[: 2 * page] == b"x" * (2 * page)
        if not shared or Path("/dev/shm") in tmp_path.parents:  # noqa: S108
            assert region.view[2 * page : 5 * page] == bytes(3 * page)
        assert region.view[5 * page :] == b"x" * (59 * page)
        for call in (region.commit, region.release):
            with pytest.raises(OutOfBounds):
                call(64 * page, 1)


def test_commit_says_when_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = Endpoint(
        node="a", epoch=1, secret=SECRET, clock=SystemClock(), shm_dir=tmp_path
    )
    region = endpoint.allocate(4096, name="arena")

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TransferError, match="No space left"):
        region.commit(0, 4096)
    endpoint.close_blocking()
