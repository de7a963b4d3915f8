"""Tenants share the arena: a flood of one evicts its own, and nothing lies idle."""

import random
from dataclasses import dataclass, field

import pytest
from tests.unit.store_driver import STORE

from kvtide.kv import BlockKey, SpaceTags
from kvtide.store.accounts import ShareRules
from kvtide.store.eviction import Policy
from kvtide.store.inventory import Inventory
from kvtide.store.slot_states import TableRules
from kvtide.store.slots import SlotTable
from kvtide.store.spaces import Space
from kvtide.store.tally import Tally

SLOT = 1 << 10
A, B, C = (name * 16 for name in (b"a", b"b", b"c"))


@dataclass
class Pool:
    """An arena of ``slots`` blocks of 1 KiB that tenants use and fill."""

    slots: int
    rules: TableRules = field(default_factory=TableRules)
    now_s: float = 100.0
    hits: dict[bytes, int] = field(default_factory=dict[bytes, int])

    def __post_init__(self) -> None:
        arena = self.slots * SLOT
        table = SlotTable(arena, self.rules, slab_bytes=8 * SLOT)
        self.inventory = Inventory(STORE, table, Tally())

    def use(self, tenant: bytes, number: int, size: int = SLOT) -> bool:
        """A block is used if it is here, else put; whether it was or could be."""
        inventory = self.inventory
        key = BlockKey(tenant[:8] + number.to_bytes(8, "big"))
        if inventory.index.get(key) is not None:
            inventory.warm([key], 0.0, self.now_s)
            self.hits[tenant] = self.hits.get(tenant, 0) + 1
            return True
        space = Space(SpaceTags(0, bytes(16), bytes(16), tenant), size, 192)
        slot = inventory.reserve(space, key, 16, self.now_s)
        if slot is None:
            return False
        inventory.admit(slot, 1, self.now_s)
        return True

    def has(self, tenant: bytes) -> int:
        account = self.inventory.table.accounts.find(tenant)
        return 0 if account is None else account.used_bytes // SLOT


def shares(**values: object) -> TableRules:
    return TableRules(shares=ShareRules(**values))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("policy", [Policy.LRU, Policy.S3_FIFO])
def test_a_flood_never_lowers_the_hits_of_who_stays_within_its_share(
    policy: Policy,
) -> None:
    pool = Pool(128, TableRules(policy=policy))
    draw = random.Random(1)  # noqa: S311 - repeatable
    for number in range(60):
        pool.use(B, number)
    for flood in range(4000):
        pool.use(A, flood)
        if flood % 50 == 0:
            pool.use(B, draw.randrange(60))
    assert pool.hits[B] == 80
    assert pool.has(B) == 60
    assert pool.has(A) == 68


def test_who_wants_more_than_a_share_still_has_all_of_it() -> None:
    pool = Pool(128)
    for number in range(2000):
        pool.use(A, number)
        pool.use(B, number % 100)
    # within the step between two levels
    assert 60 <= pool.has(B) <= 68
    assert pool.has(A) + pool.has(B) == 128


def test_what_one_does_not_use_the_others_have() -> None:
    pool = Pool(120)
    for number in range(500):
        pool.use(A, number)
    assert pool.has(A) == 120
    for number in range(10):
        pool.use(B, number)
    for number in range(500, 1000):
        pool.use(A, number)
        pool.use(C, number)
    assert pool.has(B) == 10
    assert 52 <= pool.has(A) <= 58
    assert pool.has(A) + pool.has(C) == 110


def test_weights_divide_the_room() -> None:
    pool = Pool(120, shares(weights={A: 3.0}))
    for number in range(2000):
        pool.use(A, number)
        pool.use(B, number)
    assert 86 <= pool.has(A) <= 94


def test_who_was_silent_for_long_has_no_share() -> None:
    pool = Pool(100, shares(idle_s=60.0))
    for number in range(40):
        pool.use(B, number)
    for number in range(200):
        pool.use(A, number)
    assert pool.has(B) == 40
    pool.now_s += 61
    pool.use(A, 0)
    pool.inventory.table.end_holds(pool.now_s)
    for number in range(200, 230):
        pool.use(A, number)
    assert pool.has(B) < 15
    # it is back: what is left is its own again
    pool.use(B, 39)
    left = pool.has(B)
    for number in range(300, 500):
        pool.use(A, number)
    assert pool.has(B) == left


def test_a_limit_holds_while_there_is_room() -> None:
    pool = Pool(100, shares(limits_bytes={A: 10 * SLOT}))
    for number in range(50):
        assert pool.use(A, number)
    assert pool.has(A) == 10
    assert pool.inventory.table.counts().used == 10
    assert not pool.use(A, 1000, size=11 * SLOT)


def test_a_tenant_at_its_limit_with_all_pinned_gets_no_more() -> None:
    pool = Pool(100, shares(limits_bytes={A: 4 * SLOT}))
    for number in range(4):
        pool.use(A, number)
    for slot in range(4):
        pool.inventory.table.pin(slot)
    assert not pool.use(A, 4)
    assert pool.use(B, 1)
    assert len(pool.inventory.spaces) == 2


def test_without_fair_shares_the_longest_unused_goes_whoever_has_it() -> None:
    pool = Pool(100, shares(fair=False))
    for number in range(60):
        pool.use(B, number)
    for number in range(100):
        pool.use(A, number)
    assert (pool.has(A), pool.has(B)) == (100, 0)


def test_another_size_takes_no_slab_of_who_has_less() -> None:
    pool = Pool(128)
    for number in range(48):
        pool.use(B, number)
    for number in range(500):
        pool.use(A, number)
    # B's blocks are the oldest by far, and of another size than these
    for number in range(1000, 1200):
        pool.use(A, number, size=2 * SLOT)
    assert pool.has(B) == 48
    assert pool.has(A) == 80
    # who has less gets room of any size from who has more
    for number in range(2000, 2008):
        assert pool.use(C, number, size=4 * SLOT)
    assert pool.has(C) == 32
    assert pool.has(B) >= 40


def test_extra_copies_go_before_anything_else() -> None:
    pool = Pool(64)
    for number in range(64):
        pool.use(A, number)
    table = pool.inventory.table
    for slot in range(40, 50):
        pool.inventory.mark_extra(slot, extra=True)
    assert pool.has(A) == 54
    for number in range(100, 110):
        pool.use(B, number)
    assert not any(table.keeps.is_extra(slot) for slot in range(64))
    assert pool.has(A) == 54
    # an extra copy that becomes the only one is an ordinary block again
    slot = pool.inventory.index.get(BlockKey(A[:8] + (63).to_bytes(8, "big")))
    assert slot is not None
    pool.inventory.mark_extra(slot, extra=True)
    pool.inventory.mark_extra(slot, extra=False)
    pool.use(B, 200)
    assert pool.inventory.table.key[slot] is not None


def test_soft_pins_go_last_and_end_in_time() -> None:
    pool = Pool(16, shares(fair=False))
    for number in range(16):
        pool.use(A, number)
    table = pool.inventory.table
    for slot in range(4):
        table.pin_soft(slot, pool.now_s + 60)
    for number in range(100, 200):
        pool.use(B, number)
    assert pool.has(A) == 4
    pool.now_s += 61
    table.end_holds(pool.now_s)
    assert table.keeps.soft_pinned == 0
    for number in range(200, 300):
        pool.use(B, number)
    assert pool.has(A) == 0
    # where nothing else is left they go too
    for slot in range(16):
        table.pin_soft(slot, pool.now_s + 60)
    assert pool.use(A, 1)
    assert pool.has(A) == 1


def test_hard_pins_stay_and_have_a_bound() -> None:
    pool = Pool(16, TableRules(hard_pin_share=0.25))
    for number in range(16):
        pool.use(A, number)
    table = pool.inventory.table
    assert [table.pin_hard(slot) for slot in range(6)] == [True] * 4 + [False] * 2
    for number in range(100, 200):
        pool.use(B, number)
    assert [table.key[slot] is not None for slot in range(4)] == [True] * 4
    assert all(table.unpin_all(slot) for slot in range(4))
    assert (table.keeps.hard_pinned, table.keeps.hard_bytes) == (0, 0)
    assert table.pin_hard(10)
