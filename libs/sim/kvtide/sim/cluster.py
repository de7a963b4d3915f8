"""All roles on one network in virtual time, which can crash, pause and come back.

Gateways, conductors, nodes, rosters and block followers are the production ones, shells
included; stores and workers are the production machines in thin shells of this library,
for their own ones need threads, shared memory and torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from kvtide.bus import Identity, Node
from kvtide.bus.network import Network
from kvtide.conductor.dispatcher import Dispatcher
from kvtide.conductor.limits import ConductorLimits
from kvtide.conductor.shell import ConductorService
from kvtide.gateway.life import LifeLimits
from kvtide.gateway.metrics import GatewayMetrics
from kvtide.gateway.shell import Gateway
from kvtide.kv import NodeId, NodeRef, Role
from kvtide.sim.decode import SimDecode
from kvtide.sim.kernel import Kernel, Life, SimClock, SimTasks
from kvtide.sim.memory import SimMemory
from kvtide.sim.net import SimBus, SimNet
from kvtide.sim.pool import SimPool
from kvtide.sim.prefill import SimPrefill
from kvtide.sim.spaces import SECRET
from kvtide.sim.store import SimStore

GONE_S = 0.05
"""How long it takes until peers see that a process's connections have ended."""

GATEWAY_LIMITS = LifeLimits(deadline_s=30.0)
CONDUCTOR_LIMITS = ConductorLimits()
"""As in production: what is not let go of before its bound is a leak to the checker."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a simulation builds its processes of; replaced to plant bugs."""

    pool: type[SimPool] = SimPool
    prefill: type[SimPrefill] = SimPrefill
    decode: type[SimDecode] = SimDecode
    store: type[SimStore] = SimStore


@dataclass(frozen=True, slots=True)
class Shape:
    """How many of each role; workers and stores are spread over ``hosts``."""

    hosts: int = 2
    gateways: int = 2
    conductors: int = 2
    prefills: int = 2
    decodes: int = 2
    store_slots: int = 40


@dataclass(slots=True)
class Process:
    """A process that may have many lives; what it runs is of the present one."""

    name: NodeId
    role: Role
    host: str
    epoch: int = 0
    wall_ahead_s: float = 0.0
    life: Life = field(default_factory=lambda: Life(""))
    node: Node | None = None
    gateway: Gateway | None = None
    conductor: Dispatcher | None = None
    store: SimStore | None = None
    pool: SimPool | None = None
    prefill: SimPrefill | None = None
    decode: SimDecode | None = None

    @property
    def running(self) -> bool:
        """Whether it lives."""
        return self.life.alive and self.node is not None


class SimCluster:
    """See the module. Nothing is random here: the network and the caller are."""

    def __init__(
        self, network: Network, shape: Shape | None = None, parts: Parts | None = None
    ) -> None:
        """Nobody runs yet."""
        self.shape = shape or Shape()
        self.parts = parts or Parts()
        self.kernel = Kernel()
        self.net = SimNet(self.kernel, network)
        self.memory = SimMemory(self.kernel)
        self.processes: dict[NodeId, Process] = {}
        self.on_crash: list[Callable[[Process], None]] = []
        self._add(Role.STORE, self.shape.hosts)
        self._add(Role.CONDUCTOR, self.shape.conductors)
        self._add(Role.PREFILL, self.shape.prefills)
        self._add(Role.DECODE, self.shape.decodes)
        self._add(Role.GATEWAY, self.shape.gateways)

    def _add(self, role: Role, count: int) -> None:
        for number in range(count):
            name = NodeId(f"{role}-{number}")
            host = f"host-{number % self.shape.hosts}"
            self.processes[name] = Process(name, role, host)

    def of(self, role: Role) -> list[Process]:
        """The processes of a role."""
        return [one for one in self.processes.values() if one.role is role]

    def start_all(self) -> None:
        """Start everybody."""
        for process in self.processes.values():
            self.start(process)

    def start(self, process: Process) -> None:
        """Begin a new life of a process that does not run."""
        # as ``EpochFile`` does, with room for lives that begin with a fence
        wall_s = self.kernel.now_s + process.wall_ahead_s
        process.epoch = max(process.epoch + 1000, int(wall_s * 1000))
        process.life = Life(f"{process.name}/{process.epoch}")
        process.life.wall_ahead_s = process.wall_ahead_s
        life, kernel = process.life, self.kernel
        identity = Identity(process.name, process.epoch)
        process.node = Node(
            roles=(process.role,),
            bus=SimBus(self.net, identity, life),
            identity=identity,
            clock=SimClock(kernel, life),
            secret=SECRET,
            host=process.host,
            tasks=SimTasks(kernel, life),
        )
        kernel.spawn(self._boot(process, process.node), life)

    def crash(self, process: Process) -> None:
        """Kill it: nothing that it still had to do is done."""
        if not process.running:
            return
        process.life.alive = False
        self.net.forget(process.life)
        ref = NodeRef(process.name, process.epoch)
        if process.store is not None:
            self.memory.free(process.store.arena)
        for call in self.on_crash:
            call(process)
        process.node = process.gateway = process.conductor = None
        process.store = process.pool = process.prefill = process.decode = None
        for store in self.of(Role.STORE):
            self._unplug(store, ref)

    def pause(self, process: Process, seconds: float) -> None:
        """Stop it for a while, as SIGSTOP and SIGCONT do."""
        process.life.paused_until_s = self.kernel.now_s + seconds

    def step_clock(self, process: Process, seconds: float) -> None:
        """Put its wall clock forward, or back; it stays so for later lives."""
        process.wall_ahead_s += seconds
        process.life.wall_ahead_s = process.wall_ahead_s

    def _unplug(self, store: Process, ref: NodeRef) -> None:
        service = store.store
        if service is not None:
            self.kernel.at(GONE_S, lambda: service.connection_gone(ref), store.life)

    async def _boot(self, process: Process, node: Node) -> None:
        await node.start()
        match process.role:
            case Role.GATEWAY:
                metrics = GatewayMetrics(CollectorRegistry())
                gateway = Gateway(node, GATEWAY_LIMITS, metrics, max_open_requests=256)
                await gateway.start()
                process.gateway = gateway
            case Role.CONDUCTOR:
                process.conductor = Dispatcher(node.ref, limits=CONDUCTOR_LIMITS)
                service = ConductorService(
                    node, process.conductor, None, CollectorRegistry()
                )
                await service.start()
            case Role.STORE:
                process.store = self.parts.store(
                    self.kernel, process.life, node, self.memory, self.shape.store_slots
                )
                await process.store.start()
            case Role.PREFILL | Role.DECODE:
                await self._boot_worker(process, node)

    async def _boot_worker(self, process: Process, node: Node) -> None:
        kernel, life = self.kernel, process.life
        pool = process.pool = self.parts.pool(kernel, life, node, self.memory)
        await pool.start()
        if process.role is Role.PREFILL:
            process.prefill = self.parts.prefill(kernel, life, node, pool)
            await process.prefill.start()
        else:
            process.decode = self.parts.decode(kernel, life, node, pool)
            await process.decode.start()
