"""Reads that are over when they return: right, or left to those that can say what is wrong."""

import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from xxhash import xxh3_64_intdigest

from kvtide.runtime import SystemClock
from kvtide.transfer import Access, Endpoint, Operation, ReadSlice
from kvtide.transfer.near import Near
from kvtide.transfer.shm import Attached, attach, create

SIZE = 512 << 10
DATA = bytes(range(251)) * (SIZE // 251 + 1)


class Rig:
    """Shared memory with known bytes, and a reader of it that can be cut off."""

    def __init__(self, folder: Path) -> None:
        self.file = create(folder, SIZE)
        self.file.commit(0, SIZE)
        self.file.mapping[:] = DATA[:SIZE]
        self.memory: Attached | None = attach(
            folder, self.file.name, SIZE, writable=False
        )
        self.counted: list[int] = []
        self.near = Near(lambda: self.memory, SIZE, self.counted.append)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("shm"))
    yield made
    made.file.dispose()


@given(
    offset=st.integers(0, SIZE),
    lengths=st.lists(
        st.integers(1, 3000) | st.integers(60 << 10, 130 << 10), max_size=9
    ),
    backwards=st.booleans(),
)
def test_what_is_read_is_what_lies_there(
    rig: Rig, offset: int, lengths: list[int], *, backwards: bool
) -> None:
    memory = memoryview(bytearray(sum(lengths)))
    places = [sum(lengths[:at]) for at in range(len(lengths))]
    targets = [
        memory[at : at + length] for at, length in zip(places, lengths, strict=True)
    ]
    if backwards:
        targets.reverse()
        lengths.reverse()
    xxh3 = rig.near.read(offset, targets)
    if not lengths or offset + sum(lengths) > SIZE:
        assert xxh3 is None
        return
    assert xxh3 == [xxh3_64_intdigest(target) for target in targets]
    assert b"".join(targets) == DATA[offset : offset + sum(lengths)]


def apart(memory: memoryview) -> list[memoryview]:
    return [memory[0:100], memory[200:300]]


def overlapping(memory: memoryview) -> list[memoryview]:
    return [memory[0:100], memory[200:300], memory[99:199]]


def empty(memory: memoryview) -> list[memoryview]:
    return [memory[0:100], memory[200:200]]


def of_words(memory: memoryview) -> list[memoryview]:
    return [memory[0:400].cast("I"), memory[400:500]]


def with_gaps(memory: memoryview) -> list[memoryview]:
    return [memory[0:100:2], memory[200:300]]


def read_only(memory: memoryview) -> list[memoryview]:
    return [memory[0:100], memory[200:300].toreadonly()]


def long_words(memory: memoryview) -> list[memoryview]:
    return [memory[: 160 << 10].cast("I"), memory[160 << 10 :][: 70 << 10]]


@pytest.mark.parametrize(
    ("targets", "offset", "known"),
    [
        (apart, 0, True),
        (apart, SIZE - 200, True),
        (apart, SIZE - 199, False),
        (apart, -1, False),
        (overlapping, 0, False),
        (empty, 0, False),
        (of_words, 0, False),
        (with_gaps, 0, False),
        (read_only, 0, False),
        (long_words, 0, False),
    ],
)
def test_where_there_is_something_to_say_it_is_not_said_here(
    rig: Rig,
    targets: Callable[[memoryview], list[memoryview]],
    offset: int,
    *,
    known: bool,
) -> None:
    memory = memoryview(mmap.mmap(-1, 256 << 10))
    assert (rig.near.read(offset, targets(memory)) is not None) == known


def test_who_is_cut_off_reads_nothing(rig: Rig) -> None:
    kept, rig.memory = rig.memory, None
    target = memoryview(bytearray(10))
    assert rig.near.read(0, [target]) is None
    assert rig.near.peek(0, 10) is None
    assert bytes(target) == bytes(10)
    rig.memory = kept
    assert rig.near.peek(3, 10) == DATA[3:13]


def test_a_mapping_shorter_than_its_handle_is_not_left(rig: Rig) -> None:
    near = Near(lambda: rig.memory, 2 * SIZE, rig.counted.append)
    assert near.read(SIZE - 5, [memoryview(bytearray(6))]) is None
    assert near.peek(SIZE - 5, 6) is None
    assert near.peek(SIZE - 5, 5) == DATA[SIZE - 5 : SIZE]


def test_bytes_are_counted_once_at_the_end(rig: Rig) -> None:
    rig.counted.clear()
    with Near(lambda: rig.memory, SIZE, rig.counted.append) as near:
        near.read(0, apart(memoryview(bytearray(300))))
        near.read(0, overlapping(memoryview(bytearray(300))))
        near.peek(5, 7)
    near.close()
    assert rig.counted == [207]


class Notes:
    """An observer that keeps what it hears of reads."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, str, int]] = []

    def transferred(
        self,
        path: str,
        purpose: str,
        operation: Operation,
        nbytes: int,
        seconds: float,
    ) -> None:
        assert operation is Operation.READ
        assert seconds >= 0
        self.reads.append((path, purpose, nbytes))

    def failed(self, path: str, purpose: str, operation: Operation, kind: str) -> None:
        pytest.fail(f"{path} {purpose} {operation} {kind}")

    def retried(self, path: str, purpose: str, reason: str) -> None:
        pytest.fail(f"{path} {purpose} {reason}")

    def served(
        self, path: str, purpose: str, operation: Operation, nbytes: int
    ) -> None:
        del path, purpose, operation, nbytes

    def refused(self, reason: str) -> None:
        pytest.fail(reason)


async def test_a_peer_is_near_from_its_first_read_to_its_end(tmp_path: Path) -> None:
    notes, clock = Notes(), SystemClock()

    def make(node: str, observer: Notes | None = None) -> Endpoint:
        return Endpoint(
            node=node,
            epoch=1,
            secret=b"a secret of this test",
            clock=clock,
            shm_dir=tmp_path,
            observer=observer,
        )

    async with make("owner") as owner, make("reader", notes) as reader:
        region = owner.allocate(SIZE, name="arena")
        region.view[:] = DATA[:SIZE]
        handle = region.handle()
        peer = await reader.connect(owner.address)
        assert peer.near(handle, purpose="reuse") is None
        into = memoryview(bytearray(100))
        await peer.read([ReadSlice(handle, 0, into)], timeout_s=10, purpose="first")
        near = peer.near(handle, purpose="reuse")
        assert near is not None
        assert near.read(7, [into]) == [xxh3_64_intdigest(DATA[7:107])]
        for other in (
            replace(handle, epoch=2),
            replace(handle, node="another"),
            replace(handle, capability=bytes(len(handle.capability))),
            region.handle(Access.READ, ttl_s=60.0),
        ):
            assert peer.near(other, purpose="reuse") is None
        peer.close()
        assert near.read(7, [into]) is None
        assert peer.near(handle, purpose="reuse") is None
        near.close()
    assert notes.reads == [("shm", "first", 100), ("shm", "reuse", 100)]
