"""The slot table with all policies, pins, shares, limits and extra copies: exact."""

from collections import Counter

from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from kvtide.kv import BlockKey
from kvtide.store.accounts import IDLE_LEVEL, ShareRules
from kvtide.store.candidates import Rank
from kvtide.store.eviction import Policy
from kvtide.store.slabs import Slab
from kvtide.store.slot_states import SlotState, TableRules
from kvtide.store.slots import SlotTable

ARENA = 1 << 16
SLAB = 1 << 13
SIZES = (1000, 1000, 3000, 9000)
TENANTS = (b"a", b"b", b"c")
LIMITED = b"c"
LIMIT = 12_000
SHARES = [
    ShareRules(
        fair=fair, idle_s=50.0, weights={b"b": 2.0}, limits_bytes={LIMITED: LIMIT}
    )
    for fair in (True, False)
]


class SlotModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()
        self.now_s = 100.0
        self.keys = 0
        self.users: dict[int, int] = {}
        self.hard: set[int] = set()
        self.table = SlotTable(ARENA)

    @initialize(policy=st.sampled_from(Policy), shares=st.sampled_from(SHARES))
    def begin(self, policy: Policy, shares: ShareRules) -> None:
        rules = TableRules(policy=policy, shares=shares, hard_pin_share=0.25)
        self.table = SlotTable(
            ARENA, rules, slab_bytes=SLAB, back=self.back, give_back=self.give_back
        )

    def back(self, offset: int, length: int) -> bool:
        assert offset % 4096 == length % 4096 == 0
        pages = set(range(offset // 4096, (offset + length) // 4096))
        assert not pages & self.memory
        self.memory |= pages
        return True

    def give_back(self, offset: int, length: int) -> None:
        assert offset % 4096 == length % 4096 == 0
        pages = set(range(offset // 4096, (offset + length) // 4096))
        assert pages <= self.memory
        self.memory -= pages

    # ---- what happens to slots

    def committed(self) -> list[int]:
        table = self.table
        return [s for s in range(len(table)) if table.state[s] == SlotState.COMMITTED]

    def free(self, slot: int) -> None:
        self.table.free(slot)
        self.users.pop(slot, None)
        self.hard.discard(slot)

    @rule(
        size=st.sampled_from(SIZES),
        tenant=st.sampled_from(TENANTS),
        keyed=st.booleans(),
        end=st.sampled_from(["commit", "commit", "commit", "abandon", "quarantine"]),
    )
    def put(self, size: int, tenant: bytes, keyed: bool, end: str) -> None:
        table = self.table
        while (own := table.over_limit(size, tenant)) is not None:
            if not own:
                return
            for slot in own:
                account = table.accounts[table.account[slot]]
                assert account.tag == tenant
                self.evict(slot, tenant)
        slot = table.take(size, space=0, tokens=1, tenant=tenant, now_s=self.now_s)
        while slot is None:
            victims = table.victims(size, tenant)
            if not victims:
                return
            self.check_victims(victims, size, tenant)
            for victim in victims:
                self.evict(victim, tenant)
            slot = table.take(size, space=0, tokens=1, tenant=tenant, now_s=self.now_s)
        account = table.accounts[table.account[slot]]
        assert account.tag == tenant
        assert tenant != LIMITED or account.used_bytes <= LIMIT
        if keyed:
            self.keys += 1
            table.key[slot] = BlockKey(self.keys.to_bytes(16, "little"))
        match end:
            case "commit":
                table.commit(slot, 7)
            case "quarantine":
                table.quarantine(slot)
            case _:
                self.free(slot)

    def check_victims(self, victims: list[int], size: int, tenant: bytes) -> None:
        """Nothing that is kept, extras first, and nobody gives for a fuller one."""
        table = self.table
        wanted = table.accounts.find(tenant)
        candidates = table._candidates  # pyright: ignore[reportPrivateUsage]
        for slot in victims:
            assert table.evictable(slot)
            assert slot not in self.users
            assert slot not in self.hard
            assert table.held_until_s[slot] == 0.0
        if table.next_extra(size) is not None:
            assert all(table.keeps.is_extra(slot) for slot in victims)
        if wanted is None or any(
            candidates.rank(slot) is Rank.SOFT_PINNED for slot in victims
        ):
            return
        for slot in victims:
            owner = table.accounts[table.account[slot]]
            assert (
                table.keeps.is_extra(slot)
                or owner.level >= wanted.level
                or owner is wanted
            )

    def evict(self, slot: int, tenant: bytes) -> None:
        self.table.evicting(slot)
        self.free(slot)

    @rule(
        data=st.data(),
        act=st.sampled_from(["pin", "unpin", "touch", "hold", "free", "quarantine"]),
    )
    def leases_and_placements(self, data: st.DataObject, act: str) -> None:
        committed = self.committed()
        if not committed:
            return
        slot = data.draw(st.sampled_from(committed))
        table = self.table
        match act:
            case "pin":
                table.pin(slot)
                self.users[slot] = self.users.get(slot, 0) + 1
            case "unpin" if slot in self.users:
                table.unpin(slot)
                self.users[slot] -= 1
                if not self.users[slot]:
                    del self.users[slot]
            case "touch":
                table.touch(slot, self.now_s)
            case "hold":
                table.hold(slot, self.now_s + 3)
            case "free":
                self.free(slot)
            case "quarantine":
                table.quarantine(slot)
                self.users.pop(slot, None)
                self.hard.discard(slot)
            case _:
                pass

    @rule(
        data=st.data(),
        act=st.sampled_from(["soft", "hard", "unpin_all", "extra", "no_extra"]),
    )
    def people_and_replicas(self, data: st.DataObject, act: str) -> None:
        committed = self.committed()
        if not committed:
            return
        slot = data.draw(st.sampled_from(committed))
        table = self.table
        match act:
            case "soft":
                table.pin_soft(slot, self.now_s + data.draw(st.sampled_from([2, 60])))
            case "hard":
                if table.pin_hard(slot):
                    self.hard.add(slot)
            case "unpin_all":
                table.unpin_all(slot)
                self.hard.discard(slot)
            case _:
                table.mark_extra(slot, extra=act == "extra")

    @rule()
    def free_quarantined(self) -> None:
        for slot in range(len(self.table)):
            if self.table.state[slot] == SlotState.QUARANTINED:
                self.free(slot)

    @rule(seconds=st.sampled_from([0.5, 4.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.table.end_holds(self.now_s)

    @rule(limit=st.sampled_from([0, ARENA // 4, ARENA // 2, ARENA]))
    def host_wants_memory(self, limit: int) -> None:
        table = self.table
        while victims := table.limit_memory(limit):
            assert all(table.evictable(slot) for slot in victims)
            for slot in victims:
                self.evict(slot, b"")
        kept = table.busy_bytes > 0
        assert kept or table.backed_bytes <= limit
        if limit == ARENA:
            table.back_again()

    # ---- what always holds

    @invariant()
    def account_is_exact(self) -> None:
        table = self.table
        counts = table.counts()
        states = Counter(SlotState(state) for state in table.state)
        assert counts.total == (
            counts.free + counts.used + counts.reserved + counts.quarantined
        )
        assert counts.free == states[SlotState.FREE]
        assert counts.used == states[SlotState.COMMITTED]
        assert counts.quarantined == states[SlotState.QUARANTINED]
        assert counts.total + states[SlotState.VACANT] == len(table)

    @invariant()
    def each_tenant_is_charged_for_its_own(self) -> None:
        table = self.table
        busy = [s for s in range(len(table)) if table.state[s] > SlotState.FREE]
        slots: Counter[int] = Counter(table.account[slot] for slot in busy)
        used: Counter[int] = Counter()
        for slot in busy:
            if not table.keeps.is_extra(slot):
                used[table.account[slot]] += table.slot_bytes(slot)
        assert len(table.accounts) == len(slots)
        for number, count in slots.items():
            account = table.accounts[number]
            assert (account.slots, account.used_bytes) == (count, used[number])
            assert account.idle == (account.level == IDLE_LEVEL) or not (
                table.rules.shares.fair
            )

    @invariant()
    def only_what_nothing_keeps_may_go(self) -> None:
        table = self.table
        for slot in range(len(table)):
            kept = (
                table.state[slot] != SlotState.COMMITTED
                or slot in self.users
                or slot in self.hard
                or table.held_until_s[slot] > 0.0
            )
            assert table.evictable(slot) == (not kept)
        keeps = table.keeps
        assert table.pinned == len(self.users)
        assert keeps.hard_pinned == len(self.hard)
        assert keeps.hard_bytes == sum(table.slot_bytes(slot) for slot in self.hard)
        assert keeps.hard_bytes <= ARENA / 4
        assert keeps.soft_pinned == sum(end > 0 for end in keeps.soft_until_s)

    @invariant()
    def lines_hold_exactly_the_candidates(self) -> None:
        table = self.table
        candidates = table._candidates  # pyright: ignore[reportPrivateUsage]
        classes = len(table._classes)  # pyright: ignore[reportPrivateUsage]
        lined = [s for number in range(classes) for s in candidates.walk(number)]
        assert sorted(lined) == [s for s in range(len(table)) if table.evictable(s)]

    @invariant()
    def slots_have_memory_and_never_overlap(self) -> None:
        table = self.table
        slabs: list[Slab] = list(table._slabs)  # pyright: ignore[reportPrivateUsage]
        end = 0
        for slab in slabs:
            assert slab.offset >= end
            end = slab.offset + slab.length
            pages = range(slab.offset // 4096, -(-end // 4096))
            assert set(pages) <= self.memory
        assert end <= ARENA
        assert table.backed_bytes == len(self.memory) * 4096
        assert table.busy_bytes == sum(
            table.slot_bytes(s)
            for s in range(len(table))
            if table.state[s] > SlotState.FREE
        )

    def teardown(self) -> None:
        for slot in range(len(self.table)):
            if self.table.state[slot] > SlotState.FREE:
                self.free(slot)
        assert len(self.table.accounts) == 0
        assert self.table.limit_memory(0) == []
        assert self.table.backed_bytes == 0
        keeps = self.table.keeps
        assert (keeps.pinned, keeps.hard_pinned, keeps.soft_pinned) == (0, 0, 0)
        self.table.end_holds(self.now_s + 1000)
        assert self.table.first_hold_ends_s is None


TestSlotModel = SlotModel.TestCase
TestSlotModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
