"""The tiers against a simple model, with real files: never wrong bytes, exact accounts.

The model is one sentence: whatever is read under a key is what was computed for it.
"""

import shutil
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)
from tests.unit.ssd_driver import (
    LARGE,
    SMALL,
    WORKER,
    SsdDriver,
    key_of,
    lease_of,
    segment_file,
    tags_of,
)

from kvtide.bus.messages import (
    BlocksStaged,
    LeaseRelease,
    PlacementMade,
    PutCommit,
    PutGranted,
)
from kvtide.kv import BlockKey, Layout, Lease, NodeId, RequestId, Tier
from kvtide.runtime import SystemClock
from kvtide.store.events import Flush, OwnerGone
from kvtide.store.machine import StoreRules
from kvtide.store.slots import SlotState
from kvtide.store.ssd.entries import RowState
from kvtide.store.ssd.events import (
    DeletedSpace,
    MoveRecord,
    Trouble,
    WriteRecord,
)
from kvtide.store.ssd.format import PAGE_BYTES
from kvtide.store.ssd.health import TierState
from kvtide.store.ssd.rules import SsdRules

RULES = StoreRules(
    arena_bytes=16 << 10,
    slab_bytes=4 << 10,
    bad_slot_s=5,
    page_limit=3,
    ssd=SsdRules(
        capacity_bytes=40 * PAGE_BYTES,
        segment_bytes=4 * PAGE_BYTES,
        write_bytes_per_s=1e6,
        dram_high=0.6,
        dram_low=0.5,
        stage_share=0.5,
        retry_most_s=4,
        calm_s=5,
        save_s=0.5,
    ),
)
KEYS = st.integers(1, 30)
LARGE_KEYS = 20
"""Keys from here on are of large blocks: a key has one layout."""


def layout_of(number: int) -> Layout:
    return LARGE if number >= LARGE_KEYS else SMALL


def tenant_of(number: int) -> int:
    return number % 3


class TierModel(SsdDriver, RuleBasedStateMachine):
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvtide-ssd-"))
        self.damaged = False
        self.deleted: set[int] = set()
        self.readers: dict[Lease, int] = {}
        self.writers: dict[Lease, tuple[list[BlockKey], PutGranted, int]] = {}
        super().__init__(self.folder / "ssd", RULES)

    # ---- puts

    @rule(first=KEYS, count=st.integers(1, 5))
    def put_blocks(self, first: int, count: int) -> None:
        if tenant_of(first) in self.deleted:
            return
        numbers = range(first, 31, 3)[:count]
        for layout in (SMALL, LARGE):
            keys = [key_of(n) for n in numbers if layout_of(n) is layout]
            if keys:
                self.put(keys, layout, tenant_of(first))

    @rule(number=KEYS)
    def begin_and_linger(self, number: int) -> None:
        if tenant_of(number) in self.deleted or len(self.writers) > 2:
            return
        lease = lease_of(f"slow-{self._put}")
        keys = [key_of(number)]
        granted = self.begin(lease, keys, layout_of(number), tenant_of(number))
        self.writers[lease] = (keys, granted, number)

    @precondition(lambda self: bool(cast(TierModel, self).writers))
    @rule(commit=st.booleans())
    def end_a_writer(self, commit: bool) -> None:
        lease, (keys, granted, number) = self.writers.popitem()
        slot = granted.slots[0].slot
        if commit and slot is not None:
            layout, tenant = layout_of(number), tenant_of(number)
            block = self.write(keys[0], slot, layout, tenant)
            self.ask(PutCommit(lease=lease, blocks=(block,)))
            self.verify()
        self.ask(LeaseRelease(lease=lease))

    # ---- reads

    @rule(numbers=st.lists(KEYS, min_size=1, max_size=4, unique=True))
    def ask_to_stage(self, numbers: list[int]) -> None:
        if len(self.readers) < 4:
            lease = lease_of(f"reader-{self._token}")
            self.readers[lease] = self.stage(lease, [key_of(n) for n in numbers])

    @precondition(lambda self: bool(cast(TierModel, self).readers))
    @rule(data=st.data())
    def end_a_reader(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.readers)))
        answer = self.answers.pop(self.readers.pop(lease), None)
        if answer is not None:
            assert isinstance(answer, BlocksStaged)
            for located in answer.located:
                # pinned and verified: there until the release
                assert located is None or self.holds(located)
        self.ask(LeaseRelease(lease=lease))

    @rule(number=KEYS)
    def read_now(self, number: int) -> None:
        there = self.on_ssd(key_of(number))
        had = self.read([key_of(number)])
        if there and not had[0]:
            # dropped as unreadable, pushed out, or no room to stage it
            tally = self.machine.tally
            assert self.damaged or tally.stage_refused or tally.ssd_evicted

    @rule(numbers=st.lists(KEYS, max_size=4), hold_ms=st.sampled_from([0, 900]))
    def place_request(self, numbers: list[int], hold_ms: float) -> None:
        placement = PlacementMade(
            conductor=lease_of("c").owner,
            request=RequestId("p"),
            attempt=1,
            gateway=lease_of("c").owner,
            model="m",
            prefill=None,
            decode=NodeId("d"),
            new_tokens=1,
            prompt_tokens=1,
            max_new_tokens=1,
            prefill_ms=1,
            keys=tuple(key_of(n) for n in numbers),
            hold_ms=hold_ms,
        )
        self.ask(placement)

    # ---- the device and time

    @precondition(lambda self: bool(cast(TierModel, self).pending))
    @rule(data=st.data(), steps=st.integers(1, 4))
    def device_works(self, data: st.DataObject, steps: int) -> None:
        for _ in range(min(steps, len(self.pending))):
            self.step(data.draw(st.integers(0, len(self.pending) - 1)))

    @precondition(lambda self: bool(cast(TierModel, self).pending))
    @rule(
        data=st.data(),
        trouble=st.sampled_from(
            [Trouble.UNWRITABLE, Trouble.FULL, Trouble.UNREADABLE, Trouble.GONE]
        ),
    )
    def device_fails(self, data: st.DataObject, trouble: Trouble) -> None:
        place = data.draw(st.integers(0, len(self.pending) - 1))
        self.damaged = True
        self.fail(place, trouble)

    @rule(seconds=st.sampled_from([0.03, 0.4, 3, 12]))
    def time_passes(self, seconds: float) -> None:
        self.wait(seconds)
        for lease in [lease for lease in self.readers if seconds > 10]:
            del self.readers[lease]
        if seconds > 10:
            self.writers.clear()

    @rule()
    def flush(self) -> None:
        """A stop begins: what DRAM has goes to the SSD, and the store then ends."""
        self.handle(Flush())
        self.quiet()
        assert self.machine.ssd.flushed
        there = self.machine.ssd.health.state is TierState.READY
        before = {key for key, _ in self.truth}
        room = self.machine.tally.ssd_evicted == 0 and not self.damaged
        self.stop()
        self.readers.clear()
        self.writers.clear()
        self.start()
        if there and room:
            assert before <= {key for key, tier in self.truth if tier is Tier.SSD}

    @rule()
    def all_comes_to_rest(self) -> None:
        self.quiet()

    # ---- ends

    @rule(tenant=st.integers(0, 2))
    def delete_tenant(self, tenant: int) -> None:
        """Its blocks are gone from the SSD, now and after every restart."""
        tag = tags_of(tenant).tenant
        until_ms = int(self.files_clock_ms()) + 1
        deleted = DeletedSpace(tenant=tag, model=None, until_ms=until_ms)
        for command in self.machine.ssd.delete(deleted, self.now_s):
            self.obey(command)
        # of what DRAM has, the rest of the store takes care
        for lease, (_, _, number) in list(self.writers.items()):
            if tenant_of(number) == tenant:
                del self.writers[lease]
                self.ask(LeaseRelease(lease=lease))
        inventory = self.machine.inventory
        for key in inventory.index.page(None, 10**6):
            slot = inventory.index.get(key)
            if slot is not None and inventory.space(slot).tags.tenant == tag:
                inventory.drop(slot, "deleted", self.now_s)
                if not inventory.table.pins[slot]:
                    inventory.free(slot)
        self.deleted.add(tenant)
        self.settle()

    @rule(clean=st.booleans(), torn=st.integers(0, 3), data=st.data())
    def restart(self, clean: bool, torn: int, data: st.DataObject) -> None:
        if clean:
            self.settle()
        writes = [
            command
            for command in self.pending
            if isinstance(command, WriteRecord | MoveRecord)
        ]
        for command in writes[:torn]:
            size = command.place.length
            self.tear(command, data.draw(st.integers(0, size - 1)))
        before = {key for key, tier in self.truth if tier is Tier.SSD}
        self.stop()
        self.readers.clear()
        self.writers.clear()
        self.start()
        state = self.machine.ssd.health.state
        if state is TierState.READY and not self.damaged and clean:
            assert before <= {key for key, tier in self.truth if tier is Tier.SSD}

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """A bit on the disk turns."""
        there = [key for key, tier in self.truth if tier is Tier.SSD]
        there = [key for key in there if self.on_ssd(key)]
        if not there:
            return
        place = self.place(data.draw(st.sampled_from(there)))
        if not segment_file(self.path, place.segment).exists():
            return
        at = data.draw(st.integers(0, place.length - 1))
        before = self.edit(place, at, b"\0")
        self.edit(place, at, bytes([before[0] ^ 0x10]) if before else b"\x10")
        self.damaged = True

    def files_clock_ms(self) -> float:
        return SystemClock().wall() * 1000

    # ---- what always holds

    @invariant()
    def ssd_account_is_exact(self) -> None:
        books = self.machine.ssd.books
        counts, entries = books.segments.counts(), books.entries
        live = [row for row, s in enumerate(entries.state) if s == RowState.LIVE]
        assert counts.total == (
            counts.free + counts.used + counts.reserved + counts.garbage
        )
        assert counts.used == sum(entries.place(row).length for row in live)
        assert len(entries) == len(live)
        by_segment = Counter[int]()
        for row in live:
            by_segment[entries.place(row).segment] += entries.place(row).length
        for number, length in by_segment.items():
            segment = books.segments.get(number)
            assert segment is not None
            assert segment.live == length
            assert segment.live + segment.flying + PAGE_BYTES <= segment.tail
        assert counts.garbage >= 0

    @invariant()
    def dram_account_is_exact(self) -> None:
        table = self.machine.inventory.table
        counts = table.counts()
        states = [SlotState(state) for state in table.state]
        assert counts.free == states.count(SlotState.FREE)
        assert counts.used == states.count(SlotState.COMMITTED)
        assert counts.reserved == states.count(SlotState.WRITING)
        assert counts.quarantined == states.count(SlotState.QUARANTINED)
        staged = self.machine.ssd.staging.staged_bytes
        large = LARGE.slot_bytes
        assert staged <= RULES.ssd.stage_share * RULES.arena_bytes + large

    @invariant()
    def no_two_records_overlap(self) -> None:
        entries = self.machine.ssd.books.entries
        places = sorted(
            (place.segment, place.offset, place.offset + place.length)
            for place in (
                entries.place(row)
                for row, state in enumerate(entries.state)
                if state == RowState.LIVE
            )
        )
        for (segment, _, end), (other, start, _) in pairwise(places):
            assert segment != other or end <= start

    @invariant()
    def gossip_is_the_truth(self) -> None:
        self.wait(0.03)
        machine = self.machine
        known = {
            (key, Tier.SSD): machine.ssd.find(key)
            for key in machine.ssd.books.entries.index.page(None, 10**6)
        }
        for key in machine.inventory.index.page(None, 10**6):
            slot = machine.inventory.index.get(key)
            assert slot is not None
            known[key, Tier.DRAM] = machine.inventory.located(slot)
        assert self.truth == known
        assert self.rows == {
            at: located.slot.generation for at, located in self.truth.items()
        }
        for (_, tier), located in self.truth.items():
            if tier is Tier.DRAM:
                assert self.holds(located)

    @invariant()
    def no_block_of_a_deleted_tenant_is_on_ssd(self) -> None:
        books = self.machine.ssd.books
        for row, state in enumerate(books.entries.state):
            if state == RowState.LIVE:
                assert books.space(row).tags.tenant[0] not in self.deleted

    @invariant()
    def only_spaces_in_use_are_kept(self) -> None:
        machine = self.machine
        table, entries = machine.inventory.table, machine.ssd.books.entries
        slots = {
            table.space[slot]
            for slot in range(len(table))
            if table.state[slot] > SlotState.FREE
        }
        rows = {
            entries.space(row)
            for row, state in enumerate(entries.state)
            if state != RowState.FREE
        }
        assert len(machine.inventory.spaces) == len(slots | rows)

    def teardown(self) -> None:
        self.handle(OwnerGone(WORKER))
        self.wait(8)
        self.quiet()
        self.wait(8)
        self.quiet()
        load = self.machine.load()
        assert (load.reserved_slots, load.quarantined_slots) == (0, 0)
        assert (load.leases, load.pins, load.ssd_reserved_bytes) == (0, 0, 0)
        assert self.machine.ssd.staging.staged_bytes == 0
        assert load.used_slots == len(self.machine.inventory.index)
        self.stop()
        shutil.rmtree(self.folder)


TestTiers = pytest.mark.timeout(180)(TierModel.TestCase)
TestTiers.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)


class LongTierModel(TierModel):
    """The same, for longer."""


TestTiersLonger = pytest.mark.full(pytest.mark.timeout(1200)(LongTierModel.TestCase))
TestTiersLonger.settings = settings(
    max_examples=400, stateful_step_count=50, deadline=None
)
