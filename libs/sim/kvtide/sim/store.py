"""A store in virtual time: its machine, an arena, and checks that take a while."""

from itertools import count

from xxhash import xxh3_64_intdigest

from kvtide.bus import (
    BusError,
    Gone,
    Incoming,
    Joined,
    Later,
    Node,
    Restarted,
    RosterEvent,
)
from kvtide.bus.messages import Message, NodeState
from kvtide.bus.subjects import Hop
from kvtide.kv import Located, NodeRef, Role, SlotRef, renewed_header
from kvtide.sim.engine import LAYOUT
from kvtide.sim.kernel import Kernel, Life, Promise
from kvtide.sim.memory import SimMemory
from kvtide.store.events import (
    ConnectionGone,
    Event,
    Gossip,
    OwnerGone,
    OwnerUp,
    Received,
    Reply,
    StoreRequest,
    Tick,
    Verify,
)
from kvtide.store.fetches import (
    ArrivalCommand,
    BodyFetched,
    CorruptSource,
    FetchBody,
    FetchHeader,
    HeaderFetched,
    announced_header,
    check_sums,
    part_bounds,
)
from kvtide.store.machine import StoreMachine, StoreRules
from kvtide.store.verify import verify_slot

VERIFY_S = 0.003
SLAB_SLOTS = 8


def rules(slots: int) -> StoreRules:
    """Rules of a store with room for that many blocks of the simulated model."""
    size = LAYOUT.slot_bytes
    return StoreRules(arena_bytes=slots * size, slab_bytes=SLAB_SLOTS * size)


class SimStore:
    """Drives a ``StoreMachine`` as its shell does."""

    def __init__(
        self, kernel: Kernel, life: Life, node: Node, memory: SimMemory, slots: int
    ) -> None:
        """An empty store."""
        self._kernel = kernel
        self._life = life
        self._node = node
        self._memory = memory
        self.machine = StoreMachine(node.ref, rules(slots))
        self.arena = memory.allocate(node.ref, self.machine.rules.arena_bytes)
        memory.watch(self._in_use)
        self._askers: dict[int, Promise[Message | None]] = {}
        self._tokens = count()
        self._wake_s = float("inf")

    async def start(self) -> None:
        """Listen, and say that it is ready."""
        node = self._node
        node.on_member(self._member)
        node.on_fenced(self._fenced)
        await node.inbox(Role.STORE, Hop.POOL, self._hear)
        await node.inbox(Role.STORE, Hop.QUERY, self._hear)
        await node.bus.subscribe(node.subjects.all_placements(), self._hear)
        self._run(Tick())
        node.set_state(NodeState.READY)

    def _in_use(self, slot: SlotRef) -> bool:
        """Whether the slot is still in the use that it was given out for."""
        inventory = self.machine.inventory
        known = slot.owner == inventory.store
        return not known or inventory.find(slot) is not None

    def copies(self) -> tuple[Located, ...]:
        """All blocks that can be found here, by key."""
        inventory = self.machine.inventory
        return inventory.page(None, len(inventory.index) + 1).located

    def blocks(self) -> list[memoryview]:
        """The bytes of ``copies``."""
        starts = [one.slot.offset for one in self.copies()]
        return [self.arena[start : start + LAYOUT.slot_bytes] for start in starts]

    def connection_gone(self, owner: NodeRef) -> None:
        """The transfer connections of a process have ended."""
        self._run(ConnectionGone(owner))

    async def _hear(self, incoming: Incoming) -> Message | Later | None:
        message = incoming.message
        if not isinstance(message, StoreRequest):
            return None
        if not incoming.wants_reply:
            self._run(Received(message, incoming.sender))
            return None
        token = next(self._tokens)
        answer = self._askers[token] = Promise[Message | None](self._kernel)
        self._run(Received(message, incoming.sender, token))
        return Later(_answered(answer))

    def _run(self, event: Event) -> None:
        machine = self.machine
        for command in machine.handle(event, self._kernel.now_s):
            match command:
                case Reply(token, message):
                    answer = self._askers.pop(token, None)
                    if answer is not None:
                        answer.set(message)
                case Gossip(message):
                    subject = self._node.subjects.blocks(message.store.node)
                    self._kernel.spawn(self._tell(subject, message), self._life)
                case Verify():
                    self._verify(machine, command)
                case FetchHeader() | FetchBody():
                    self._kernel.spawn(self._fetch(machine, command), self._life)
                case _:
                    pass
        self._node.report(machine.load())
        self._arm(machine)

    async def _tell(self, subject: str, message: Message) -> None:
        try:
            await self._node.bus.publish(subject, message)
        except BusError:
            return

    def _verify(self, machine: StoreMachine, wanted: Verify) -> None:
        def check() -> None:
            if self.machine is machine:
                self._run(verify_slot(self.arena, wanted))

        self._kernel.at(VERIFY_S, check, self._life)

    async def _fetch(self, machine: StoreMachine, command: ArrivalCommand) -> None:
        """Copy a block from another store, as it is at the end of the read."""
        slot = command.source.slot
        found = await self._memory.read(slot, 0, slot.length, self._life)
        if self.machine is machine:
            self._run(_fetched(command, found, self.arena))

    def _arm(self, machine: StoreMachine) -> None:
        now_s = self._kernel.now_s
        wake_s = machine.wake_at_s(now_s)
        if self._wake_s <= wake_s:
            return
        self._wake_s = wake_s
        self._kernel.at(wake_s - now_s, self._tick, self._life)

    def _tick(self) -> None:
        self._wake_s = float("inf")
        self._run(Tick())

    def _member(self, event: RosterEvent) -> None:
        match event:
            case Joined(member):
                self._run(OwnerUp(member.ref))
            case Restarted(before, member):
                self._run(OwnerGone(before.ref))
                self._run(OwnerUp(member.ref))
            case Gone(member):
                self._run(OwnerGone(member.ref))
            case _:
                pass

    def _fenced(self, ref: NodeRef) -> None:
        before = self.machine
        askers, self._askers = self._askers, {}
        for answer in askers.values():
            answer.set(None)
        self._memory.adopt(ref, self.arena)
        self.machine = StoreMachine(
            ref,
            before.rules,
            first_generation=before.next_generation,
            tally=before.tally,
        )
        for member in self._node.roster.live():
            self._run(OwnerUp(member.ref))
        self._run(Tick())


async def _answered(answer: Promise[Message | None]) -> Message | None:
    return await answer


def _fetched(
    command: ArrivalCommand, found: bytes | None, arena: memoryview
) -> HeaderFetched | BodyFetched:
    """What a store's fetcher would make of these bytes of the source's slot."""
    number, header = command.number, isinstance(command, FetchHeader)
    if found is None:
        return HeaderFetched(number, None) if header else BodyFetched(number, None)
    try:
        if isinstance(command, FetchHeader):
            return HeaderFetched(number, announced_header(found, command.source))
        bounds = part_bounds(command.raw)
        check_sums(command.raw, [xxh3_64_intdigest(found[at:to]) for at, to in bounds])
    except CorruptSource:
        if header:
            return HeaderFetched(number, None, corrupt=True)
        return BodyFetched(number, None, corrupt=True)
    raw = renewed_header(command.raw, command.generation)
    block = raw + found[len(raw) : bounds[-1][1]]
    arena[command.offset : command.offset + len(block)] = block
    return BodyFetched(number, xxh3_64_intdigest(raw))
