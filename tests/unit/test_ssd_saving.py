"""Blocks that only DRAM has are written ahead of need, and at a clean stop."""

from pathlib import Path

import pytest
from tests.unit.ssd_driver import SMALL, SsdDriver, key_of, tags_of

from kvtide.kv import BlockKey, Tier
from kvtide.store.events import Flush
from kvtide.store.machine import StoreRules
from kvtide.store.ssd.events import DeletedSpace, SealSegment, Trouble, WriteRecord
from kvtide.store.ssd.format import PAGE_BYTES
from kvtide.store.ssd.rules import SsdRules

FOREVER_MS = 1 << 62
ARENA = 16 << 10


def rules(**ssd: float) -> StoreRules:
    limits = {
        "capacity_bytes": 512 * PAGE_BYTES,
        "segment_bytes": 32 * PAGE_BYTES,
        "write_bytes_per_s": 1e8,
        "dram_high": 0.9,
        "dram_low": 0.8,
        "save_s": 1.0,
        **ssd,
    }
    tier = SsdRules(**limits)  # type: ignore[arg-type] # sizes are whole numbers
    return StoreRules(arena_bytes=ARENA, slab_bytes=4 << 10, ssd=tier)


@pytest.fixture
def store(tmp_path: Path) -> SsdDriver:
    return SsdDriver(tmp_path / "ssd", rules())


def chain(first: int, count: int = 4) -> list[BlockKey]:
    return [key_of(number) for number in range(first, first + count)]


def in_both(store: SsdDriver, keys: list[BlockKey]) -> list[bool]:
    return [(k, Tier.DRAM) in store.truth and store.on_ssd(k) for k in keys]


def victims(store: SsdDriver) -> list[BlockKey | None]:
    """What would be evicted, in this order; the tier is not asked any more."""
    table, gone = store.machine.inventory.table, list[BlockKey | None]()
    while slots := table.victims(SMALL.slot_bytes):
        gone += [table.key[slot] for slot in slots]
        for slot in slots:
            table.pin(slot)
    return gone


def test_what_is_old_enough_is_saved_and_stays_where_it_was(store: SsdDriver) -> None:
    keys = chain(1)
    store.put(keys)
    store.wait(0.9)
    assert store.pending == []
    store.wait(0.2)
    store.quiet()
    assert in_both(store, keys) == [True] * 4
    assert store.machine.tally.ssd_saved == 4
    assert store.machine.tally.ssd_demoted == 0
    assert store.machine.load().pins == 0
    # as they were put and let go: the tail goes first
    assert victims(store) == keys[::-1]


def test_the_head_of_a_chain_is_written_first(store: SsdDriver) -> None:
    store.put(chain(1))
    store.wait(1.1)
    written: list[BlockKey] = []
    while store.pending:
        command = store.step()
        if isinstance(command, WriteRecord):
            written.append(command.wanted.key)
    assert written == chain(1)


def test_killed_it_serves_prefixes_that_were_only_in_dram(store: SsdDriver) -> None:
    store.put(chain(1))
    store.wait(1.1)
    store.quiet()
    store.put(chain(11))
    store.stop()
    store.start()
    store.quiet()
    assert [store.on_ssd(key) for key in chain(1)] == [True] * 4
    assert [store.on_ssd(key) for key in chain(11)] == [False] * 4
    assert store.read(chain(1)) == [True] * 4


def test_saved_blocks_leave_dram_at_once_in_a_burst(tmp_path: Path) -> None:
    """However slow the SSD is, nothing is lost that was saved."""
    slow = rules(write_bytes_per_s=40 * PAGE_BYTES)
    store = SsdDriver(tmp_path / "ssd", slow)
    count = ARENA // SMALL.slot_bytes // 2
    keys = chain(1, count)
    store.put(keys)
    store.wait(30)
    store.quiet()
    for number in range(100, 100 + 4 * count):
        store.put([key_of(number)])
    assert all(key in {each for each, _ in store.truth} for key in keys)


def test_a_block_that_goes_while_it_is_saved_counts_if_it_was_right(
    store: SsdDriver,
) -> None:
    (key, other) = chain(1, 2)
    store.put([key, other])
    store.wait(1.1)
    inventory = store.machine.inventory
    slot = inventory.index.get(key)
    assert slot is not None
    inventory.evict(slot, "evicted", store.now_s)
    start = inventory.table.offset(slot)
    before = bytes(store.arena[start : start + SMALL.slot_bytes])
    store.step()
    assert store.on_ssd(key)
    # this one is overwritten before it is copied
    slot = inventory.index.get(other)
    assert slot is not None
    inventory.evict(slot, "evicted", store.now_s)
    start = inventory.table.offset(slot)
    store.arena[start : start + SMALL.slot_bytes] = before
    store.quiet()
    assert not store.on_ssd(other)
    assert store.machine.tally.bad_copies == 0
    assert store.machine.load().quarantined_slots == 0
    assert store.read([key]) == [True]


def test_memory_is_not_given_back_while_a_block_is_copied(tmp_path: Path) -> None:
    store = SsdDriver(tmp_path / "ssd", rules())
    store.put(chain(1, 2))
    store.wait(1.1)
    inventory = store.machine.inventory
    inventory.limit_memory(0, store.now_s)
    assert inventory.table.backed_bytes > 0
    store.quiet()
    inventory.limit_memory(0, store.now_s)
    assert inventory.table.backed_bytes == 0


def test_bad_bytes_in_dram_are_found_when_they_are_saved(store: SsdDriver) -> None:
    (key,) = chain(1, 1)
    store.put([key])
    slot = store.machine.inventory.index.get(key)
    assert slot is not None
    store.arena[store.machine.inventory.table.offset(slot) + SMALL.slot_bytes - 1] ^= 1
    store.wait(1.1)
    store.quiet()
    assert not store.on_ssd(key)
    assert (key, Tier.DRAM) not in store.truth
    assert store.machine.tally.bad_copies == 1


def test_what_was_deleted_while_it_was_saved_is_gone(store: SsdDriver) -> None:
    (key,) = chain(1, 1)
    store.put([key])
    store.wait(1.1)
    deleted = DeletedSpace(tags_of().tenant, None, FOREVER_MS)
    for command in store.machine.ssd.delete(deleted, store.now_s):
        store.obey(command)
    store.settle()
    assert not store.on_ssd(key)
    store.stop()
    store.start()
    store.quiet()
    assert not store.on_ssd(key)


def test_a_block_that_could_not_be_saved_is_tried_again(store: SsdDriver) -> None:
    (key,) = chain(1, 1)
    store.put([key])
    store.wait(1.1)
    store.fail(0, Trouble.UNWRITABLE)
    assert not store.on_ssd(key)
    store.wait(20)
    store.quiet()
    assert in_both(store, [key]) == [True]


def test_a_small_ssd_is_not_filled_with_what_dram_has(tmp_path: Path) -> None:
    tight = rules(capacity_bytes=48 * PAGE_BYTES, segment_bytes=4 * PAGE_BYTES)
    store = SsdDriver(tmp_path / "ssd", tight)
    store.put(chain(1, 12))
    for number in range(100, 130):
        store.put([key_of(number)])
        store.wait(2)
        store.quiet()
    tally, segments = store.machine.tally, store.machine.ssd.books.segments
    assert tally.ssd_saved > 0
    assert segments.used_bytes <= 0.85 * segments.capacity_bytes


# ---- a clean stop


def test_a_clean_stop_writes_what_dram_alone_has(tmp_path: Path) -> None:
    store = SsdDriver(tmp_path / "ssd", rules(save_s=0, write_bytes_per_s=1))
    store.put(chain(1, 8))
    store.wait(5)
    assert store.pending == []
    store.handle(Flush())
    assert not store.machine.ssd.flushed
    sealed = False
    while store.pending:
        sealed |= isinstance(store.step(), SealSegment)
    assert store.machine.ssd.flushed
    assert sealed
    store.stop()
    store.start()
    store.quiet()
    assert [store.on_ssd(key) for key in chain(1, 8)] == [True] * 8


def test_a_stop_does_not_wait_for_an_ssd_that_can_not_be_written(
    store: SsdDriver,
) -> None:
    store.put(chain(1, 3))
    store.handle(Flush())
    assert not store.machine.ssd.flushed
    while store.pending:
        store.fail(0, Trouble.GONE)
    assert store.machine.ssd.flushed


def test_without_an_ssd_there_is_nothing_to_flush(tmp_path: Path) -> None:
    store = SsdDriver(tmp_path / "ssd", StoreRules(ARENA, slab_bytes=4 << 10))
    store.put(chain(1, 3))
    store.handle(Flush())
    assert store.machine.ssd.flushed
