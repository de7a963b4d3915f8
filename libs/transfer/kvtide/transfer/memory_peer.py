"""The way between two endpoints of one process, with faults on demand."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvtide.runtime import Clock, TaskScope
from kvtide.transfer.buffers import copy_and_hash
from kvtide.transfer.errors import (
    Corrupt,
    Refused,
    TransferError,
    Unreachable,
)
from kvtide.transfer.handles import (
    Access,
    EndpointAddress,
    Operation,
    RegionHandle,
)
from kvtide.transfer.interface import Observer, TransferPeer
from kvtide.transfer.plan import Piece
from kvtide.transfer.regions import RegionTable, check_range
from kvtide.transfer.requests import Batch
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


class Party(Protocol):
    """What a peer must know of the endpoints at its two ends."""

    clock: Clock
    table: RegionTable
    tasks: TaskScope
    observer: Observer | None

    @property
    def address(self) -> EndpointAddress:
        """Who and where."""
        ...

    def notified(self, node: str, epoch: int, message: bytes) -> None:
        """A message has come with a transfer."""
        ...

    def guest_left(self, guest: "Party") -> None:
        """Another endpoint has disconnected from this one."""
        ...

    @property
    def faults(self) -> FaultPlan:
        """What goes wrong now."""
        ...


class MemoryPeer(TransferPeer):
    """See ``TransferPeer``. Made by ``MemoryEndpoint.connect``."""

    def __init__(self, ours: Party, owner: Party) -> None:
        """Move bytes between two endpoints."""
        self.node = owner.address.node
        self.epoch = owner.address.epoch
        self.owner = owner
        self._clock = ours.clock
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

    def close(self) -> None:
        """See ``TransferPeer.close``."""
        if self._end is None:
            self.end(Unreachable("the peer was closed", node=self.node, path=PATH))
            self.owner.guest_left(self._ours)

    def end(self, error: TransferError) -> None:
        """The peer is gone, or our endpoint closes."""
        if self._end is None:
            self._end = error
        for transfer in list(self._under_way):
            transfer.fail(error)

    def _start(self, transfer: Transfer, batch: Batch, notify: bytes) -> None:
        finale = partial(self._notify, notify) if notify else None
        transfer.begin(1, self._abort, finale=finale, ended=self._ended)
        fault = self._ours.faults(
            self._ours.address.node, self.node, transfer.operation, transfer.nbytes
        )
        if fault.drop or fault.delay_s > 0:
            self._under_way[transfer] = self._ours.tasks.spawn(
                self._later(transfer, batch, fault), name="memory-transfer"
            )
        else:
            self._move(transfer, batch, fault)
            transfer.settle(PATH)

    async def _later(self, transfer: Transfer, batch: Batch, fault: Fault) -> None:
        clock = self._ours.clock
        try:
            left_s = max(0.0, transfer.remaining_s())
            if fault.drop or fault.delay_s > left_s:
                await clock.sleep(left_s)
                transfer.expire()
            else:
                await clock.sleep(fault.delay_s)
                self._move(transfer, batch, fault)
        finally:
            self._under_way.pop(transfer, None)
            if not transfer.failed and self._end is not None:
                transfer.fail(self._end)
            transfer.settle(PATH)

    def _notify(self, message: bytes, transfer: Transfer) -> None:
        ours = self._ours.address
        self.owner.notified(ours.node, ours.epoch, message)
        transfer.conclude(None)

    def _abort(self, transfer: Transfer) -> None:
        task = self._under_way.get(transfer)
        if task is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)

    def _move(self, transfer: Transfer, batch: Batch, fault: Fault) -> None:
        if fault.unreachable:
            transfer.fail(Unreachable("the way is cut", node=self.node, path=PATH))
        elif self._end is not None:
            transfer.fail(self._end)
        for index in range(len(batch.views)):
            if transfer.failed:
                return
            try:
                self._move_slice(transfer, index, batch, fault)
            except TransferError as error:
                error.node, error.path, error.slice_index = self.node, PATH, index
                transfer.fail(error)

    def _move_slice(
        self, transfer: Transfer, index: int, batch: Batch, fault: Fault
    ) -> None:
        here, handle = batch.views[index], batch.handles[index]
        offset = batch.offsets[index]
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
            seconds = ours.clock.monotonic() - transfer.started_s
            ours.observer.transferred(PATH, purpose, operation, nbytes, seconds)
