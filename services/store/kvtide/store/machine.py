"""The store's decisions: messages, verdicts and time in; replies and gossip out.

Pure: no clock, socket or memory. The shell and the simulator drive it alike.

A lease ends by its owner's word (release, or two full lists that leave it out) or
with its owner's life: its slots are then free at once, for nobody writes them any
more. An owner that is merely silent is not believed to have stopped writing: the
slots that it was writing are quarantined until it says so or its life is over.
"""

from typing import assert_never

from kvtide.bus.messages import (
    Ack,
    BadCopy,
    DropExtras,
    Failure,
    LeaseRelease,
    ListBlocks,
    Owned,
    PinBlocks,
    PlacementMade,
    Presence,
    PresenceReply,
    PutBegin,
    PutCommit,
    RemoveBlocks,
    Replicate,
    SnapshotPull,
    StageBlocks,
    StoreLoad,
    UnpinBlocks,
)
from kvtide.kv import BlockKey, NodeRef
from kvtide.store.arrivals import Arrivals
from kvtide.store.curation import Curation
from kvtide.store.curation_messages import CurationRequest
from kvtide.store.events import (
    Command,
    ConnectionGone,
    Deaf,
    Event,
    Flush,
    MemoryLimit,
    OwnerGone,
    OwnerUp,
    Received,
    Reply,
    StoreAnswer,
    Tick,
    Verified,
)
from kvtide.store.fetches import BodyFetched, HeaderFetched
from kvtide.store.inventory import Inventory
from kvtide.store.leases import Held, LeaseBook, Owner
from kvtide.store.puts import MAX_OWNER_LEASES, Puts
from kvtide.store.slabs import Back, GiveBack, always_backed, nothing_given_back
from kvtide.store.slot_states import SlotState
from kvtide.store.slots import SlotTable
from kvtide.store.ssd import looking
from kvtide.store.ssd.events import (
    Found,
    RecordDone,
    SegmentDone,
    TierFailed,
    TierOpened,
)
from kvtide.store.ssd.tier import SsdTier
from kvtide.store.store_rules import StoreRules
from kvtide.store.tally import Tally


class StoreMachine:
    """One life of a store. ``handle`` is the only way in."""

    def __init__(
        self,
        store: NodeRef,
        rules: StoreRules,
        *,
        first_generation: int = 1,
        tally: Tally | None = None,
        back: Back = always_backed,
        give_back: GiveBack = nothing_given_back,
    ) -> None:
        """An empty store; a later life goes on with ``next_generation`` and tally.

        ``back`` says whether there is memory behind a part of the arena before any of
        it is given out: where it says no there is no room, for a while.
        """
        self.rules = rules
        self.draining = False
        self.tally = tally or Tally()
        table = SlotTable(
            rules.arena_bytes,
            rules.table,
            slab_bytes=rules.slab_bytes,
            first_generation=first_generation,
            back=back,
            give_back=give_back,
        )
        self.inventory = Inventory(store, table, self.tally)
        self.leases = LeaseBook()
        self._puts = Puts(self.inventory, self.tally)
        self.ssd = SsdTier(self.inventory, self.tally, rules.ssd, self._rot)
        self.arrivals = Arrivals(
            self.inventory, self.tally, rules.replicas, self._is_on_ssd
        )
        self._curation = Curation(self.inventory, self.ssd, self.tally, rules.curation)
        self._rechecks: set[tuple[int, int]] = set()
        self._bad: dict[tuple[int, int], float] = {}
        self._silence_check_s = 0.0

    def _is_on_ssd(self, key: BlockKey) -> bool:
        return self.ssd.find(key) is not None

    # ---- what the shell and tests look at

    @property
    def store(self) -> NodeRef:
        """Whose machine this is."""
        return self.inventory.store

    @property
    def next_generation(self) -> int:
        """Above every generation given out."""
        return self.inventory.table.next_generation

    def resting(self) -> tuple[tuple[int, int], ...]:
        """Uses (slot, generation) in quarantine because their bytes went bad."""
        return tuple(self._bad)

    def load(self) -> StoreLoad:
        """For the beat."""
        table = self.inventory.table
        counts, keeps = table.counts(), table.keeps
        ssd, health = self.ssd.books.segments.counts(), self.ssd.health
        return StoreLoad(
            total_slots=counts.total,
            free_slots=counts.free,
            used_slots=counts.used,
            reserved_slots=counts.reserved,
            quarantined_slots=counts.quarantined,
            used_bytes=counts.used_bytes,
            capacity_bytes=self.rules.arena_bytes,
            backed_bytes=table.backed_bytes,
            leases=len(self.leases),
            pins=keeps.pinned,
            hard_pins=keeps.hard_pinned,
            soft_pins=keeps.soft_pinned,
            tenants=len(table.accounts),
            seq=self.inventory.log.seq,
            ssd_state=health.state.value,
            ssd_reason=health.reason,
            ssd_blocks=len(self.ssd.books.entries),
            ssd_total_bytes=ssd.total,
            ssd_free_bytes=ssd.free,
            ssd_used_bytes=ssd.used,
            ssd_reserved_bytes=ssd.reserved,
            ssd_garbage_bytes=ssd.garbage,
        )

    def wake_at_s(self, now_s: float) -> float:
        """When a ``Tick`` is needed at the latest."""
        due = [min(self._silence_check_s, now_s + self.rules.silence_s)]
        since_s = self.inventory.log.since_s
        if since_s is not None:
            due.append(since_s + self.rules.gossip_delay_s)
        if self._bad:
            due.append(next(iter(self._bad.values())))
        hold_s = self.inventory.table.first_hold_ends_s
        if hold_s is not None:
            due.append(hold_s)
        ssd_s = self.ssd.wake_at_s()
        if ssd_s is not None:
            due.append(ssd_s)
        fetch_s = self.arrivals.replicas.wake_at_s()
        if fetch_s is not None:
            due.append(fetch_s)
        return min(due)

    # ---- events

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Take one event; what must be done now, in order."""
        match event:
            case Received(Presence() as asked, sender) if not self.leases.is_over(
                sender
            ):
                # there are very many of them, and they leave nothing to do
                return self._present(event, asked)
            case _:
                return [*self._decide(event, now_s), *self.ssd.work(now_s)]

    def _present(self, event: Received, asked: Presence) -> list[Command]:
        keys = asked.keys[: self.rules.keys_limit]
        found = looking.present(self.inventory, self.ssd, keys)
        return self._reply(event, PresenceReply(located=found))

    def _decide(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case Received():
                return self._receive(event, now_s)
            case Verified():
                return self._verified(event, now_s)
            case HeaderFetched() | BodyFetched():
                return [*self.arrivals.handle(event, now_s)]
            case Found() | TierOpened() | TierFailed() | RecordDone() | SegmentDone():
                return [*self.ssd.handle(event, now_s)]
            case OwnerUp() | OwnerGone() | ConnectionGone():
                self._owner_event(event)
            case Deaf():
                self.leases.grace(now_s)
            case MemoryLimit(limit_bytes):
                self.inventory.limit_memory(limit_bytes, now_s)
            case Flush():
                self.ssd.flush(now_s)
            case Tick():
                return self._tick(now_s)
            case _:
                assert_never(event)
        return []

    def _receive(self, event: Received, now_s: float) -> list[Command]:
        if self.leases.is_over(event.sender):
            self.tally.fenced_messages += 1
            return self._reply(event, _failure("fenced", "your life is over: rejoin"))
        match event.message:
            case PutBegin() | PutCommit() | StageBlocks() | LeaseRelease() | Owned():
                return self._lease_message(event, event.message, now_s)
            case Presence():
                return self._present(event, event.message)
            case SnapshotPull(after=after, limit=limit):
                told: list[Command] = [*self.inventory.tell()]
                limit = max(1, min(limit, self.rules.page_limit))
                page = looking.page(self.inventory, self.ssd, after, limit)
                return told + self._reply(event, page)
            case BadCopy() | PlacementMade() | Replicate() | DropExtras():
                return self._told(event, event.message, now_s)
            case ListBlocks() | PinBlocks() | UnpinBlocks() | RemoveBlocks():
                return self._curate(event, event.message, now_s)
            case _:
                assert_never(event.message)

    def _curate(
        self, event: Received, message: CurationRequest, now_s: float
    ) -> list[Command]:
        answer, commands = self._curation.handle(message, now_s, event.wall_ms)
        return [*commands, *self._reply(event, answer)]

    def _told(
        self,
        event: Received,
        message: BadCopy | PlacementMade | Replicate | DropExtras,
        now_s: float,
    ) -> list[Command]:
        """What a reader, a conductor, or a store that leaves says of blocks."""
        match message:
            case BadCopy():
                return self._bad_report(event, message)
            case PlacementMade(keys=keys, hold_ms=hold_ms):
                hold_s = min(max(0.0, hold_ms / 1e3), self.rules.hold_limit_s)
                warm = keys[: self.rules.keys_limit]
                self.inventory.warm(warm, now_s + hold_s, now_s)
                self.ssd.warm(warm)
            case DropExtras(keys=keys):
                self.arrivals.drop_extras(keys[: self.rules.keys_limit], now_s)
            case Replicate() if self.draining:
                return self._reply(event, _failure("draining", "the store is leaving"))
            case Replicate():
                reply = self.arrivals.order(message, now_s)
                return [*self._reply(event, reply), *self.arrivals.due(now_s)]
        return self._reply(event, Ack())

    def _lease_message(
        self,
        event: Received,
        message: PutBegin | PutCommit | StageBlocks | LeaseRelease | Owned,
        now_s: float,
    ) -> list[Command]:
        ref = message.owner if isinstance(message, Owned) else message.lease.owner
        if ref != event.sender:
            return self._reply(event, _failure("not_owner", "the lease is another's"))
        self._owner_up(ref)
        owner = self.leases.heard(ref, now_s)
        match message:
            case PutBegin(lease=lease) if self.draining and lease not in owner.leases:
                return self._reply(event, _failure("draining", "the store is leaving"))
            case PutBegin():
                owner.unplugged = False
                self.ssd.expect(message.slot_bytes, len(message.blocks))
                return self._reply(event, self._puts.begin(owner, message, now_s))
            case PutCommit(lease=lease):
                held = owner.leases.get(lease)
                return self._puts.commit(held, message, event.token)
            case StageBlocks():
                return self._stage(owner, message, event, now_s)
            case LeaseRelease(lease=lease):
                held = owner.leases.pop(lease, None)
                ended = [] if held is None else [held]
            case Owned():
                ended = self.leases.take_list(message)
            case _:
                assert_never(message)
        for held in ended:
            self._end(held)
        return self._reply(event, Ack())

    def _stage(
        self, owner: Owner, message: StageBlocks, event: Received, now_s: float
    ) -> list[Command]:
        held = owner.leases.get(message.lease)
        if held is None and len(owner.leases) >= MAX_OWNER_LEASES:
            reason = f"an owner holds at most {MAX_OWNER_LEASES} leases"
            return self._reply(event, _failure("too_many_leases", reason))
        if held is None:
            held = owner.leases[message.lease] = Held(message.lease)
        if held.expired:
            reason = "the lease expired while its owner was silent: release it"
            return self._reply(event, _failure("expired", reason))
        return [*self.ssd.stage(held, message, event.token, now_s)]

    def _verified(self, event: Verified, now_s: float) -> list[Command]:
        use = (event.slot, event.generation)
        if use not in self._rechecks:
            return self._puts.verified(event, now_s)
        self._rechecks.discard(use)
        table = self.inventory.table
        still = table.is_use(*use) and table.state[event.slot] == SlotState.COMMITTED
        if event.ok or not still:
            return []
        self._rot(event.slot, now_s)
        return []

    def _rot(self, slot: int, now_s: float) -> None:
        """A committed slot's bytes are not what they were: let it rest for a while."""
        table = self.inventory.table
        self.tally.bad_copies += 1
        self.inventory.drop(slot, "corrupt", now_s)
        table.quarantine(slot)
        use = (slot, table.generation[slot])
        self._bad[use] = now_s + self.rules.bad_slot_s

    def _bad_report(self, event: Received, report: BadCopy) -> list[Command]:
        self.tally.bad_reports += 1
        reply = self._reply(event, Ack())
        slot = self.inventory.find(report.located.slot)
        table = self.inventory.table
        if slot is None or table.state[slot] != SlotState.COMMITTED:
            return reply
        use = (slot, table.generation[slot])
        if use in self._rechecks:
            return reply
        self._rechecks.add(use)
        return [self.inventory.check_of(slot, table.header_xxh3[slot]), *reply]

    def _owner_event(self, event: OwnerUp | OwnerGone | ConnectionGone) -> None:
        match event:
            case OwnerUp(owner):
                self._owner_up(owner)
            case OwnerGone(owner):
                self._end_life(owner)
            case ConnectionGone(owner):
                self._unplugged(owner)

    def _owner_up(self, owner: NodeRef) -> None:
        self.leases.revive(owner)
        self._end_life(NodeRef(owner.node, owner.epoch - 1))

    def _end_life(self, owner: NodeRef) -> None:
        for held in self.leases.end_life(owner):
            self._end(held)

    def _unplugged(self, ref: NodeRef) -> None:
        for owner in self.leases.lives(ref):
            owner.unplugged = True
            for held in [held for held in owner.leases.values() if held.expired]:
                del owner.leases[held.lease]
                self._end(held)

    def _tick(self, now_s: float) -> list[Command]:
        table = self.inventory.table
        table.end_holds(now_s)
        for use in [use for use, end_s in self._bad.items() if end_s <= now_s]:
            del self._bad[use]
            self.inventory.free(use[0])
        if now_s >= self._silence_check_s:
            self._silence_check_s = now_s + self.rules.silence_s / 4
            table.back_again()
            self._expire_silent(now_s)
        since_s = self.inventory.log.since_s
        if since_s is not None and now_s >= since_s + self.rules.gossip_delay_s:
            return [*self.inventory.tell(), *self.arrivals.due(now_s)]
        return [*self.arrivals.due(now_s)]

    # ---- the end of leases

    def _expire_silent(self, now_s: float) -> None:
        for owner, held in self.leases.silent(now_s - self.rules.silence_s):
            self.tally.leases_expired += 1
            if owner.unplugged:
                del owner.leases[held.lease]
                self._end(held)
            else:
                self._expire(held)

    def _end(self, held: Held) -> None:
        """Nobody writes for this lease any more: free what is its alone."""
        held.over = True
        for slot, generation in reversed(held.slots.items()):
            self._let_go(slot, generation, quarantine=False)

    def _expire(self, held: Held) -> None:
        """The owner is silent and may still write what it had begun."""
        suspect = {
            slot: generation
            for slot, generation in held.slots.items()
            if self._let_go(slot, generation, quarantine=True)
        }
        held.slots, held.grants, held.expired = suspect, {}, True

    def _let_go(self, slot: int, generation: int, *, quarantine: bool) -> bool:
        """End a lease's hold on one slot; true: it is in quarantine now."""
        table = self.inventory.table
        if not table.is_use(slot, generation):
            return False
        match SlotState(table.state[slot]):
            case SlotState.WRITING if quarantine:
                table.quarantine(slot)
                return True
            case SlotState.WRITING:
                self.inventory.free(slot)
            case SlotState.QUARANTINED:
                # one that is there for bad bytes stays for its time
                if (slot, generation) not in self._bad:
                    self.inventory.free(slot)
            case _:
                table.unpin(slot)
                # a staged block may have other readers
                if table.key[slot] is None and not table.pins[slot]:
                    self.inventory.free(slot)
        return False

    def _reply(self, event: Received, message: StoreAnswer) -> list[Command]:
        return [] if event.token is None else [Reply(event.token, message)]


def _failure(code: str, reason: str) -> Failure:
    return Failure(code=code, reason=reason)
