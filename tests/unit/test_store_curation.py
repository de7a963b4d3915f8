"""What people may ask a store of its blocks, and what it does about it."""

from dataclasses import replace

import msgspec
import pytest
from tests.unit.store_driver import CONDUCTOR, StoreDriver, lease_of

from kvtide.bus.messages import (
    BlockPage,
    BlocksDone,
    BlockSelector,
    Failure,
    ListBlocks,
    PinBlocks,
    PutGranted,
    RemoveBlocks,
    UnpinBlocks,
)
from kvtide.kv import BlockKey
from kvtide.store.curation import CurationRules
from kvtide.store.slot_states import TableRules
from kvtide.store.store_rules import StoreRules

KEYS = [BlockKey(bytes([number]) * 16) for number in range(1, 60)]
A, B = (name * 16 for name in (b"a", b"b"))
RULES = StoreRules(
    arena_bytes=8192,
    slab_bytes=4096,
    table=TableRules(hard_pin_share=0.5),
    curation=CurationRules(page_limit=3, scan_limit=5),
)


@pytest.fixture
def store() -> StoreDriver:
    """Room for eight blocks of the usual size."""
    return StoreDriver(RULES)


def put(store: StoreDriver, tenant: bytes, *keys: BlockKey) -> None:
    for key in keys:
        lease = lease_of("put")
        begin = store.put_begin(lease, [key])
        tags = replace(begin.tags, tenant=tenant)
        granted = store.answer(msgspec.structs.replace(begin, tags=tags))
        assert isinstance(granted, PutGranted)
        store.commit_all(lease, granted)
        store.release(lease)
    store.wait(0.05)


def done(
    store: StoreDriver, message: PinBlocks | UnpinBlocks | RemoveBlocks
) -> BlocksDone:
    """All pages of an order, added up."""
    total = BlocksDone(matched=0, changed=0)
    while True:
        answer = store.answer(message, CONDUCTOR)
        assert isinstance(answer, BlocksDone)
        total = BlocksDone(
            matched=total.matched + answer.matched,
            changed=total.changed + answer.changed,
            refused=total.refused + answer.refused,
        )
        if answer.next_key is None:
            store.wait(0.05)
            return total
        message = msgspec.structs.replace(message, after=answer.next_key)


def listed(store: StoreDriver, select: BlockSelector) -> list[BlockKey]:
    keys: list[BlockKey] = []
    after: BlockKey | None = None
    while True:
        page = store.answer(ListBlocks(select=select, after=after), CONDUCTOR)
        assert isinstance(page, BlockPage)
        assert len(page.blocks) <= RULES.curation.page_limit
        keys += [block.located.key for block in page.blocks]
        if page.next_key is None:
            return keys
        after = page.next_key


def test_blocks_are_listed_in_pages_and_by_what_is_asked(store: StoreDriver) -> None:
    put(store, A, *KEYS[:5])
    put(store, B, *KEYS[5:8])
    assert listed(store, BlockSelector()) == KEYS[:8]
    assert listed(store, BlockSelector(tenant=B)) == KEYS[5:8]
    model = (1000).to_bytes(16)
    assert listed(store, BlockSelector(model=model)) == KEYS[:8]
    assert listed(store, BlockSelector(model=bytes(16))) == []
    some = (KEYS[6], KEYS[20], KEYS[2], KEYS[2])
    assert listed(store, BlockSelector(keys=some)) == [KEYS[2], KEYS[6]]
    assert listed(store, BlockSelector(keys=some, tenant=A)) == [KEYS[2]]


def test_a_listing_says_what_keeps_a_block(store: StoreDriver) -> None:
    put(store, A, KEYS[0])
    one = BlockSelector(keys=(KEYS[0],))
    page = store.answer(ListBlocks(select=one), CONDUCTOR)
    assert isinstance(page, BlockPage)
    (before,) = page.blocks
    assert before.located == store.truth[KEYS[0]]
    assert (before.tenant, before.tokens) == (A, 64)
    assert (before.leases, before.hard, before.soft_ms) == (0, False, 0.0)
    assert (before.extra, before.uses, before.idle_ms) == (False, 0, None)
    inventory = store.machine.inventory
    inventory.warm([KEYS[0]], 0.0, store.now_s)
    inventory.mark_extra(0, extra=True)
    store.now_s += 2
    done(store, PinBlocks(select=one, seconds=10))
    done(store, PinBlocks(select=one, hard=True))
    granted = store.grant(lease_of("reader"), [None])
    assert granted
    page = store.answer(ListBlocks(select=one), CONDUCTOR)
    assert isinstance(page, BlockPage)
    (after,) = page.blocks
    assert after.hard
    assert after.extra
    assert after.soft_ms == pytest.approx(10_000, abs=200)
    assert after.uses == 1
    assert after.idle_ms == pytest.approx(2000, abs=200)


def test_a_tenants_pinned_blocks_outlast_a_flood(store: StoreDriver) -> None:
    put(store, A, *KEYS[:3])
    mine = BlockSelector(tenant=A)
    assert done(store, PinBlocks(select=mine, hard=True)) == BlocksDone(
        matched=3, changed=3
    )
    assert done(store, PinBlocks(select=mine, hard=True)).changed == 0
    put(store, A, *KEYS[10:40])
    assert set(KEYS[:3]) <= set(store.truth)
    assert done(store, UnpinBlocks(select=mine)).changed == 3
    put(store, A, *KEYS[40:50])
    assert not set(KEYS[:3]) & set(store.truth)


def test_hard_pins_leave_room_to_serve(store: StoreDriver) -> None:
    put(store, A, *KEYS[:8])
    outcome = done(store, PinBlocks(select=BlockSelector(tenant=A), hard=True))
    assert outcome == BlocksDone(matched=8, changed=4, refused=4)
    put(store, B, *KEYS[20:24])
    assert set(KEYS[20:24]) <= set(store.truth)


def test_soft_pins_end_by_themselves(store: StoreDriver) -> None:
    put(store, A, *KEYS[:2])
    some = BlockSelector(keys=tuple(KEYS[:2]))
    assert done(store, PinBlocks(select=some, seconds=30)).changed == 2
    put(store, A, *KEYS[10:30])
    assert set(KEYS[:2]) <= set(store.truth)
    store.wait(31)
    put(store, A, *KEYS[30:50])
    assert not set(KEYS[:2]) & set(store.truth)
    assert store.machine.inventory.table.first_hold_ends_s is None


def test_a_tenants_blocks_are_removed_and_all_hear_of_it(store: StoreDriver) -> None:
    put(store, A, *KEYS[:5])
    put(store, B, *KEYS[5:8])
    done(store, PinBlocks(select=BlockSelector(keys=(KEYS[0],)), hard=True))
    outcome = done(store, RemoveBlocks(select=BlockSelector(tenant=A)))
    assert (outcome.matched, outcome.changed) == (5, 5)
    assert set(store.truth) == set(KEYS[5:8])
    assert store.rows.keys() == store.truth.keys()
    counts = store.machine.inventory.table.counts()
    assert (counts.used, counts.reserved) == (3, 0)
    assert store.machine.tally.removed == 5
    assert len(store.machine.inventory.table.accounts) == 1


def test_whoever_reads_a_removed_block_still_has_it(store: StoreDriver) -> None:
    store.store(KEYS[0])
    readers = [lease_of(name) for name in ("one", "two")]
    for reader in readers:
        store.grant(reader, [KEYS[0]])
    done(store, RemoveBlocks(select=BlockSelector(keys=(KEYS[0],))))
    assert store.truth == {}
    assert store.machine.inventory.table.counts().used == 1
    store.release(readers[0])
    assert store.machine.inventory.table.counts().used == 1
    store.release(readers[1])
    assert store.machine.inventory.table.counts().used == 0


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (PinBlocks(select=BlockSelector(), hard=True), "too_wide"),
        (RemoveBlocks(select=BlockSelector()), "too_wide"),
        (PinBlocks(select=BlockSelector(tenant=A)), "bad_time"),
        (PinBlocks(select=BlockSelector(tenant=A), seconds=float("nan")), "bad_time"),
        (ListBlocks(select=BlockSelector(keys=tuple(KEYS[:6]))), "too_many_keys"),
    ],
)
def test_what_can_not_be_meant_is_refused(
    store: StoreDriver, message: PinBlocks | RemoveBlocks | ListBlocks, code: str
) -> None:
    answer = store.answer(message, CONDUCTOR)
    assert isinstance(answer, Failure)
    assert answer.code == code
