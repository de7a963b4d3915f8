"""What the SSD tier does in one situation each, on real files."""

from pathlib import Path

import pytest
from tests.unit.ssd_driver import (
    LARGE,
    SMALL,
    SsdDriver,
    key_of,
    lease_of,
    segment_file,
    tags_of,
)

from kvtide.bus.messages import BlocksStaged, LeaseRelease, Presence, PresenceReply
from kvtide.kv import BlockKey, Tier
from kvtide.store.machine import StoreRules
from kvtide.store.ssd.events import DeletedSpace, ReadRecord, Trouble, WriteRecord
from kvtide.store.ssd.format import FRAME_BYTES, PAGE_BYTES
from kvtide.store.ssd.health import TierState
from kvtide.store.ssd.rules import SsdRules

FOREVER_MS = 1 << 62


def rules(**ssd: float) -> StoreRules:
    limits = {
        "capacity_bytes": 512 * PAGE_BYTES,
        "segment_bytes": 32 * PAGE_BYTES,
        "write_bytes_per_s": 1e8,
        "dram_high": 0.5,
        "dram_low": 0.4,
        **ssd,
    }
    tier = SsdRules(**limits)  # type: ignore[arg-type] # sizes are whole numbers
    return StoreRules(arena_bytes=16 << 10, slab_bytes=4 << 10, ssd=tier)


@pytest.fixture
def store(tmp_path: Path) -> SsdDriver:
    return SsdDriver(tmp_path / "ssd", rules())


def demoted(store: SsdDriver, count: int = 8) -> list[BlockKey]:
    """Blocks that are on the SSD and nowhere else, coldest first."""
    number = 1
    while True:
        store.put([key_of(number)])
        store.quiet()
        number += 1
        there = [key for key, tier in store.truth if tier is Tier.SSD]
        if len(there) >= count:
            return there[:count]


# ---- out of DRAM, and back


def test_a_cold_block_is_on_the_ssd_before_it_leaves_dram(store: SsdDriver) -> None:
    keys = [key_of(number) for number in range(1, 20)]
    seen: set[BlockKey] = set()
    for key in keys:
        store.put([key])
        while store.pending:
            before = {each for each, _ in store.truth}
            store.step()
            store.wait(0.03)
            assert before <= {each for each, _ in store.truth}
        seen.add(key)
    assert {key for key, _ in store.truth} == seen
    assert store.machine.tally.evicted == 0


def test_presence_and_snapshots_know_both_tiers(store: SsdDriver) -> None:
    keys = demoted(store, 4)
    newest = max(key for key, tier in store.truth if tier is Tier.DRAM)
    chain = (keys[0], newest, keys[1], key_of(999), keys[2])
    reply = store.answers.pop(store.ask(Presence(keys=chain)))
    assert isinstance(reply, PresenceReply)
    tiers = [(each.key, each.slot.tier) for each in reply.located]
    assert tiers == [
        (keys[0], Tier.SSD),
        (newest, Tier.DRAM),
        (keys[1], Tier.SSD),
    ]


def test_all_who_ask_for_a_block_wait_for_one_read(store: SsdDriver) -> None:
    (key, *_) = demoted(store)
    leases = [lease_of(f"r{i}") for i in range(3)]
    tokens = [store.stage(lease, [key]) for lease in leases]
    assert [type(command) for command in store.pending] == [ReadRecord]
    store.settle()
    answers = [store.answers.pop(token) for token in tokens]
    there = [each.located for each in answers if isinstance(each, BlocksStaged)]
    assert len(there) == 3
    assert len(set(there)) == 1
    (located,) = there[0]
    assert located is not None
    assert store.holds(located)
    # pinned until the last of them is done
    for lease in leases[:2]:
        store.ask(LeaseRelease(lease=lease))
    assert store.holds(located)
    assert store.machine.load().pins == 1
    store.ask(LeaseRelease(lease=leases[2]))
    assert store.machine.load().pins == 0


def test_a_block_stays_in_dram_when_it_was_read_often_enough(store: SsdDriver) -> None:
    (key, *_) = demoted(store)
    assert store.read([key]) == [True]
    store.wait(0.1)
    assert (key, Tier.DRAM) not in store.truth
    assert store.read([key]) == [True]
    store.wait(0.1)
    assert (key, Tier.DRAM) in store.truth
    assert (key, Tier.SSD) in store.truth
    assert store.machine.tally.ssd_promoted == 1


def test_what_is_on_the_ssd_already_leaves_dram_unwritten(store: SsdDriver) -> None:
    (key, *_) = demoted(store)
    store.read([key])
    store.read([key])
    written = store.machine.tally.ssd_demoted
    others = [key_of(number) for number in range(100, 140)]
    for other in others:
        store.put([other])
        store.quiet()
    assert (key, Tier.DRAM) not in store.truth
    assert store.read([key]) == [True]
    demotions = store.machine.tally.ssd_demoted - written
    assert demotions <= len(others) + 12


def test_staging_takes_no_more_dram_than_its_share(tmp_path: Path) -> None:
    store = SsdDriver(tmp_path / "ssd", rules(stage_share=0.1))
    keys = demoted(store, 12)
    token = store.stage(lease_of("many"), keys)
    located = store.staged(token)
    limit = 0.1 * store.rules.arena_bytes
    assert store.machine.ssd.staging.staged_bytes <= limit
    assert 0 < sum(1 for each in located if each is not None) < len(keys)
    assert store.machine.tally.stage_refused > 0


def test_a_slow_device_means_a_miss_in_time(store: SsdDriver) -> None:
    (key, *_) = demoted(store)
    token = store.stage(lease_of("r"), [key])
    store.wait(1.5)
    answer = store.answers.pop(token)
    assert isinstance(answer, BlocksStaged)
    assert answer.located == (None,)
    # it came too late for that reader: nothing stays pinned
    store.settle()
    assert store.machine.load().pins == 0


def test_an_owner_that_went_away_meanwhile_gets_no_pin(store: SsdDriver) -> None:
    (key, *_) = demoted(store)
    lease = lease_of("r")
    store.stage(lease, [key])
    store.ask(LeaseRelease(lease=lease))
    store.settle()
    assert store.machine.load().pins == 0
    assert store.machine.ssd.staging.staged_bytes == 0


def test_writing_keeps_to_its_rate(tmp_path: Path) -> None:
    rate = 20 * PAGE_BYTES
    store = SsdDriver(tmp_path / "ssd", rules(write_bytes_per_s=rate))
    began_s = store.now_s
    for number in range(1, 60):
        store.put([key_of(number)])
        store.settle()
        store.wait(0.01)
    took_s = store.now_s - began_s
    burst = 0.25 * rate
    assert store.machine.tally.ssd_demoted_bytes <= rate * took_s + burst + PAGE_BYTES
    assert store.machine.tally.evicted > 0


# ---- bytes that are not what they were


@pytest.mark.parametrize(
    "at",
    [
        0,
        9,
        FRAME_BYTES + 5,
        FRAME_BYTES + SMALL.header_bytes - 70,
        FRAME_BYTES + SMALL.header_bytes + 1,
        FRAME_BYTES + SMALL.slot_bytes - 1,
    ],
    ids=["checksum", "magic", "header", "part table", "first part", "last byte"],
)
def test_a_bit_that_turned_is_a_miss_and_the_record_goes(
    store: SsdDriver, at: int
) -> None:
    (key, *others) = demoted(store)
    before = store.edit(store.place(key), at, b"\0")
    store.edit(store.place(key), at, bytes([before[0] ^ 1]))
    assert store.read([key, *others[:2]]) == [False, True, True]
    assert store.machine.tally.ssd_corrupt == 1
    store.wait(0.1)
    assert (key, Tier.SSD) not in store.truth
    store.settle()
    store.stop()
    store.start()
    assert (key, Tier.SSD) not in store.truth
    assert (others[0], Tier.SSD) in store.truth


@pytest.mark.parametrize("skip", [0, FRAME_BYTES, FRAME_BYTES + SMALL.header_bytes])
def test_two_equal_sized_blocks_swapped_are_two_misses(
    store: SsdDriver, skip: int
) -> None:
    """Whole records, images, or parts alone."""
    (one, other, *rest) = demoted(store)
    places = [store.place(one), store.place(other)]
    size = places[0].length - skip
    first = store.edit(places[0], skip, bytes(size))
    second = store.edit(places[1], skip, first)
    store.edit(places[0], skip, second)
    assert store.read([one, other, rest[0]]) == [False, False, True]
    assert store.machine.tally.ssd_corrupt == 2


def test_bad_bytes_in_dram_are_not_demoted(store: SsdDriver) -> None:
    keys = [key_of(number) for number in range(1, 9)]
    for key in keys:
        store.put([key])
    store.wait(0.1)
    (slot,) = {
        located.slot.offset
        for (key, tier), located in store.truth.items()
        if key == keys[0] and tier is Tier.DRAM
    }
    store.arena[slot + 200] ^= 1
    for number in range(10, 40):
        store.put([key_of(number)])
        store.quiet()
    assert not store.on_ssd(keys[0])
    assert store.machine.tally.bad_copies == 1
    assert (keys[0], Tier.DRAM) not in store.truth


def test_a_file_that_is_gone_or_short_is_a_miss(store: SsdDriver) -> None:
    (key, other, last, *_) = demoted(store)
    assert store.place(key).segment == store.place(last).segment
    path = segment_file(store.path, store.place(key).segment)
    with path.open("r+b") as file:
        file.truncate(store.place(last).offset + PAGE_BYTES // 2)
    assert store.read([key, last]) == [True, False]
    path.unlink()
    assert store.read([other]) == [False]
    assert store.machine.tally.ssd_read_errors == 2


# ---- ends of lives


@pytest.mark.parametrize(
    "written",
    [0, 7, 40, FRAME_BYTES + 100, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 200],
)
def test_a_torn_write_is_never_announced(store: SsdDriver, written: int) -> None:
    there = demoted(store, 3)
    number = 500
    write: WriteRecord | None = None
    while write is None:
        store.put([key_of(number)], LARGE)
        number += 1
        while store.pending and write is None:
            first = store.pending[0]
            if isinstance(first, WriteRecord) and first.wanted.key[-1] > 200:
                write = first
            else:
                store.step()
    store.tear(write, written)
    torn = write.wanted.key
    store.stop()
    store.start()
    store.wait(0.1)
    known = {key for key, _ in store.truth}
    assert set(there) <= known
    assert torn not in known
    assert all(tier is Tier.SSD for _, tier in store.truth)


def test_epochs_are_those_of_the_new_life(store: SsdDriver) -> None:
    there = demoted(store)
    store.stop()
    store.start()
    assert {each.slot.epoch for each in store.truth.values()} == {2}
    assert store.read(there[:2]) == [True, True]


def test_a_tenant_that_was_deleted_stays_deleted(store: SsdDriver) -> None:
    for number in range(1, 60):
        store.put([key_of(number)], tenant=number % 2)
        store.quiet()
    deleted = DeletedSpace(tags_of(1).tenant, None, FOREVER_MS)
    for command in store.machine.ssd.delete(deleted, store.now_s):
        store.pending.append(command)  # type: ignore[arg-type]
    store.settle()
    store.wait(0.1)
    assert not any(tier is Tier.SSD and key[-1] % 2 == 1 for key, tier in store.truth)
    for _ in range(2):
        store.stop()
        store.start()
        assert store.truth
        assert not any(key[-1] % 2 == 1 for key, _ in store.truth)


def test_the_directory_of_another_node_or_format_is_left_alone(
    store: SsdDriver,
) -> None:
    there = demoted(store)
    store.stop()
    page = (store.path / "superblock").read_bytes()
    other = page.replace(b"store", b"stare")
    (store.path / "superblock").write_bytes(other)
    store.start()
    assert store.machine.ssd.health.state is TierState.OUT
    assert "superblock" in store.machine.ssd.health.reason
    store.stop()
    (store.path / "superblock").write_bytes(page)
    store.start()
    assert (there[0], Tier.SSD) in store.truth


def test_two_processes_never_share_a_directory(store: SsdDriver) -> None:
    demoted(store)
    second = SsdDriver(store.path, store.rules)
    assert second.machine.ssd.health.state is TierState.OUT
    store.stop()
    second.wait(2)
    assert second.machine.ssd.health.state is TierState.READY
    assert any(tier is Tier.SSD for _, tier in second.truth)


# ---- trouble


def test_reads_that_fail_again_and_again_put_the_tier_out(store: SsdDriver) -> None:
    keys = demoted(store, 6)
    for key in keys[:3]:
        store.stage(lease_of("r"), [key])
        store.fail(0, Trouble.UNREADABLE)
    assert store.machine.ssd.health.state is TierState.OUT
    store.wait(0.1)
    assert not any(tier is Tier.SSD for _, tier in store.truth)
    store.wait(5)
    assert store.machine.ssd.health.state is TierState.READY
    assert store.read(keys[3:5]) == [True, True]


def test_one_unreadable_record_costs_one_block(store: SsdDriver) -> None:
    keys = demoted(store, 6)
    token = store.stage(lease_of("r"), keys[:1])
    store.fail(0, Trouble.UNREADABLE)
    assert store.answers.pop(token) == BlocksStaged(located=(None,))
    assert store.machine.ssd.health.state is TierState.READY
    assert store.read(keys[1:3]) == [True, True]


def test_segments_are_cleaned_and_the_account_stays_within_its_capacity(
    tmp_path: Path,
) -> None:
    store = SsdDriver(tmp_path / "ssd", rules(capacity_bytes=64 * PAGE_BYTES))
    for number in range(1, 150):
        store.put([key_of(number)], LARGE if number % 3 else SMALL)
        store.quiet()
    counts = store.machine.ssd.books.segments.counts()
    tally = store.machine.tally
    assert counts.free >= 0
    assert tally.ssd_compacted_bytes > 0
    assert tally.ssd_evicted > 0
    on_disk = sum(path.stat().st_size for path in store.path.glob("*.seg"))
    assert on_disk <= counts.total
    assert all(store.read([key]) == [True] for key, _ in list(store.truth)[:10])
