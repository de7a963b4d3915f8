"""The seam: what an endpoint and a peer do, whatever carries the bytes.

Rules of ownership and completion, for every transport:

- The target of a read and the source of a write belong to the transfer from the
  call until the transfer has ended: ``await`` returned or raised, ``done()`` is
  true, or ``wait_blocking`` returned its result. Until then a source must not change,
  even if its bytes may have left already: they may have to be sent again. From then
  on it may be changed, reused or freed at once.
- Cancelling does not end a transfer at once, nor does its deadline: a cancelled read's
  target is free only when the reads under way have ended, and only then does the
  awaiting side see ``Cancelled``. ``wait_blocking`` with a time of its own may give up
  before: then ``done()`` is false, and the memory is still the transfer's.
- When a read has ended without error every byte is in the caller's memory, visible
  to all its threads, and its checksum is of that memory.
- When a write has ended without error the owner has every byte, checksum compared,
  visible to all its threads and to peers that read from then on.
- After an error the content of a read's targets is undefined. After an error of a write
  its ranges at the owner are undefined too, each byte old or new, and they may still
  change until the owner has noticed: write elsewhere, or have the owner deregister.
- Transfers have no order among each other, nor slices of one. Bytes that somebody
  changes while they are read arrive old or new, byte by byte; over a network that may
  end in ``Corrupt``. Who needs more reads only what its owner has finished.
- A message that rides with a transfer comes after its bytes, never before.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from kvtide.runtime import Clock
from kvtide.transfer.buffers import check_targets
from kvtide.transfer.errors import OutOfBounds
from kvtide.transfer.handles import (
    EndpointAddress,
    Operation,
    Priority,
    ReadSlice,
    RegionHandle,
    WriteSlice,
)
from kvtide.transfer.near import Near
from kvtide.transfer.regions import Region
from kvtide.transfer.requests import Batch, batch_of
from kvtide.transfer.transfer import Transfer

PeerGone = Callable[[str, int], None]
"""Called with (node, epoch)."""


Notified = Callable[[str, int, bytes], None]
"""Called with the (node, epoch) of a peer and the message that rode with a transfer."""

MOST_NOTIFY_BYTES = 64 << 10


def check_words(message: object, purpose: object, trace: object) -> None:
    """Raise OutOfBounds for what can't go with a transfer: too long, or of no such type."""
    if not isinstance(message, bytes):
        raise OutOfBounds(f"notify must be bytes, not {type(message).__name__}")
    if not isinstance(purpose, str) or not isinstance(trace, str):
        raise OutOfBounds("purpose and trace must be text")
    if len(message) > MOST_NOTIFY_BYTES:
        raise OutOfBounds(f"a message of {len(message)} bytes is too long")


class Observer(Protocol):
    """Hears what an endpoint does; called from any thread, must be quick."""

    def transferred(
        self,
        path: str,
        purpose: str,
        operation: Operation,
        nbytes: int,
        seconds: float,
    ) -> None:
        """A transfer of ours is complete."""
        ...

    def failed(self, path: str, purpose: str, operation: Operation, kind: str) -> None:
        """A transfer of ours failed; ``kind`` is ``TransferError.kind``."""
        ...

    def retried(self, path: str, purpose: str, reason: str) -> None:
        """A part of a transfer is tried again; ``reason`` is an error's kind."""
        ...

    def served(
        self, path: str, purpose: str, operation: Operation, nbytes: int
    ) -> None:
        """A peer read or wrote memory of ours."""
        ...

    def refused(self, reason: str) -> None:
        """Somebody on our port was turned away."""
        ...


class TransferPeer(ABC):
    """Another endpoint, as seen from ours. Safe to use from any thread."""

    node: str
    epoch: int
    _clock: Clock

    @property
    @abstractmethod
    def path(self) -> str:
        """The preferred transport: "shm", "tcp", "memory" or "rdma"."""

    @property
    @abstractmethod
    def gone(self) -> bool:
        """Whether the peer's process is gone; every further call fails."""

    def read(
        self,
        slices: Sequence[ReadSlice],
        *,
        timeout_s: float,
        priority: Priority = Priority.FOREGROUND,
        purpose: str = "reuse",
        notify: bytes = b"",
        trace: str = "",
    ) -> Transfer:
        """Start to copy remote ranges into local memory; see the module's rules.

        Never blocks an event loop (a thread without one may find that shared memory
        has been copied on return). One batch is cheap for hundreds of scattered slices.
        ``notify``, of at most 64 KiB, is handed to the owner (``on_notification``)
        once all bytes have been moved, and before the transfer ends; never if it fails.
        ``trace`` is a W3C traceparent that goes with the requests, for the owner's log.

        Raises:
            OutOfBounds: a range is outside its region by its handle, two targets
                overlap, a target is not writable contiguous memory, or ``notify`` is
                too long.
            StaleEpoch: a handle is of another epoch of this peer.
            AccessDenied: a handle is of another node.
            Refused: tens of thousands of transfers with the peer are under way.

        The transfer raises: any ``TransferError``.
        """
        transfer = Transfer(
            slice_count=len(slices),
            operation=Operation.READ,
            purpose=purpose,
            priority=priority,
            timeout_s=timeout_s,
            clock=self._clock,
            trace=trace,
        )
        lone = len(slices) == 1 and notify == b""
        if lone and self._start_lone(transfer, slices[0]):
            return transfer
        check_words(notify, purpose, trace)
        batch = batch_of(slices, self.node, self.epoch)
        check_targets(batch.views)
        transfer.nbytes = batch.nbytes
        self._start(transfer, batch, notify)
        return transfer

    def write(
        self,
        slices: Sequence[WriteSlice],
        *,
        timeout_s: float,
        priority: Priority = Priority.FOREGROUND,
        purpose: str = "reuse",
        notify: bytes = b"",
        trace: str = "",
    ) -> Transfer:
        """Start to copy local memory to remote ranges; else as ``read``."""
        transfer = Transfer(
            slice_count=len(slices),
            operation=Operation.WRITE,
            purpose=purpose,
            priority=priority,
            timeout_s=timeout_s,
            clock=self._clock,
            trace=trace,
        )
        lone = len(slices) == 1 and notify == b""
        if lone and self._start_lone(transfer, slices[0]):
            return transfer
        check_words(notify, purpose, trace)
        batch = batch_of(slices, self.node, self.epoch)
        transfer.nbytes = batch.nbytes
        self._start(transfer, batch, notify)
        return transfer

    def near(self, handle: RegionHandle, *, purpose: str) -> Near | None:
        """A region to be read at once by this process; None: use ``read``.

        That is: where it is shared memory that is mapped here, by an earlier ``read``.
        """
        del handle, purpose
        return None

    def _start_lone(self, transfer: Transfer, place: ReadSlice | WriteSlice) -> bool:
        """Start a transfer of one slice, if that can be done in few steps.

        False, and nothing done, wherever there is something to think about or to say.
        """
        del transfer, place
        return False

    @abstractmethod
    def _start(self, transfer: Transfer, batch: Batch, notify: bytes) -> None:
        """Move a checked batch; raises as ``read``."""

    @abstractmethod
    def map(self, handle: RegionHandle) -> memoryview:
        """The region itself, shared: same host only, cached per region.

        Blocks for one round trip when the region was not mapped before: from
        asyncio use ``map_async``. Writable only with a WRITE capability. The memory
        stays mapped while the view lives, also when the owner is gone: then it is
        dead memory that nobody reads.

        Raises:
            Refused: the region has no shared memory, or the peer is on another host.
            AccessDenied, StaleEpoch, Unreachable, TimedOut: as for ``read``.
        """

    @abstractmethod
    async def map_async(self, handle: RegionHandle) -> memoryview:
        """``map`` without blocking the loop."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect: what is under way ends as Unreachable, as does all after.

        ``connect`` then makes a new peer. Waits for threads of its own to end, which
        takes moments: from asyncio use ``asyncio.to_thread``. The endpoint does it for
        all that are left at its end.
        """


class TransferEndpoint(ABC):
    """One process's end of all transfers: its regions, its port, its peers."""

    node: str
    epoch: int

    @property
    @abstractmethod
    def address(self) -> EndpointAddress:
        """Where others reach this endpoint; valid once started."""

    @abstractmethod
    async def start(self) -> None:
        """Start listening; called by ``async with``."""

    @abstractmethod
    async def close(self) -> None:
        """End all transfers, connections, threads and regions.

        Views of regions that the caller still holds stay usable; nobody else
        reaches them any more.
        """

    @abstractmethod
    def allocate(self, length: int, *, name: str, location: str = "cpu:0") -> Region:
        """Zeroed memory that peers on this host can map, committed when touched.

        When the shared-memory directory is unusable or has less than ``length``
        free, the memory is private instead (``handle().shm_name == ""``), said in
        one warning: peers on this host then read it through the socket.

        Raises:
            OutOfBounds: ``length`` is not positive.
        """

    @abstractmethod
    def register(self, buffer: object, *, name: str, location: str = "cpu:0") -> Region:
        """Let peers reach an existing contiguous buffer (bytes, mmap, array...).

        The buffer must stay alive and in place until ``deregister``; a read-only
        buffer gives READ handles only.
        """

    @abstractmethod
    async def deregister(self, region: Region) -> None:
        """End access: waits until peers' accesses under way have ended.

        New accesses are denied at once; peers that have mapped shared memory hear of it
        a moment later and until then use old memory, which is not used again. Views in
        this process stay valid. From the return on no peer reaches registered memory,
        by the network or a device: it may be freed.
        """

    @abstractmethod
    async def connect(
        self, address: EndpointAddress, *, timeout_s: float = 5.0
    ) -> TransferPeer:
        """The peer at ``address``, connected and authenticated both ways; cached.

        Raises:
            Unreachable: nobody answers there.
            Refused: another secret, protocol version or node, or too many peers.
            StaleEpoch: another process start of the node answers there, or the
                peer knows a newer start of ours.
            TimedOut: no answer within ``timeout_s``.
        """

    @abstractmethod
    def connect_blocking(
        self, address: EndpointAddress, *, timeout_s: float = 5.0
    ) -> TransferPeer:
        """``connect`` for threads; needs no loop."""

    @abstractmethod
    def on_peer_gone(self, callback: PeerGone) -> None:
        """Have ``callback`` called when a peer process is gone.

        That is: the last connection that the process (node, epoch) held to us has
        ended, whatever the reason. Its writes into our shared memory are over if it
        is dead or has itself closed its endpoint.

        Called in the loop that the endpoint was started in; in a thread of the
        endpoint's, one call after the other, if it was started without one.
        """

    @abstractmethod
    def on_notification(self, callback: Notified) -> None:
        """Have ``callback`` called with what peers' transfers carry; where: as above."""

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        await self.close()
