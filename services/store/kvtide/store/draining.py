"""The shell around a drain: follows the other stores, orders copies, then leaves."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from kvtide.bus import BlockFollower, BusError, Node
from kvtide.bus.messages import (
    DrainBegin,
    DrainCancel,
    DrainPhase,
    DrainQuery,
    DrainState,
    NodeState,
    ReplicaReason,
    Replicate,
    StoreLoad,
)
from kvtide.bus.roster import Member
from kvtide.bus.subjects import Hop
from kvtide.kv import BlockKey, Located, NodeId, Role
from kvtide.runtime import LimitError, TaskScope
from kvtide.store.drain import Drain, DrainRules, Order, Peer
from kvtide.store.drained_mark import DrainedMark
from kvtide.store.machine import StoreMachine
from kvtide.store.ssd import looking

log = structlog.get_logger("kvtide.store")

TICK_S = 0.1
ORDER_TIMEOUT_S = 3.0
LOOK_PAUSE_KEYS = 5000
FAREWELL_S = 1.0
"""How long whoever watches the drain may still ask, once all is moved."""

DrainMessage = DrainBegin | DrainCancel | DrainQuery
"""What a drain is asked."""


class Drained(Protocol):
    """The store that drains, as a drain sees it."""

    def copies(self) -> dict[BlockKey, Located]:
        """One copy of each block that is here."""
        ...

    def find(self, key: BlockKey) -> Located | None:
        """A copy of this block, if it is still here."""
        ...

    def leases(self) -> int:
        """How many are held."""
        ...

    def set_draining(self, *, draining: bool) -> None:
        """Take no new leases and copies, or take them again."""
        ...


class LiveStore:
    """A ``Drained`` by the machine of the life that a store has at present."""

    def __init__(self, machine: Callable[[], StoreMachine | None]) -> None:
        """``machine`` says which; None: it has no life."""
        self._machine = machine

    def copies(self) -> dict[BlockKey, Located]:
        """See ``Drained.copies``."""
        found: dict[BlockKey, Located] = {}
        machine = self._machine()
        if machine is not None:
            # those in DRAM come first
            for row in looking.rows(machine.inventory, machine.ssd):
                found.setdefault(row.located.key, row.located)
        return found

    def find(self, key: BlockKey) -> Located | None:
        """See ``Drained.find``."""
        machine = self._machine()
        if machine is None:
            return None
        return machine.inventory.copy_of(key) or machine.ssd.find(key)

    def leases(self) -> int:
        """See ``Drained.leases``."""
        machine = self._machine()
        return 0 if machine is None else len(machine.leases)

    def set_draining(self, *, draining: bool) -> None:
        """See ``Drained.set_draining``."""
        machine = self._machine()
        if machine is not None:
            machine.draining = draining


class Drainer:
    """One store's way out. For one event loop; ends with its tasks."""

    def __init__(
        self,
        node: Node,
        store: Drained,
        tasks: TaskScope,
        leave: Callable[[], None],
        mark: DrainedMark,
    ) -> None:
        """``leave`` ends the process cleanly; ``mark`` outlives it."""
        self._mark = mark
        self.stays_out = False
        self._node = node
        self._store = store
        self._tasks = tasks
        self._leave = leave
        self._drain: Drain | None = None
        self._running: asyncio.Task[None] | None = None
        self._rules = DrainRules()

    def resume(self) -> None:
        """Stay out if an earlier process was drained and nobody wants it back yet."""
        self.stays_out = self._mark.is_set()
        if self.stays_out:
            log.warning("drained_before", path=str(self._mark.path))
            self._store.set_draining(draining=True)

    def handle(self, message: DrainMessage) -> DrainState:
        """Begin, end or show a drain."""
        match message:
            case DrainBegin(force=force):
                self._begin(force=force)
            case DrainCancel():
                self._cancel()
            case DrainQuery():
                pass
        if self._drain is None:
            phase = DrainPhase.DRAINED if self.stays_out else DrainPhase.IDLE
            return DrainState(phase=phase, leases=self._store.leases())
        return self._drain.state(self._store.leases())

    def _begin(self, *, force: bool) -> None:
        if self.stays_out:
            return
        if self._drain is not None:
            self._drain.force = self._drain.force or force
            return
        log.info("drain_begins", force=force)
        self._store.set_draining(draining=True)
        self._node.set_state(NodeState.DRAINING)
        drain = self._drain = Drain(self._node.ref.node, force=force, rules=self._rules)
        self._running = self._tasks.spawn(self._run(drain), name="drain")

    def _cancel(self) -> None:
        drain, self._drain = self._drain, None
        self._mark.clear()
        if drain is None and not self.stays_out:
            return
        self.stays_out = False
        if self._running is not None:
            self._running.cancel()
        log.info("drain_cancelled")
        self._store.set_draining(draining=False)
        self._node.set_state(NodeState.READY)

    async def _run(self, drain: Drain) -> None:
        """Look, move, look again if blocks came meanwhile, leave."""
        while True:
            await self._look_and_move(drain)
            if not drain.unknown(self._store.copies()):
                break
        state = drain.state(0)
        log.info("drained", moved=state.moved, left=state.left)
        self._mark.set()
        await self._node.clock.sleep(FAREWELL_S)
        self._leave()

    async def _look_and_move(self, drain: Drain) -> None:
        copies = self._store.copies()
        drain.own({key: copy.slot.length for key, copy in copies.items()})
        follower = BlockFollower(self._node, drain)
        await follower.start()
        try:
            while drain.phase is not DrainPhase.LEAVING:
                await self._step(drain, follower)
                await self._node.clock.sleep(TICK_S)
        finally:
            await follower.close()

    async def _step(self, drain: Drain, follower: BlockFollower) -> None:
        node = self._node
        stores = [
            member
            for member in node.roster.live(Role.STORE)
            if member.node != node.ref.node
        ]
        drain.leaving(member.node for member in stores if not member.ready)
        orders: list[Order] = []
        if drain.phase is DrainPhase.LOOKING and follower.exact:
            orders = drain.looked()
        peers = [
            Peer(member.ref, room_bytes(member)) for member in stores if member.ready
        ]
        now_s = node.clock.monotonic()
        orders += drain.tick(peers, self._store.leases(), now_s)
        for order in orders:
            await self._send(drain, order)

    async def _send(self, drain: Drain, order: Order) -> None:
        """An order that does not arrive is given again when its time is over."""
        located: list[Located] = []
        lost: list[BlockKey] = []
        for key in order.keys:
            copy = self._store.find(key)
            if copy is None:
                lost.append(key)
            else:
                located.append(copy)
        drain.lost(lost)
        if not located:
            return
        subject = self._node.subjects.inbox(Role.STORE, NodeId(order.store), Hop.QUERY)
        message = Replicate(reason=ReplicaReason.DRAIN, located=tuple(located))
        try:
            await self._node.bus.request(subject, message, timeout_s=ORDER_TIMEOUT_S)
        except (BusError, LimitError) as error:
            log.info("drain_order_lost", store=order.store, error=str(error))


def room_bytes(member: Member) -> int:
    """What a store says that it has free, on an SSD that takes blocks too.

    What is in both tiers counts in both: it makes room in DRAM by going there.
    """
    for load in member.beat.load:
        if isinstance(load, StoreLoad):
            dram = max(0, load.capacity_bytes - load.used_bytes)
            return dram + load.ssd_free_bytes * (load.ssd_state == "ready")
    return 0
