"""Endpoints inside one process: for tests and simulation, with faults on demand.

Without a fault, a transfer is complete when ``read`` or ``write`` returns, so that a
simulation stays deterministic. Delays are slept on the fabric's clock.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtide.runtime import Clock, TaskScope
from kvtide.transfer.buffers import check_targets, copy_and_hash, plain_view
from kvtide.transfer.capability import CapabilityMint, derive_key
from kvtide.transfer.errors import (
    Corrupt,
    OutOfBounds,
    Refused,
    StaleEpoch,
    TransferError,
    Unreachable,
)
from kvtide.transfer.handles import (
    PROTOCOL,
    Access,
    EndpointAddress,
    Operation,
    Priority,
    ReadSlice,
    RegionHandle,
    WriteSlice,
)
from kvtide.transfer.interface import (
    Observer,
    PeerGone,
    TransferEndpoint,
    TransferPeer,
)
from kvtide.transfer.plan import Piece
from kvtide.transfer.regions import Region, RegionTable, check_range
from kvtide.transfer.transfer import Transfer
from kvtide.transfer.wire import check_handle

PATH = "memory"


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a transfer.

    ``delay_s``: it starts later. ``drop``: nothing ever comes, it times out.
    ``corrupt``: the transport finds the bytes wrong (Corrupt). ``flip``: the first
    byte of each slice is another one, and the checksum says so truly, as when the
    owner reused the memory. ``unreachable``: the way to the peer is cut.
    """

    delay_s: float = 0.0
    drop: bool = False
    corrupt: bool = False
    flip: bool = False
    unreachable: bool = False


NO_FAULT = Fault()
FaultPlan = Callable[[str, str, Operation, int], Fault]
"""(from node, to node, operation, bytes) → what happens to this transfer."""


def no_fault(source: str, target: str, operation: Operation, nbytes: int) -> Fault:
    """The plan of a network where all is well."""
    del source, target, operation, nbytes
    return NO_FAULT


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
        self.key = derive_key(secret, "authentication")
        self.observer = observer
        mint = CapabilityMint(derive_key(secret, "capability"), self.node, self.epoch)
        self.table = RegionTable(mint, fabric.clock)
        self.tasks = TaskScope()
        self._address = address
        self._peers: dict[tuple[str, int], MemoryPeer] = {}
        self._guests: set[MemoryEndpoint] = set()
        self._newest: dict[str, int] = {}
        self._callbacks: list[PeerGone] = []
        self.closed = False

    @property
    def address(self) -> EndpointAddress:
        """See ``TransferEndpoint.address``."""
        return self._address

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
        if cached is not None:
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


class MemoryPeer(TransferPeer):
    """See ``TransferPeer``. Made by ``MemoryEndpoint.connect``."""

    def __init__(self, ours: MemoryEndpoint, owner: MemoryEndpoint) -> None:
        """Move bytes between two endpoints."""
        self.node = owner.node
        self.epoch = owner.epoch
        self.owner = owner
        self._ours = ours
        self._end: TransferError | None = None
        self._under_way: dict[Transfer, asyncio.Task[None]] = {}

    @property
    def path(self) -> str:
        """See ``TransferPeer.path``."""
        return PATH

    @property
    def gone(self) -> bool:
        """See ``TransferPeer.gone``."""
        return self._end is not None

    def read(
        self,
        slices: Sequence[ReadSlice],
        *,
        timeout_s: float,
        priority: Priority = Priority.FOREGROUND,
        purpose: str = "reuse",
    ) -> Transfer:
        """See ``TransferPeer.read``."""
        views = [
            plain_view(each.into, slice_index=index)
            for index, each in enumerate(slices)
        ]
        check_targets(views)
        places = [(each.handle, each.offset) for each in slices]
        return self._go(Operation.READ, views, places, timeout_s, priority, purpose)

    def write(
        self,
        slices: Sequence[WriteSlice],
        *,
        timeout_s: float,
        priority: Priority = Priority.FOREGROUND,
        purpose: str = "reuse",
    ) -> Transfer:
        """See ``TransferPeer.write``."""
        views = [
            plain_view(each.source, slice_index=index)
            for index, each in enumerate(slices)
        ]
        places = [(each.handle, each.offset) for each in slices]
        return self._go(Operation.WRITE, views, places, timeout_s, priority, purpose)

    def map(self, handle: RegionHandle) -> memoryview:
        """See ``TransferPeer.map``."""
        check_handle(handle, self.node, self.epoch, 0)
        if self._end is not None:
            raise self._end
        if self.owner.address.shm_host != self._ours.address.shm_host:
            raise Refused("the peer is on another host", node=self.node, path=PATH)
        if not handle.shm_name:
            raise Refused("the region has no shared memory", node=self.node, path=PATH)
        access = Access.WRITE if handle.capability[0] > 1 else Access.READ
        grant = self.owner.table.claim(handle.region, handle.capability, access)
        self.owner.table.release(grant)
        view = grant.region.view
        return view if access is Access.WRITE else view.toreadonly()

    async def map_async(self, handle: RegionHandle) -> memoryview:
        """See ``TransferPeer.map_async``."""
        return self.map(handle)

    def end(self, error: TransferError) -> None:
        """The peer is gone, or our endpoint closes."""
        if self._end is None:
            self._end = error
        for transfer in list(self._under_way):
            transfer.fail(error)

    def _go(
        self,
        operation: Operation,
        views: Sequence[memoryview],
        places: Sequence[tuple[RegionHandle, int]],
        timeout_s: float,
        priority: Priority,
        purpose: str,
    ) -> Transfer:
        for index, (handle, offset) in enumerate(places):
            check_handle(handle, self.node, self.epoch, index)
            check_range(offset, len(views[index]), handle.length, index)
        transfer = Transfer(
            slice_count=len(views),
            nbytes=sum(map(len, views)),
            operation=operation,
            purpose=purpose,
            priority=priority,
            timeout_s=timeout_s,
            clock=self._ours.fabric.clock,
        )
        transfer.begin(1, self._abort)
        transfer.when_ended(lambda: self._ended(transfer))
        fault = self._ours.fabric.faults(
            self._ours.node, self.node, operation, transfer.nbytes
        )
        if fault.drop or fault.delay_s > 0:
            self._under_way[transfer] = self._ours.tasks.spawn(
                self._later(transfer, views, places, fault), name="memory-transfer"
            )
        else:
            self._move(transfer, views, places, fault)
            transfer.settle(PATH)
        return transfer

    async def _later(
        self,
        transfer: Transfer,
        views: Sequence[memoryview],
        places: Sequence[tuple[RegionHandle, int]],
        fault: Fault,
    ) -> None:
        clock = self._ours.fabric.clock
        try:
            left_s = max(0.0, transfer.remaining_s())
            if fault.drop or fault.delay_s > left_s:
                await clock.sleep(left_s)
                transfer.expire()
            else:
                await clock.sleep(fault.delay_s)
                self._move(transfer, views, places, fault)
        finally:
            self._under_way.pop(transfer, None)
            if not transfer.failed and self._end is not None:
                transfer.fail(self._end)
            transfer.settle(PATH)

    def _abort(self, transfer: Transfer) -> None:
        task = self._under_way.get(transfer)
        if task is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)

    def _move(
        self,
        transfer: Transfer,
        views: Sequence[memoryview],
        places: Sequence[tuple[RegionHandle, int]],
        fault: Fault,
    ) -> None:
        if fault.unreachable:
            transfer.fail(Unreachable("the way is cut", node=self.node, path=PATH))
        elif self._end is not None:
            transfer.fail(self._end)
        for index, (handle, offset) in enumerate(places):
            if transfer.failed:
                return
            try:
                self._move_slice(transfer, index, views[index], handle, offset, fault)
            except TransferError as error:
                error.node, error.path, error.slice_index = self.node, PATH, index
                transfer.fail(error)

    def _move_slice(
        self,
        transfer: Transfer,
        index: int,
        here: memoryview,
        handle: RegionHandle,
        offset: int,
        fault: Fault,
    ) -> None:
        writes = transfer.operation is Operation.WRITE
        access = Access.WRITE if writes else Access.READ
        table = self.owner.table
        grant = table.claim(handle.region, handle.capability, access)
        try:
            check_range(offset, len(here), grant.region.length, index)
            there = grant.region.view[offset : offset + len(here)]
            target, source = (there, here) if writes else (here, there)
            digest = copy_and_hash(target, source, lambda: False)
            if fault.flip and len(target):
                # a copy onto itself only hashes again
                target[0] ^= 0xFF
                digest = copy_and_hash(target, memoryview(bytes(target)), lambda: False)
        finally:
            table.release(grant)
        if fault.corrupt:
            raise Corrupt("the bytes that arrived are not those that were sent")
        transfer.moved(Piece(index, 0, len(here)), digest)

    def _ended(self, transfer: Transfer) -> None:
        ours, purpose = self._ours, transfer.purpose
        operation, nbytes = transfer.operation, transfer.nbytes
        if transfer.failure is not None:
            if ours.observer is not None:
                ours.observer.failed(PATH, purpose, operation, transfer.failure.kind)
            return
        if self.owner.observer is not None:
            self.owner.observer.served(PATH, purpose, operation, nbytes)
        if ours.observer is not None:
            seconds = ours.fabric.clock.monotonic() - transfer.started_s
            ours.observer.transferred(PATH, purpose, operation, nbytes, seconds)
