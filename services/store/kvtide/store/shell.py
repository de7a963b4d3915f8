"""The shell around the store's machine: messages, time, threads and memory."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, takewhile

import structlog
from prometheus_client import CollectorRegistry

from kvtide.bus import (
    BusError,
    Gone,
    Incoming,
    Joined,
    Later,
    Node,
    Restarted,
    RosterEvent,
    Subscription,
)
from kvtide.bus.messages import (
    ArenaGrant,
    ArenaRequest,
    BlocksChanged,
    DrainBegin,
    DrainCancel,
    DrainQuery,
    Failure,
    Message,
    NodeState,
    PlacementMade,
    RemoveBlocks,
)
from kvtide.bus.subjects import Hop
from kvtide.catalog import Change
from kvtide.kv import BlockKey, NodeId, NodeRef, Role
from kvtide.pool import Ledger, PoolLimits, Stager
from kvtide.runtime import TaskScope
from kvtide.store.accounts import Account
from kvtide.store.arena import Arena, arena_bytes, note_huge_pages
from kvtide.store.askers import Askers
from kvtide.store.drained_mark import DrainedMark
from kvtide.store.draining import Drainer, LiveStore
from kvtide.store.events import (
    ConnectionGone,
    Deaf,
    Event,
    Flush,
    Gossip,
    MemoryLimit,
    OwnerGone,
    OwnerUp,
    Received,
    Reply,
    StoreRequest,
    Tick,
    Verify,
    WriteRows,
)
from kvtide.store.fetcher import Fetcher
from kvtide.store.fetches import ArrivalCommand, FetchBody, FetchHeader
from kvtide.store.heat import UseLog
from kvtide.store.host_reading import HostMemory
from kvtide.store.host_watch import HostWatch
from kvtide.store.machine import StoreMachine
from kvtide.store.metrics import StoreMetrics
from kvtide.store.rows import BlockRows, NoRows
from kvtide.store.setting_rules import host_rules, store_rules, tenant_tags
from kvtide.store.settings import StoreSettings
from kvtide.store.ssd import looking
from kvtide.store.ssd.life import (
    DeletedSpaces,
    SsdLife,
    flushed,
    no_deleted_spaces,
)
from kvtide.store.ssd.sealing import TenantKeys
from kvtide.store.verifier import Verifier

log = structlog.get_logger("kvtide.store")

MAX_GOSSIP_WAITING = 1024


class StoreService:
    """A running store: ``start`` … ``close``, inside its node's life."""

    def __init__(
        self,
        node: Node,
        settings: StoreSettings,
        registry: CollectorRegistry,
        rows: BlockRows | None = None,
        *,
        leave: Callable[[], None] | None = None,
        deleted_spaces: DeletedSpaces = no_deleted_spaces,
        drained: DrainedMark | None = None,
        ssd_keys: TenantKeys | None = None,
    ) -> None:
        """Nothing is allocated before ``start``. ``leave``: a drain is complete.

        ``deleted_spaces`` says, in a thread, what was deleted while the node was down.
        ``drained`` is kept from process to process. ``ssd_keys``: what blocks on the SSD
        are encrypted with.
        """
        self.machine: StoreMachine | None = None
        self._node = node
        self._settings = settings
        self._rows = rows or NoRows()
        self._metrics = StoreMetrics(registry)
        self._tasks = TaskScope(on_error=_task_failed)
        self._subscriptions: list[Subscription] = []
        self._gossip: asyncio.Queue[BlocksChanged] = asyncio.Queue(MAX_GOSSIP_WAITING)
        self._askers = Askers()
        self._fetcher: Fetcher | None = None
        self._uses = UseLog()
        self._stager = Stager(node, Ledger(), self._tasks, PoolLimits())
        drained_store = LiveStore(lambda: self.machine)
        self._drainer = Drainer(
            node, drained_store, self._tasks, leave or _stay, drained or DrainedMark()
        )
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = float("inf")
        self._arena: Arena | None = None
        self._verifier: Verifier | None = None
        self._ssd = SsdLife(
            node, settings, self._metrics.ssd_s, deleted_spaces, ssd_keys
        )

    # ---- life

    async def start(self) -> None:
        """Allocate the arena, listen, and say that it is ready.

        Raises:
            ConfigError: the arena can't be had as it is set.
        """
        settings, node = self._settings, self._node
        memory = HostMemory()
        available = memory.read().available_bytes
        length = arena_bytes(settings.dram_bytes, settings.shm_dir, available)
        self._arena = arena = Arena(node.endpoint, length)
        note_huge_pages(settings.shm_dir)
        self._verifier = Verifier(
            self._arena.view,
            node.clock,
            settings.verify_threads,
            self._metrics.verify_s,
        )
        rules = store_rules(settings, length, node.secret)
        machine = StoreMachine(
            node.ref, rules, back=arena.back, give_back=arena.give_back
        )
        self._begin_life(node.ref, machine)
        self._metrics.follow_tenants(
            tenant_tags(settings, node.secret),
            settings.tenant_limit_bytes,
            self._account_of,
        )
        node.endpoint.on_peer_gone(self._peer_gone)
        node.on_member(self._member)
        node.on_fenced(self._fenced)
        self._tasks.spawn(self._publish(), name="store gossip")
        watch = HostWatch(
            node.clock,
            memory,
            host_rules(settings, memory.total_bytes()),
            every_s=settings.host_check_s,
        )
        self._tasks.spawn(
            watch.run(length, self._backed_bytes, self._limit_memory), name="host watch"
        )
        placements = node.subjects.all_placements()
        self._subscriptions = [
            await node.inbox(Role.STORE, Hop.POOL, self._hear),
            await node.inbox(Role.STORE, Hop.QUERY, self._hear),
            await node.bus.subscribe(placements, self._hear),
        ]
        node.arenas(self._arena.readable())
        self._drainer.resume()
        out = self._drainer.stays_out
        node.set_state(NodeState.DRAINING if out else NodeState.READY)
        log.info("store_ready", bytes=length, node=node.ref.node)

    @property
    def stays_out(self) -> bool:
        """Whether it was drained before it was started, and waits to be told to stay."""
        return self._drainer.stays_out

    @property
    def ssd_trouble(self) -> str:
        """What is wrong with the SSD tier; empty: nothing. From any thread."""
        return self._ssd.trouble

    async def close(self) -> None:
        """Take no more, end what waits, and give the memory back. Idempotent."""
        self._node.set_state(NodeState.DRAINING)
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.close()
        self._askers.drop()
        await self._flush()
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.close(timeout_s=self._settings.drain_timeout_s)
        verifier, self._verifier = self._verifier, None
        if verifier is not None:
            await verifier.close()
        await self._ssd.close(self._settings.drain_timeout_s)
        machine, self.machine = self.machine, None
        if machine is not None:
            self._rows.end(machine.store)
        self._node.arenas()
        arena, self._arena = self._arena, None
        if arena is not None:
            await arena.close()

    def repair_rows(self) -> Iterator[Change]:
        """The catalog lost changes: the whole state, each piece true when it is taken.

        It ends with the life of the store that it is of.
        """
        machine = self.machine
        if machine is not None:
            rows = takewhile(
                lambda _: self.machine is machine,
                looking.rows(machine.inventory, machine.ssd),
            )
            yield from self._rows.repair(machine.store, rows)

    async def _flush(self) -> None:
        """Have the SSD take what only DRAM has, for as long as that may take."""
        machine, limit_s = self.machine, self._settings.ssd_flush_s
        # what a store has that was drained is elsewhere
        if machine is not None and limit_s and not machine.draining:
            self._run(Flush())
            await flushed(machine.ssd, self._node.clock, limit_s)

    # ---- messages

    async def _hear(self, incoming: Incoming) -> Message | Later | None:
        message = incoming.message
        if isinstance(message, ArenaRequest):
            return self._grant(incoming, message)
        if isinstance(message, DrainBegin | DrainCancel | DrainQuery):
            return self._drainer.handle(message)
        if isinstance(message, PlacementMade):
            self._note_uses(message.keys)
        if isinstance(message, StoreRequest):
            return self._ask(incoming, message)
        if incoming.wants_reply:
            reason = f"a store does not take {type(message).__name__}"
            return Failure(code="unexpected", reason=reason)
        return None

    def _note_uses(self, keys: Sequence[BlockKey]) -> None:
        """Have the catalog know of heat, now and then."""
        machine, clock = self.machine, self._node.clock
        if machine is None:
            return
        self._uses.note(keys, clock.monotonic())
        if self._uses.due(clock.monotonic()):
            inventory, ssd = machine.inventory, machine.ssd
            self._rows.used(self._uses.take(inventory, ssd, clock.wall()))

    def _grant(self, incoming: Incoming, asked: ArenaRequest) -> Message:
        node = self._node
        if self._arena is None or not node.host or asked.host != node.host:
            return Failure(
                code="other_host", reason="only workers on this store's host may write"
            )
        if asked.worker != incoming.sender:
            return Failure(code="not_sender", reason="ask for yourself")
        return ArenaGrant(store=node.ref, arenas=(self._arena.writable(),))

    def _ask(self, incoming: Incoming, message: StoreRequest) -> Message | Later | None:
        """Give it to the machine; most answers are there at once."""
        if not incoming.wants_reply:
            self._run(Received(message, incoming.sender, None, self._wall_ms()))
            return None
        return self._askers.ask(
            lambda token: self._run(
                Received(message, incoming.sender, token, self._wall_ms())
            )
        )

    async def remove(self, message: RemoveBlocks) -> Message | None:
        """As if somebody had asked for it over the bus; None: no life is there."""
        if self.machine is None:
            return None
        heard = partial(Received, message, self._node.ref, wall_ms=self._wall_ms())
        answer = self._askers.ask(lambda token: self._run(heard(token=token)))
        return None if isinstance(answer, Later) else answer

    def _wall_ms(self) -> int:
        return round(self._node.clock.wall() * 1e3)

    # ---- the machine

    def _run(self, *events: Event) -> None:
        """Let the machine decide, and do what it says."""
        machine = self.machine
        if machine is None:
            return
        checks: list[Verify] = []
        now_s = self._node.clock.monotonic()
        for command in chain.from_iterable(machine.handle(e, now_s) for e in events):
            match command:
                case Reply(token, message):
                    self._askers.answer(token, message)
                case Gossip(message):
                    self._tell(message)
                case Verify():
                    checks.append(command)
                case WriteRows():
                    self._rows.write(machine.store, command)
                case FetchHeader() | FetchBody():
                    self._tasks.spawn(self._fetch(machine, command), name="replica")
                case _:
                    self._ssd.submit(command)
        self._verify(machine, checks)
        load = machine.load()
        self._node.report(load)
        self._metrics.update(load, len(machine.inventory.index), machine.tally)
        self._ssd.note(load)
        self._arm(machine)

    def _verify(self, machine: StoreMachine, wanted: Sequence[Verify]) -> None:
        if self._verifier is None or not wanted:
            return
        # a verdict on an earlier life's slot means nothing
        self._verifier.submit(
            wanted,
            lambda verdicts: self._run(*verdicts) if self.machine is machine else None,
        )

    async def _fetch(self, machine: StoreMachine, command: ArrivalCommand) -> None:
        """Fetch from another store; what came of it means nothing to a later life."""
        if self._fetcher is None:
            return
        event = await self._fetcher.fetch(command)
        if self.machine is machine:
            self._run(event)

    def _is_machine(self, machine: StoreMachine) -> bool:
        return self.machine is machine

    def _arm(self, machine: StoreMachine) -> None:
        """Have the machine's next tick come in time."""
        now_s = self._node.clock.monotonic()
        wake_s = machine.wake_at_s(now_s)
        if self._timer is not None and self._timer_s <= wake_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = wake_s
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, wake_s - now_s), self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self._node.bus.connected:
            self._run(Deaf())
        self._run(Tick())

    def _begin_life(self, ref: NodeRef, machine: StoreMachine) -> None:
        self.machine = machine
        if self._arena is not None:
            alive = partial(self._is_machine, machine)
            self._fetcher = Fetcher(self._node, self._arena.view, self._stager, alive)
            self._ssd.begin(
                ref.node,
                self._arena.view,
                lambda event: self._run(event) if self.machine is machine else None,
            )
        self._rows.begin(ref)
        for member in self._node.roster.live():
            self._run(OwnerUp(member.ref))
        self._run(Tick())

    # ---- what happens around it

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

    def _peer_gone(self, node: str, epoch: int) -> None:
        self._run(ConnectionGone(NodeRef(NodeId(node), epoch)))

    def _fenced(self, ref: NodeRef) -> None:
        """Others forgot what we hold while we were paused: begin anew, empty."""
        before, arena = self.machine, self._arena
        if before is None or arena is None:
            return
        self._askers.drop()
        machine = StoreMachine(
            ref,
            before.rules,
            first_generation=before.next_generation,
            tally=before.tally,
            back=arena.back,
            give_back=arena.give_back,
        )
        # the new life takes its memory anew
        arena.give_back(0, before.rules.arena_bytes)
        machine.draining = before.draining
        self._begin_life(ref, machine)

    def _backed_bytes(self) -> int:
        machine = self.machine
        return 0 if machine is None else machine.inventory.table.backed_bytes

    def _account_of(self, tag: bytes) -> Account | None:
        machine = self.machine
        return None if machine is None else machine.inventory.table.accounts.find(tag)

    def _limit_memory(self, limit_bytes: int) -> None:
        self._run(MemoryLimit(limit_bytes))

    def _tell(self, message: BlocksChanged) -> None:
        if self._gossip.full():
            # the gap in the numbers makes every follower pull a snapshot
            self._gossip.get_nowait()
        self._gossip.put_nowait(message)

    async def _publish(self) -> None:
        while True:
            message = await self._gossip.get()
            subject = self._node.subjects.blocks(message.store.node)
            try:
                await self._node.bus.publish(subject, message)
            except BusError as error:
                log.debug("gossip_lost", seq=message.seq, error=str(error))


def _stay() -> None:
    """A store without a process of its own has nowhere to go."""


def _task_failed(error: BaseException) -> None:
    log.error("store_task_failed", exc_info=error)
