"""One RDMA rail to a peer: a reliable-connected queue pair and the thread it has.

Bytes go one-sided between the peer's region and a staging area of ours that is
registered once; from there a read's bytes are copied into the caller's memory and
hashed in the same pass. So a cancelled read's target is free at once, and no device
ever reaches memory of the caller. Integrity on the wire is the adapters' CRC.

Work requests are chained, only the last of a chain is signaled, and we count our own
credits. Every completion that is not a success is a failure of the rail: what was in
flight goes back to the dispatcher, and the pair is reset at both ends before its next
use.
"""

import itertools
import logging
import mmap
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtide.runtime import Clock
from kvtide.transfer.buffers import address_of, copy_and_hash
from kvtide.transfer.errors import AccessDenied, TimedOut, TransferError, Unreachable
from kvtide.transfer.handles import Access, RegionHandle
from kvtide.transfer.plan import Piece
from kvtide.transfer.rail import Carrier, RailDownError, Report
from kvtide.transfer.rdma_wire import Reach, pack_pair, unpack_pair, unpack_reach
from kvtide.transfer.regions import check_range
from kvtide.transfer.requests import Request
from kvtide.transfer.shm import close_mapping
from kvtide.transfer.transfer import Transfer
from kvtide.transfer.verbs import QUEUE_DEPTH, Device, Memory, Pair, Work
from kvtide.transfer.wire import Ask, Kind, pack_ask

log = logging.getLogger("kvtide.transfer")

SLOT_BYTES = 1 << 20
"""A request over RDMA holds at most this much."""

SLOTS = 4
CHAIN = 16
ASK_S = 2.0
STALL_S = 5.0
_TICK_MS = 250

AskPeer = Callable[[Kind, bytes, float], bytes]
"""Asks over the control connection."""


@dataclass(eq=False, slots=True)
class Flight:
    """A request whose bytes are on the way through a slot of the staging area."""

    number: int
    request: Request
    slot: int
    works: deque[Work] = field(default_factory=deque[Work])
    left: int = 0
    digests: list[int] = field(default_factory=list[int])
    progress_s: float = 0.0
    reported: bool = False


@dataclass(frozen=True, slots=True)
class Chain:
    """Posted work requests; the last is signaled."""

    last_id: int
    count: int
    flight: Flight


class Reaches:
    """The peer's regions as we may reach them. For one thread."""

    def __init__(self, ask: AskPeer, clock: Clock, node: str) -> None:
        """Know none yet."""
        self._ask = ask
        self._clock = clock
        self._node = node
        self._known: dict[tuple[int, bytes, bool], tuple[Reach, float | None]] = {}

    def of(self, handle: RegionHandle, device: int, *, write: bool) -> Reach:
        """Ask the owner at the first use; raises what the owner answers.

        Unreachable: the owner's ``device``-th device does not reach the region.
        """
        key = (handle.region, handle.capability, write)
        known = self._known.get(key)
        if known is not None:
            reach, expires_s = known
            if expires_s is not None and self._clock.monotonic() >= expires_s:
                del self._known[key]
                raise AccessDenied("the capability has expired", node=self._node)
            if device < len(reach.keys) and reach.keys[device]:
                return reach
        # the piece's offset says whether writing is wanted
        access = Access.WRITE if write else Access.READ
        ask = Ask([key[:2]], [(0, int(access is Access.WRITE), 0)], "rdma")
        reach = unpack_reach(self._ask(Kind.RDMA_REACH, pack_ask(ask), ASK_S))
        expires_s = None
        if reach.expires_in_s is not None:
            expires_s = self._clock.monotonic() + reach.expires_in_s
        self._known[key] = (reach, expires_s)
        if device < len(reach.keys) and reach.keys[device]:
            return reach
        raise Unreachable("the peer's device is gone", node=self._node)

    def forget(self) -> None:
        """Ask again for all."""
        self._known.clear()


class RdmaCarrier(Carrier):
    """See the module and ``Carrier``."""

    path = "rdma"

    def __init__(
        self,
        node: str,
        device: Device,
        index: int,
        ask: AskPeer,
        clock: Clock,
        report: Report,
    ) -> None:
        """Reach the peer's ``index``-th device from ``device``."""
        self._node = node
        self._device = device
        self._index = index
        self._ask = ask
        self._clock = clock
        self._report = report
        self._reaches = Reaches(ask, clock, node)
        self._lock = threading.Lock()
        self._inbox: deque[Request] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._ended = False
        self._started = False
        self._pair: Pair | None = None
        self._connected = False
        self._staging: mmap.mmap | None = None
        self._memory: Memory | None = None
        self._base = 0
        self._free = list(range(SLOTS))
        self._flights: dict[int, Flight] = {}
        self._chains: deque[Chain] = deque()
        self._credits = QUEUE_DEPTH
        self._numbers = itertools.count(1)
        self._thread = threading.Thread(
            target=self._run, name=f"transfer-rdma-{node}-{device.name}", daemon=True
        )

    # ---- from any thread

    def submit(self, request: Request) -> None:
        """See ``Carrier.submit``."""
        with self._lock:
            closing = self._closing
            if not closing:
                self._inbox.append(request)
                if not self._started:
                    self._started = True
                    self._thread.start()
                os.eventfd_write(self._wake, 1)
        if closing:
            self._report(request, self._gone("the rail is closed"), False)

    def abort(self, transfer: Transfer | None) -> None:
        """See ``Carrier.abort``; the thread looks after the transfers that failed."""
        with self._lock:
            if transfer is None:
                self._closing = True
                if not self._started:
                    self._started = True
                    self._thread.start()
            if not self._ended:
                os.eventfd_write(self._wake, 1)

    def join(self) -> None:
        """See ``Carrier.join``."""
        self._thread.join()
        with self._lock:
            if not self._ended:
                self._ended = True
                os.close(self._wake)

    def _gone(self, message: str) -> TransferError:
        return Unreachable(message, node=self._node, path=self.path)

    # ---- the thread

    def _run(self) -> None:
        while not self._closing:
            self._wait()
            try:
                self._let_go()
                self._collect()
                self._start_more()
                self._post_more()
                self._look_for_stalls()
            except TransferError as error:
                self._break(error)
            except Exception as error:
                log.exception("an RDMA rail failed")
                self._break(self._gone(repr(error)))
        self._tear_down()

    def _wait(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if self._pair is not None:
            poller.register(self._pair.fileno(), select.POLLIN)
        for fd, _ in poller.poll(_TICK_MS if self._flights else None):
            if fd == self._wake:
                os.eventfd_read(fd)
            elif self._pair is not None:
                self._pair.acknowledge()

    def _let_go(self) -> None:
        """Report what nobody waits for; its slot is busy until it has completed."""
        for flight in self._flights.values():
            if flight.request.transfer.failed and not flight.reported:
                flight.reported = True
                self._report(flight.request, self._gone("given up"), False)

    def _start_more(self) -> None:
        while self._free:
            with self._lock:
                if not self._inbox:
                    return
                request = self._inbox.popleft()
            try:
                if request.transfer.failed:
                    self._report(request, self._gone("given up"), False)
                    continue
                self._open()
                self._start(request)
            except TransferError as error:
                error.path = self.path
                # what the owner denies is no fault of the rail
                self._report(request, error, isinstance(error, Unreachable))
                if isinstance(error, RailDownError):
                    self._send_back(error)

    def _open(self) -> None:
        try:
            self._connect()
        except (Unreachable, TimedOut) as error:
            raise RailDownError(
                error.message, node=self._node, path=self.path
            ) from error

    def _send_back(self, error: TransferError) -> None:
        """What was not begun goes elsewhere."""
        with self._lock:
            left, self._inbox = self._inbox, deque()
        for request in left:
            self._report(request, error, False)

    def _start(self, request: Request) -> None:
        slot = self._free[-1]
        flight = Flight(next(self._numbers), request, slot)
        flight.progress_s = self._clock.monotonic()
        works = self._works(flight)
        self._free.pop()
        self._flights[flight.number] = flight
        flight.works.extend(works)
        flight.left = len(works)
        if not works:
            self._land(flight)

    def _works(self, flight: Flight) -> list[Work]:
        request, memory = flight.request, self._memory
        if memory is None:
            raise self._gone("not connected")
        works: list[Work] = []
        at = flight.slot * SLOT_BYTES
        for index, piece in enumerate(request.pieces):
            handle, offset = request.handles[index], request.offsets[index]
            try:
                reach = self._reaches.of(handle, self._index, write=request.writes)
                check_range(offset, piece.length, reach.length, piece.slice_index)
            except TransferError as error:
                error.slice_index = piece.slice_index
                raise
            if request.writes:
                here = self._slot(at, piece)
                digest = copy_and_hash(here, request.views[index], lambda: False)
                flight.digests.append(digest)
            if piece.length:
                work_id = flight.number << 16 | index
                works.append(
                    Work(
                        work_id,
                        request.writes,
                        self._base + at,
                        memory.local_key,
                        piece.length,
                        reach.address + offset,
                        reach.keys[self._index],
                        signaled=False,
                    )
                )
            at += piece.length
        return works

    def _slot(self, at: int, piece: Piece) -> memoryview:
        if self._staging is None:
            raise self._gone("not connected")
        return memoryview(self._staging)[at : at + piece.length]

    def _post_more(self) -> None:
        for flight in list(self._flights.values()):
            while flight.works and self._credits:
                count = min(CHAIN, len(flight.works), self._credits)
                chain = [flight.works.popleft() for _ in range(count)]
                last = _signaled(chain[-1])
                self._credits -= count
                self._chains.append(Chain(last.work_id, count, flight))
                if self._pair is None:
                    raise self._gone("not connected")
                self._pair.post([*chain[:-1], last])

    def _collect(self) -> None:
        if self._pair is None or not self._connected:
            return
        for completion in self._pair.completions():
            if not completion.ok:
                self._failed_flight(completion.work_id >> 16, completion.status)
            chain = self._chains.popleft()
            if chain.last_id != completion.work_id:
                raise self._gone("completions out of order")
            self._credits += chain.count
            flight = chain.flight
            flight.progress_s = self._clock.monotonic()
            flight.left -= chain.count
            if flight.left == 0:
                self._land(flight)

    def _failed_flight(self, number: int, status: str) -> None:
        """The first failure; those flushed behind it go back without blame."""
        if status == "REM_ACCESS_ERR":
            # the region may be gone, or its keys new: the owner will tell
            self._reaches.forget()
        error = self._gone(f"{self._device.name} says {status}")
        flight = self._flights.pop(number, None)
        if flight is not None:
            self._free.append(flight.slot)
            if not flight.reported:
                self._report(flight.request, error, True)
        raise error

    def _land(self, flight: Flight) -> None:
        """All bytes of a request have arrived."""
        request = flight.request
        del self._flights[flight.number]
        if not flight.reported:
            at = flight.slot * SLOT_BYTES
            for index, piece in enumerate(request.pieces):
                if request.writes:
                    digest = flight.digests[index]
                else:
                    there = self._slot(at, piece)
                    digest = copy_and_hash(request.views[index], there, lambda: False)
                request.transfer.moved(piece, digest)
                at += piece.length
        self._free.append(flight.slot)
        if not flight.reported:
            flight.reported = True
            self._report(request, None, False)

    def _look_for_stalls(self) -> None:
        now_s = self._clock.monotonic()
        for flight in self._flights.values():
            if now_s > flight.progress_s + STALL_S:
                raise self._gone(f"nothing came for {STALL_S:g} s")

    def _connect(self) -> None:
        """Connect, or after a failure connect again, both ends of the pair."""
        if self._connected:
            return
        if not self._device.active():
            raise self._gone(f"the port of {self._device.name} is down")
        if self._staging is None:
            self._staging = mmap.mmap(
                -1, SLOTS * SLOT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            view = memoryview(self._staging)
            self._base = address_of(view)
            self._memory = self._device.register(
                self._base, len(view), local_write=True, remote=""
            )
        if self._pair is None:
            self._pair = self._device.pair()
        ours = pack_pair(self._index, self._pair.address)
        answer = self._ask(Kind.RDMA_PAIR, ours, ASK_S)
        _, theirs = unpack_pair(answer)
        self._pair.connect(theirs)
        self._connected = True

    def _break(self, error: TransferError) -> None:
        """The pair is of no use until it is reset; all in flight goes back."""
        if not self._closing:
            log.info("RDMA by %s to %s broke: %s", self._device.name, self._node, error)
        self._connected = False
        flights = list(self._flights.values())
        if self._pair is not None:
            # the device may still write into the staging area: the pair goes first
            pair, self._pair = self._pair, None
            self._close(pair)
        self._flights.clear()
        self._chains.clear()
        self._credits = QUEUE_DEPTH
        self._free = list(range(SLOTS))
        for flight in flights:
            if not flight.reported:
                self._report(flight.request, error, False)

    def _tear_down(self) -> None:
        self._break(self._gone("the rail is closed"))
        self._send_back(self._gone("the rail is closed"))
        if self._memory is not None:
            self._close(self._memory)
        if self._staging is not None:
            close_mapping(self._staging)

    def _close(self, thing: Pair | Memory) -> None:
        try:
            thing.close()
        except TransferError as error:
            log.warning("%s", error)


def _signaled(work: Work) -> Work:
    return Work(
        work.work_id,
        work.write,
        work.local_address,
        work.local_key,
        work.length,
        work.remote_address,
        work.remote_key,
        signaled=True,
    )
