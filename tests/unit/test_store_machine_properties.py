"""The store's machine against a simple model: exact, without leaks, truthfully told."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)
from tests.unit.store_driver import CONDUCTOR, StoreDriver, lease_of

from kvtide.bus.messages import (
    BadCopy,
    BlockState,
    CommitBlock,
    Failure,
    LeaseRelease,
    Owned,
    PlacementMade,
    PutBegin,
    PutCommit,
    PutCommitted,
    PutGranted,
)
from kvtide.kv import (
    BlockKey,
    Lease,
    NodeId,
    NodeRef,
    RequestId,
    RequestRef,
    SlotRef,
)
from kvtide.store.events import (
    ConnectionGone,
    Deaf,
    OwnerGone,
    Received,
    Reply,
    Verified,
)
from kvtide.store.machine import StoreRules
from kvtide.store.slots import SlotState

KEYS = [BlockKey(bytes([number]) * 16) for number in range(1, 10)]
SIZES = [1000, 1000, 1000, 3000]
RULES = StoreRules(
    arena_bytes=8 << 10,
    slab_bytes=4 << 10,
    silence_s=10,
    bad_slot_s=30,
    page_limit=3,
)


@dataclass
class Writer:
    """What the model knows of a lease: uses of slots that must stay as they are."""

    writing: dict[int, SlotRef] = field(default_factory=dict[int, SlotRef])
    kept: dict[int, SlotRef] = field(default_factory=dict[int, SlotRef])
    absent: int = 0


class StoreModel(StoreDriver, RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__(RULES, self.back)
        self.memory_left = True
        self.backed_bytes = 0
        self.epochs = {"a": 1, "b": 1}
        self.heard: dict[NodeRef, float] = {}
        self.leases: dict[Lease, Writer] = {}
        # what silent owners were writing: not to be touched until they are over
        self.unplugged: set[NodeRef] = set()
        self.suspect: dict[Lease, list[SlotRef]] = {}
        self.puts: list[PutBegin] = []
        self.generations: set[int] = set()
        self.bad: set[int] = set()
        self.list_seq = 0

    def lease(self, node: str, number: int) -> Lease:
        return lease_of(f"r{number}", NodeRef(NodeId(node), self.epochs[node]))

    def back(self, offset: int, length: int) -> bool:
        assert offset == self.backed_bytes
        if self.memory_left:
            self.backed_bytes += length
        return self.memory_left

    @rule(left=st.booleans())
    def others_use_memory(self, left: bool) -> None:
        self.memory_left = left

    # ---- puts

    @rule(
        node=st.sampled_from("ab"),
        number=st.integers(0, 2),
        size=st.sampled_from(SIZES),
        keys=st.lists(st.none() | st.sampled_from(KEYS), min_size=1, max_size=4),
    )
    def begin(
        self, node: str, number: int, size: int, keys: Sequence[BlockKey | None]
    ) -> None:
        lease = self.lease(node, number)
        message = self.put_begin(lease, list(keys), size=size, put=len(self.puts))
        self.puts.append(message)
        (reply,) = self.ask(message, lease.owner)
        self.heard[lease.owner] = self.now_s
        self.unplugged.discard(lease.owner)
        if isinstance(reply.message, Failure):
            assert reply.message.code == "expired"
            assert lease not in self.leases
            return
        assert isinstance(reply.message, PutGranted)
        writer = self.leases.setdefault(lease, Writer())
        assert all(
            slot.slot is None or slot.existing is None for slot in reply.message.slots
        )
        fresh = [slot.slot.generation for slot in reply.message.slots if slot.slot]
        assert not self.generations.intersection(fresh)
        self._adopt(writer, reply.message)

    @rule(
        node=st.sampled_from("ab"),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True),
    )
    def put_at_once(self, node: str, keys: list[BlockKey]) -> None:
        """The usual way: begin, write, commit, release."""
        lease = self.lease(node, 3)
        self.begin(node, 3, 1000, keys)
        if lease not in self.leases:
            return
        refs = self.leases[lease].writing.values()
        blocks = tuple(CommitBlock(ref, ref.generation * 3) for ref in refs)
        self.ask(PutCommit(lease=lease, blocks=blocks), lease.owner)
        self.verify_all(good=True)
        self.ask(LeaseRelease(lease=lease), lease.owner)
        del self.leases[lease]

    @precondition(lambda self: bool(cast(StoreModel, self).puts))
    @rule(data=st.data())
    def repeat_begin(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(self.puts))
        writer = self.leases.get(message.lease)
        if writer is None:
            return
        (reply,) = self.ask(message, message.lease.owner)
        self.heard[message.lease.owner] = self.now_s
        self.unplugged.discard(message.lease.owner)
        assert isinstance(reply.message, PutGranted)
        # an earlier lease of the same name may have asked: then it starts anew
        self._adopt(writer, reply.message)
        (again,) = self.ask(message, message.lease.owner)
        assert again.message == reply.message

    def _adopt(self, writer: Writer, granted: PutGranted) -> None:
        for slot in granted.slots:
            if slot.slot and slot.slot.generation not in self.generations:
                self.generations.add(slot.slot.generation)
                writer.writing[slot.slot.generation] = slot.slot
            # a repeated answer may name a copy that was found bad since
            if slot.existing and slot.existing.slot.generation not in self.bad:
                kept = slot.existing.slot
                writer.kept[kept.generation] = kept

    @precondition(
        lambda self: any(w.writing for w in cast(StoreModel, self).leases.values())
    )
    @rule(data=st.data(), good=st.booleans(), deliver=st.booleans())
    def commit(self, data: st.DataObject, good: bool, deliver: bool) -> None:
        lease = data.draw(
            st.sampled_from([k for k, w in self.leases.items() if w.writing])
        )
        writer = self.leases[lease]
        blocks = tuple(
            CommitBlock(ref, ref.generation * 3) for ref in writer.writing.values()
        )
        replies = self.ask(PutCommit(lease=lease, blocks=blocks), lease.owner)
        self.heard[lease.owner] = self.now_s
        if deliver:
            replies += self.verify_all(good=good)
            assert replies
            states = replies[-1].message
            assert isinstance(states, PutCommitted)
            if not good:
                assert BlockState.CORRUPT in states.states or self.machine.tally.stored

    @rule(good=st.booleans())
    def verify(self, good: bool) -> None:
        self.verify_all(good=good)

    def verify_all(self, *, good: bool) -> list[Reply]:
        replies: list[Reply] = []
        verifies, self.verifies = self.verifies, []
        for wanted in verifies:
            before = self.machine.tally.bad_copies
            replies += self.handle(Verified(wanted.slot, wanted.generation, good))
            if self.machine.tally.bad_copies > before:
                self.bad.add(wanted.generation)
            table = self.machine.inventory.table
            for writer in self.leases.values():
                ref = writer.writing.get(wanted.generation)
                if ref and table.state[wanted.slot] == SlotState.COMMITTED:
                    writer.kept[wanted.generation] = writer.writing.pop(
                        wanted.generation
                    )
        return replies

    # ---- ends

    @precondition(lambda self: bool(cast(StoreModel, self).leases))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.leases)))
        self.ask(LeaseRelease(lease=lease), lease.owner)
        self.heard[lease.owner] = self.now_s
        del self.leases[lease]

    @rule(node=st.sampled_from("ab"), numbers=st.sets(st.integers(0, 2)))
    def owned_list(self, node: str, numbers: set[int]) -> None:
        owner = NodeRef(NodeId(node), self.epochs[node])
        self.list_seq += 1
        requests = tuple(RequestRef(RequestId(f"r{number}"), 1) for number in numbers)
        listed = Owned(owner=owner, seq=self.list_seq, requests=requests)
        self.ask(listed, owner)
        self.heard[owner] = self.now_s
        for lease, writer in list(self.leases.items()):
            if lease.owner != owner:
                continue
            present = RequestRef(lease.request, lease.attempt) in requests
            writer.absent = 0 if present else writer.absent + 1
            if writer.absent == 2:
                del self.leases[lease]
        self.believe_over(owner)

    @rule(node=st.sampled_from("ab"), restart=st.booleans())
    def owner_dies(self, node: str, restart: bool) -> None:
        owner = NodeRef(NodeId(node), self.epochs[node])
        self.epochs[node] += 1
        if restart:
            lease = self.lease(node, 0)
            self.ask(LeaseRelease(lease=lease), lease.owner)
        else:
            self.handle(OwnerGone(owner))
        self.believe_over(owner)
        for lease in [lease for lease in self.leases if lease.owner == owner]:
            del self.leases[lease]
        (reply,) = self.ask(Owned(owner=owner, seq=10**9, requests=()), owner)
        assert isinstance(reply.message, Failure)

    @rule(node=st.sampled_from("ab"))
    def unplug(self, node: str) -> None:
        owner = NodeRef(NodeId(node), self.epochs[node])
        self.handle(ConnectionGone(owner))
        if owner in self.heard:
            self.unplugged.add(owner)
        self.believe_over(owner)

    @rule()
    def cut_off(self) -> None:
        self.handle(Deaf())
        for owner in self.heard:
            self.heard[owner] = self.now_s

    def believe_over(self, owner: NodeRef) -> None:
        for lease in [lease for lease in self.suspect if lease.owner == owner]:
            del self.suspect[lease]

    # ---- recency, bad copies, time, snapshots

    @rule(keys=st.lists(st.sampled_from(KEYS)), hold_ms=st.sampled_from([0, 900, 9e9]))
    def place(self, keys: list[BlockKey], hold_ms: float) -> None:
        placement = PlacementMade(
            conductor=CONDUCTOR,
            request=RequestId("p"),
            attempt=1,
            gateway=CONDUCTOR,
            model="m",
            prefill=None,
            decode=NodeId("d"),
            new_tokens=1,
            prompt_tokens=1,
            max_new_tokens=1,
            prefill_ms=1,
            keys=tuple(keys),
            hold_ms=hold_ms,
        )
        self.handle(Received(placement, CONDUCTOR))

    @precondition(lambda self: bool(cast(StoreModel, self).truth))
    @rule(data=st.data())
    def report_bad(self, data: st.DataObject) -> None:
        located = data.draw(st.sampled_from(list(self.truth.values())))
        self.ask(BadCopy(located=located, reason="test"), CONDUCTOR)
        self.verify_all(good=data.draw(st.booleans()))

    @rule(seconds=st.sampled_from([0.03, 1, 11, 40]))
    def time_passes(self, seconds: float) -> None:
        self.wait(seconds)
        limit_s = self.now_s - RULES.silence_s
        for lease in list(self.leases):
            if self.heard[lease.owner] < limit_s - RULES.silence_s / 4:
                writer = self.leases.pop(lease)
                if lease.owner not in self.unplugged:
                    self.suspect[lease] = list(writer.writing.values())
            elif self.heard[lease.owner] < limit_s:
                # the check may or may not have come by: say that we live
                self.leases.pop(lease)
                self.ask(LeaseRelease(lease=lease), lease.owner)

    @rule()
    def snapshot(self) -> None:
        pages = self.pages()
        assert {page.seq for page in pages} == {self.gossip_seq}
        located = [each for page in pages for each in page.located]
        assert [each.key for each in located] == sorted(self.truth)
        assert all(self.truth[each.key] == each for each in located)

    # ---- what always holds

    @invariant()
    def account_is_exact(self) -> None:
        table = self.machine.inventory.table
        counts = table.counts()
        states = [SlotState(state) for state in table.state]
        assert counts.free == states.count(SlotState.FREE)
        assert counts.used == states.count(SlotState.COMMITTED)
        assert counts.reserved == states.count(SlotState.WRITING)
        assert counts.quarantined == states.count(SlotState.QUARANTINED)
        assert counts.total == (
            counts.free + counts.used + counts.reserved + counts.quarantined
        )
        assert counts.total + states.count(SlotState.VACANT) == len(table)
        assert table.pinned == sum(1 for pins in table.pins if pins)

    @invariant()
    def only_spaces_with_slots_are_kept(self) -> None:
        inventory = self.machine.inventory
        table = inventory.table
        used = [
            slot for slot in range(len(table)) if table.state[slot] > SlotState.FREE
        ]
        assert len(inventory.spaces) == len({table.space[slot] for slot in used})
        for slot in used:
            assert inventory.space(slot).slot_bytes == table.slot_bytes(slot)

    @invariant()
    def slots_never_overlap(self) -> None:
        table = self.machine.inventory.table
        spans = sorted(
            (table.offset(slot), table.offset(slot) + table.slot_bytes(slot))
            for slot in range(len(table))
            if table.state[slot] != SlotState.VACANT
        )
        ends = [0, *(end for _, end in spans)]
        assert all(
            start >= end for (start, _), end in zip(spans, ends[:-1], strict=True)
        )
        assert ends[-1] <= self.backed_bytes <= RULES.arena_bytes

    @invariant()
    def leases_keep_their_slots(self) -> None:
        table = self.machine.inventory.table
        for writer in self.leases.values():
            for refs, state in (
                (writer.writing, SlotState.WRITING),
                (writer.kept, SlotState.COMMITTED),
            ):
                for ref in refs.values():
                    slot = table.find(ref.offset, ref.generation)
                    if ref.generation in self.bad:
                        continue
                    assert slot is not None
                    assert table.state[slot] == state

    @invariant()
    def suspect_slots_stay(self) -> None:
        table = self.machine.inventory.table
        for refs in self.suspect.values():
            for ref in refs:
                slot = table.find(ref.offset, ref.generation)
                assert slot is not None
                assert table.state[slot] == SlotState.QUARANTINED

    @invariant()
    def bad_slots_rest(self) -> None:
        table = self.machine.inventory.table
        bad = self.machine.resting()
        assert all(table.state[slot] == SlotState.QUARANTINED for slot, _ in bad)
        assert {generation for _, generation in bad} <= self.bad

    def teardown(self) -> None:
        # every owner dies: nothing may stay reserved, pinned or in quarantine
        for node, epoch in self.epochs.items():
            self.handle(OwnerGone(NodeRef(NodeId(node), epoch)))
        self.leases.clear()
        self.suspect.clear()
        self.verify_all(good=True)
        self.wait(60)
        load = self.machine.load()
        assert (load.reserved_slots, load.quarantined_slots) == (0, 0)
        assert (load.leases, load.pins) == (0, 0)
        index = self.machine.inventory.index
        assert sorted(self.truth) == index.page(None, 10**6)
        assert {
            key: located.slot.generation for key, located in self.truth.items()
        } == self.rows
        assert load.used_slots == len(self.truth)
        assert self.machine.inventory.table.first_hold_ends_s is None


TestStoreModel = StoreModel.TestCase
TestStoreModel.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None
)
