"""Endpoints inside one process: for tests and simulation, with faults on demand.

Without a fault, a transfer is complete when ``read`` or ``write`` returns, so that a
simulation stays deterministic. Delays are slept on the fabric's clock.
"""

from kvtide.runtime import Clock, TaskScope
from kvtide.transfer.buffers import plain_view
from kvtide.transfer.capability import CapabilityMint, derive_key
from kvtide.transfer.errors import (
    OutOfBounds,
    Refused,
    StaleEpoch,
    Unreachable,
)
from kvtide.transfer.handles import (
    PROTOCOL,
    EndpointAddress,
)
from kvtide.transfer.interface import (
    Notified,
    Observer,
    PeerGone,
    TransferEndpoint,
)
from kvtide.transfer.memory_peer import PATH, FaultPlan, MemoryPeer, Party, no_fault
from kvtide.transfer.quiet import QuietObserver
from kvtide.transfer.regions import Region, RegionTable


class MemoryFabric:
    """Connects the endpoints of one process."""

    def __init__(self, clock: Clock, *, faults: FaultPlan | None = None) -> None:
        """Start with no endpoint."""
        self.clock = clock
        self.faults: FaultPlan = faults or no_fault
        self._endpoints: dict[int, MemoryEndpoint] = {}
        self._ports = 0

    def endpoint(
        self,
        *,
        node: str,
        epoch: int,
        secret: bytes = b"one secret for all of this fabric",
        host: str = "host-0",
        observer: Observer | None = None,
    ) -> "MemoryEndpoint":
        """An endpoint, to be started; those of one ``host`` can map each other."""
        self._ports += 1
        return MemoryEndpoint(
            self,
            EndpointAddress(node, epoch, host, self._ports, host, PROTOCOL),
            secret,
            observer,
        )

    def attach(self, endpoint: "MemoryEndpoint") -> None:
        """Make a started endpoint reachable."""
        self._endpoints[endpoint.address.port] = endpoint

    def detach(self, endpoint: "MemoryEndpoint") -> None:
        """An endpoint is closed: its peers learn that it is gone."""
        self._endpoints.pop(endpoint.address.port, None)
        for other in list(self._endpoints.values()):
            other.peer_left(endpoint)

    def find(self, address: EndpointAddress) -> "MemoryEndpoint | None":
        """Who answers at the address."""
        return self._endpoints.get(address.port)


class MemoryEndpoint(TransferEndpoint):
    """See ``TransferEndpoint``. Made by ``MemoryFabric.endpoint``."""

    def __init__(
        self,
        fabric: MemoryFabric,
        address: EndpointAddress,
        secret: bytes,
        observer: Observer | None,
    ) -> None:
        """Not reachable before ``start``."""
        self.node = address.node
        self.epoch = address.epoch
        self.fabric = fabric
        self.clock = fabric.clock
        self.key = derive_key(secret, "authentication")
        quiet = None if observer is None else QuietObserver(observer)
        self.observer: Observer | None = quiet
        mint = CapabilityMint(derive_key(secret, "capability"), self.node, self.epoch)
        self.table = RegionTable(mint, fabric.clock)
        self.tasks = TaskScope()
        self._address = address
        self._peers: dict[tuple[str, int], MemoryPeer] = {}
        self._guests: set[MemoryEndpoint] = set()
        self._newest: dict[str, int] = {}
        self._callbacks: list[PeerGone] = []
        self._listeners: list[Notified] = []
        self.closed = False

    @property
    def address(self) -> EndpointAddress:
        """See ``TransferEndpoint.address``."""
        return self._address

    @property
    def faults(self) -> FaultPlan:
        """See ``memory_peer.Party``."""
        return self.fabric.faults

    async def start(self) -> None:
        """See ``TransferEndpoint.start``."""
        self.fabric.attach(self)

    async def close(self) -> None:
        """See ``TransferEndpoint.close``."""
        if self.closed:
            return
        self.closed = True
        for peer in self._peers.values():
            peer.end(Unreachable("the endpoint is closed", node=peer.node))
        self.fabric.detach(self)
        await self.tasks.close()
        for region in self.table.regions():
            self.table.retire(region)

    def kill(self) -> None:
        """End as a killed process does: at once, and everybody notices."""
        self.closed = True
        self.fabric.detach(self)

    def allocate(self, length: int, *, name: str, location: str = "cpu:0") -> Region:
        """See ``TransferEndpoint.allocate``."""
        if length <= 0:
            raise OutOfBounds(f"region {name!r} must have a length, not {length}")
        memory = memoryview(bytearray(length))
        return self.table.add(memory, name=name, location=location, shm_name=name)

    def register(self, buffer: object, *, name: str, location: str = "cpu:0") -> Region:
        """See ``TransferEndpoint.register``."""
        return self.table.add(plain_view(buffer), name=name, location=location)

    async def deregister(self, region: Region) -> None:
        """See ``TransferEndpoint.deregister``."""
        self.table.retire(region)

    async def connect(
        self, address: EndpointAddress, *, timeout_s: float = 5.0
    ) -> "MemoryPeer":
        """See ``TransferEndpoint.connect``."""
        return self.connect_blocking(address, timeout_s=timeout_s)

    def connect_blocking(
        self, address: EndpointAddress, *, timeout_s: float = 5.0
    ) -> "MemoryPeer":
        """See ``TransferEndpoint.connect_blocking``; never blocks."""
        del timeout_s
        if self.closed:
            raise Unreachable("the endpoint is closed", node=address.node)
        cached = self._peers.get((address.node, address.epoch))
        if cached is not None and not cached.gone:
            return cached
        if address.protocol != PROTOCOL:
            raise Refused(f"the peer speaks protocol {address.protocol}")
        owner = self.fabric.find(address)
        if owner is None:
            raise Unreachable("nobody answers there", node=address.node, path=PATH)
        owner.admit(self, address)
        peer = MemoryPeer(self, owner)
        self._peers[address.node, address.epoch] = peer
        return peer

    def on_peer_gone(self, callback: PeerGone) -> None:
        """See ``TransferEndpoint.on_peer_gone``."""
        self._callbacks.append(callback)

    def on_notification(self, callback: Notified) -> None:
        """See ``TransferEndpoint.on_notification``."""
        self._listeners.append(callback)

    def notified(self, node: str, epoch: int, message: bytes) -> None:
        """See ``memory_peer.Party``."""
        for callback in self._listeners:
            callback(node, epoch, message)

    def admit(self, guest: "MemoryEndpoint", wanted: EndpointAddress) -> None:
        """Let another endpoint in; raises as ``connect``."""
        if guest.key != self.key:
            raise Refused("the peer holds another secret", node=self.node)
        if wanted.node != self.node:
            raise Refused("another node answers there", node=wanted.node)
        if wanted.epoch != self.epoch:
            raise StaleEpoch(
                f"the peer's epoch is {self.epoch}, not {wanted.epoch}", node=self.node
            )
        if guest.epoch < self._newest.get(guest.node, guest.epoch):
            raise StaleEpoch("the peer knows a newer epoch of ours", node=self.node)
        self._newest[guest.node] = guest.epoch
        for other in list(self._guests):
            if other.node == guest.node and other.epoch < guest.epoch:
                self._gone(other)
        self._guests.add(guest)

    def guest_left(self, guest: Party) -> None:
        """See ``memory_peer.Party``."""
        for each in list(self._guests):
            if each is guest:
                self._gone(each)

    def peer_left(self, other: "MemoryEndpoint") -> None:
        """Another endpoint is closed."""
        key = (other.node, other.epoch)
        peer = self._peers.get(key)
        if peer is not None and peer.owner is other:
            del self._peers[key]
            peer.end(Unreachable("the peer is gone", node=other.node, path=PATH))
        if other in self._guests:
            self._gone(other)

    def _gone(self, guest: "MemoryEndpoint") -> None:
        self._guests.discard(guest)
        for callback in self._callbacks:
            callback(guest.node, guest.epoch)
