"""A put: parts into slots, checksums, and the end that no write outlives."""

import asyncio
import threading

import pytest
from xxhash import xxh3_64_intdigest

from kvtide.bus.messages import BlockState, CommitBlock, PutBlock, PutSlot
from kvtide.kv import (
    PRIVATE_KEY,
    BlockHeader,
    BlockKey,
    Layout,
    Lease,
    Located,
    NodeId,
    NodeRef,
    RequestId,
    SlotRef,
    SpaceTags,
    Tier,
)
from kvtide.pool import Put, PutClosed
from kvtide.pool.ledger import Ledger
from kvtide.pool.put import PutSpec

LAYOUT = Layout(layers=1, kv_heads=1, head_dim=8, kv_dtype="bfloat16", block_tokens=16)
TAGS = SpaceTags(0, b"m" * 16, b"l" * 16, b"t" * 16)
LEASE = Lease(RequestId("r"), 1, NodeRef(NodeId("w"), 1))
KEY = BlockKey(b"k" * 16)


def slot(number: int) -> SlotRef:
    offset = number * LAYOUT.slot_bytes
    return SlotRef(NodeId("s"), 1, Tier.DRAM, 0, offset, LAYOUT.slot_bytes, 40 + number)


class Rig:
    """A put of a full keyed block, a short private one, one that exists, one without."""

    def __init__(self, answers: list[BlockState] | None = None) -> None:
        self.arena = bytearray(2 * LAYOUT.slot_bytes)
        self.committed: list[CommitBlock] = []
        self.answers = answers
        self.nbytes = 0.0
        existing = Located(KEY, slot(7), 9)
        spec = PutSpec(
            lease=LEASE,
            tags=TAGS,
            layout=LAYOUT,
            blocks=[
                PutBlock(KEY, 16),
                PutBlock(None, 5),
                PutBlock(KEY, 16),
                PutBlock(KEY, 16),
            ],
            slots=(
                PutSlot(slot(0)),
                PutSlot(slot(1)),
                PutSlot(None, existing),
                PutSlot(None),
            ),
            existing=[None, None, (1, 2), None],
            arenas=[memoryview(self.arena)],
        )
        self.put = Put(spec, self.commit, self.release, self.count)

    async def commit(
        self, blocks: tuple[CommitBlock, ...], _timeout_s: float
    ) -> list[BlockState]:
        self.committed += blocks
        return self.answers or [BlockState.STORED] * len(blocks)

    async def release(self, put: Put) -> None:
        put.close("it was released")

    def count(self, nbytes: float) -> None:
        self.nbytes += nbytes

    def fill(self, i: int, tokens: int) -> list[bytes]:
        parts = [bytes([10 * i + part]) * (tokens * 16) for part in range(2)]
        for part, data in enumerate(parts):
            xxh3 = self.put.write_part(i, part, memoryview(data))
            assert xxh3 == xxh3_64_intdigest(data)
        return parts


def test_where_blocks_can_be_read_and_written() -> None:
    put = Rig().put
    assert [put.ref(i) for i in range(4)] == [slot(0), slot(1), slot(7), None]
    assert [put.writable(i) for i in range(4)] == [True, True, False, False]
    assert [put.sums(i) for i in range(4)] == [None, None, (1, 2), None]


async def test_what_is_written_lies_in_its_slot_under_its_header() -> None:
    rig = Rig()
    full, short = rig.fill(0, 16), rig.fill(1, 5)
    assert await rig.put.commit() == (BlockState.STORED, BlockState.STORED, None, None)
    for number, parts, key in ((0, full, KEY), (1, short, PRIVATE_KEY)):
        start = number * LAYOUT.slot_bytes
        raw = bytes(rig.arena[start : start + LAYOUT.header_bytes])
        assert rig.committed[number] == CommitBlock(
            slot(number), xxh3_64_intdigest(raw)
        )
        header = BlockHeader.decode(raw)
        header.check(key=key, tags=TAGS, generation=40 + number, layout=LAYOUT)
        for part, entry in enumerate(header.parts):
            at = start + entry.offset
            assert bytes(rig.arena[at : at + entry.length]) == parts[part]
            assert entry.xxh3 == xxh3_64_intdigest(parts[part])
    assert rig.nbytes == 2 * 16 * (16 + 5)
    # nothing is offered twice
    assert await rig.put.commit() == (None,) * 4


async def test_parts_that_are_written_together_are_as_those_one_by_one() -> None:
    single, together = Rig(), Rig()
    parts = single.fill(0, 16)
    assert together.put.write_parts(0, 0, list(map(memoryview, parts))) == [
        xxh3_64_intdigest(part) for part in parts
    ]
    for rig in (single, together):
        await rig.put.commit()
    assert together.arena == single.arena
    assert together.committed == single.committed
    assert together.nbytes == single.nbytes


def test_parts_are_written_together_or_not_at_all() -> None:
    rig = Rig()
    before = bytes(rig.arena)
    part, short = memoryview(bytes(range(256))), memoryview(bytes(255))
    for first, data in ((0, [part, short]), (1, [part, part]), (-1, [part])):
        with pytest.raises(ValueError, match=r"bytes|slot"):
            rig.put.write_parts(0, first, data)
    assert bytes(rig.arena) == before
    rig.put.write_parts(0, 1, [part])
    with pytest.raises(ValueError, match="already"):
        rig.put.write_parts(0, 0, [part, part])
    rig.put.write_parts(0, 0, [part])
    assert rig.put.sums(0) == (xxh3_64_intdigest(part),) * 2


@pytest.mark.parametrize(
    ("i", "part", "length"), [(0, 0, 255), (0, 2, 256), (0, -1, 256), (3, 0, 256)]
)
def test_a_write_outside_is_refused(i: int, part: int, length: int) -> None:
    with pytest.raises(ValueError, match=r"bytes|slot"):
        Rig().put.write_part(i, part, memoryview(bytes(length)))


async def test_nothing_is_written_after_the_end() -> None:
    rig = Rig()
    rig.fill(0, 16)
    before = bytes(rig.arena)
    await rig.put.release()
    for i in (0, 1):
        with pytest.raises(PutClosed):
            rig.put.write_part(i, 0, memoryview(bytes(256 if i == 0 else 80)))
    with pytest.raises(PutClosed):
        await rig.put.commit()
    assert bytes(rig.arena) == before


async def test_a_stale_answer_ends_the_put() -> None:
    rig = Rig([BlockState.STALE])
    rig.fill(0, 16)
    assert (await rig.put.commit())[0] is BlockState.STALE
    with pytest.raises(PutClosed):
        rig.put.write_part(1, 0, memoryview(bytes(80)))


async def test_writers_in_threads_race_with_the_end() -> None:
    """Whoever got in finishes before the end is reported, and nobody after it."""
    for _ in range(50):
        rig = Rig()
        start = threading.Barrier(3)

        def write(i: int, put: Put = rig.put, start: threading.Barrier = start) -> None:
            start.wait()
            for part in range(2):
                try:
                    put.write_part(i, part, memoryview(b"\1" * (256 if i == 0 else 80)))
                except PutClosed:
                    return

        threads = [threading.Thread(target=write, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(start.wait)
        rig.put.close("test")
        assert await asyncio.to_thread(rig.put.wait_quiet, 5.0)
        before = bytes(rig.arena)
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert bytes(rig.arena) == before


def test_a_lease_ends_with_its_last_put() -> None:
    ledger = Ledger()
    other = Lease(RequestId("q"), 1, LEASE.owner)
    for lease in (LEASE, LEASE, other):
        ledger.open(lease)
    assert [ref.request for ref in ledger.requests()] == ["r", "q"]
    assert [ledger.close(LEASE), ledger.close(LEASE), ledger.close(LEASE)] == [
        False,
        True,
        False,
    ]
    assert [ref.request for ref in ledger.requests()] == ["q"]
    ledger.clear()
    assert not ledger.close(other)
    assert ledger.puts == 0
