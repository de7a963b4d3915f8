"""One RDMA rail to a peer: a reliable-connected queue pair and the thread it has.

Bytes go one-sided between the peer's region and a staging area of ours that is
registered once; from there a read's bytes are copied into the caller's memory and
hashed in the same pass. So a cancelled read's target is free at once, and no device
ever reaches memory of the caller. What a read brings is guarded by the adapters' CRC;
of a write the owner is asked, over the control connection, whether it has what was
sent (``Kind.RDMA_CHECK``): only then has it ended well.

Work requests are chained, only the last of a chain is signaled, and we count our own
credits. Every completion that is not a success is a failure of the rail: what was in
flight goes back to the dispatcher, and the pair is reset at both ends before its next
use. Each connection of a pair has a name, as one by TCP has: see ``fence``.
"""

import itertools
import logging
import os
import secrets
import select
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from kvtide.runtime import Clock
from kvtide.transfer.buffers import copy_and_hash
from kvtide.transfer.errors import (
    Corrupt,
    Refused,
    TimedOut,
    TransferError,
    Unreachable,
)
from kvtide.transfer.fence import LEAVE_S, GivenUp
from kvtide.transfer.rail import TCP_TIER, Carrier, RailDownError, Report
from kvtide.transfer.rdma_flight import Chain, Flight
from kvtide.transfer.rdma_reaches import ASK_S, Owner, Reaches, UnfitError
from kvtide.transfer.rdma_staging import SLOT_BYTES, Staging
from kvtide.transfer.rdma_wire import pack_check, pack_pair, unpack_pair
from kvtide.transfer.regions import check_range
from kvtide.transfer.requests import Request
from kvtide.transfer.transfer import Transfer
from kvtide.transfer.verbs import QUEUE_DEPTH, Device, Pair, Work
from kvtide.transfer.wire import LANE_BYTES, Kind

log = logging.getLogger("kvtide.transfer")

CHAIN = 16
STALL_S = 5.0
_TICK_MS = 250


class RdmaCarrier(Carrier):
    """See the module and ``Carrier``."""

    path = "rdma"

    def __init__(
        self,
        node: str,
        device: Device,
        index: int,
        owner: Owner,
        reaches: Reaches,
        given_up: GivenUp,
        clock: Clock,
        report: Report,
    ) -> None:
        """Reach the peer's ``index``-th device from ``device``."""
        self._node = node
        self._device = device
        self._index = index
        self._owner = owner
        self._clock = clock
        self._report = report
        self._reaches = reaches
        self._given_up = given_up
        self._lock = threading.Lock()
        self._inbox: deque[Request] = deque()
        self._answers: deque[tuple[Flight, Future[bytes]]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._ended = False
        self._started = False
        self._pair: Pair | None = None
        self._lane = b""
        self._connected = False
        self._staging: Staging | None = None
        self._flights: dict[int, Flight] = {}
        self._chains: deque[Chain] = deque()
        self._credits = QUEUE_DEPTH
        self._numbers = itertools.count(1)
        self._to_blame: Flight | None = None
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
                self._begin()
                os.eventfd_write(self._wake, 1)
        if closing:
            self._report(request, self._gone("the rail is closed"), False)

    def abort(self, transfer: Transfer | None) -> None:
        """See ``Carrier.abort``; the thread looks after the transfers that failed."""
        with self._lock:
            if transfer is None:
                self._closing = True
                self._begin()
            if not self._ended:
                os.eventfd_write(self._wake, 1)

    def join(self) -> None:
        """See ``Carrier.join``."""
        self._thread.join()
        with self._lock:
            if not self._ended:
                self._ended = True
                os.close(self._wake)

    def _begin(self) -> None:
        if not self._started:
            self._started = True
            self._thread.start()

    def _answered(self, flight: Flight, answer: Future[bytes]) -> None:
        """The owner has looked at a write."""
        with self._lock:
            self._answers.append((flight, answer))
            if not self._ended:
                os.eventfd_write(self._wake, 1)

    def _gone(self, message: str) -> TransferError:
        return Unreachable(message, node=self._node, path=self.path)

    # ---- the thread

    def _run(self) -> None:
        while not self._closing:
            try:
                self._wait()
                self._let_go()
                self._collect()
                self._take_answers()
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
        """Report reads that nobody waits for; a slot is busy until it has completed.

        A write is waited for: what comes late must not come after a later one.
        """
        for flight in self._flights.values():
            request = flight.request
            if request.transfer.failed and not request.writes and not flight.reported:
                flight.reported = True
                self._report(request, self._gone("given up"), False)

    def _start_more(self) -> None:
        while self._staging is None or self._staging.free:
            with self._lock:
                if not self._inbox:
                    return
                request = self._inbox.popleft()
            try:
                if request.transfer.failed:
                    self._report(request, self._gone("given up"), False)
                    continue
                staging = self._open()
                if request.writes:
                    self._fence()
                self._start(request, staging)
            except UnfitError as error:
                request.least_tier = TCP_TIER
                self._report(request, error, False)
            except TransferError as error:
                error.path = self.path
                # what the owner denies is no fault of the rail
                self._report(request, error, isinstance(error, Unreachable))
                if isinstance(error, RailDownError):
                    self._send_back(error)

    def _open(self) -> Staging:
        try:
            return self._connect()
        except (Unreachable, TimedOut, Refused) as error:
            self._reset()
            raise RailDownError(
                error.message, node=self._node, path=self.path
            ) from error

    def _fence(self) -> None:
        """Have the owner leave all connections that were given up with writes on them."""
        lanes = self._given_up.lanes()
        if lanes:
            self._owner.ask(Kind.FENCE, b"".join(lanes), ASK_S + LEAVE_S)
            self._given_up.left(lanes)

    def _send_back(self, error: TransferError) -> None:
        """What was not begun goes elsewhere."""
        with self._lock:
            left, self._inbox = self._inbox, deque()
        for request in left:
            self._report(request, error, False)

    def _start(self, request: Request, staging: Staging) -> None:
        flight = Flight(next(self._numbers), request, staging.free[-1])
        flight.progress_s = self._clock.monotonic()
        works = self._works(flight, staging)
        staging.free.pop()
        self._flights[flight.number] = flight
        flight.works.extend(works)
        flight.left = len(works)
        if not works:
            self._land(flight)

    def _works(self, flight: Flight, staging: Staging) -> list[Work]:
        request = flight.request
        works: list[Work] = []
        at = flight.slot * SLOT_BYTES
        for index, view in enumerate(request.views):
            handle, offset, length = (
                request.handles[index],
                request.offsets[index],
                len(view),
            )
            try:
                reach = self._reaches.of(handle, write=request.writes)
                check_range(offset, length, reach.length, 0)
            except TransferError as error:
                error.slice_index = request.slice_index(index)
                raise
            if request.writes:
                here = staging.view(at, length)
                flight.digests.append(copy_and_hash(here, view, lambda: False))
            if length:
                works.append(
                    Work(
                        flight.number << 16 | index,
                        request.writes,
                        staging.address(at),
                        staging.key,
                        length,
                        reach.address + offset,
                        self._reaches.key(reach),
                        signaled=False,
                    )
                )
            at += length
        return works

    def _post_more(self) -> None:
        for flight in list(self._flights.values()):
            while flight.works and self._credits:
                count = min(CHAIN, len(flight.works), self._credits)
                chain = [flight.works.popleft() for _ in range(count)]
                last = replace(chain[-1], signaled=True)
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
                self._arrived(flight)

    def _failed_flight(self, number: int, status: str) -> None:
        """The first failure; those flushed behind it go back without blame."""
        if status == "REM_ACCESS_ERR":
            # the region may be gone, or its keys new: the owner will tell
            self._reaches.forget()
        self._to_blame = self._flights.get(number)
        raise self._gone(f"{self._device.name} says {status}")

    def _arrived(self, flight: Flight) -> None:
        """The device has moved all of a request's bytes."""
        request = flight.request
        if not request.writes or request.transfer.failed:
            self._land(flight)
            return
        body = pack_check(request.ask(), flight.digests)
        answer = self._owner.begin(Kind.RDMA_CHECK, body)
        answer.add_done_callback(partial(self._answered, flight))

    def _take_answers(self) -> None:
        while self._answers:
            flight, answer = self._answers.popleft()
            # what was on a rail that broke has been reported
            if self._flights.get(flight.number) is flight:
                self._land(flight, answer.exception())

    def _land(self, flight: Flight, wrong: BaseException | None = None) -> None:
        """All bytes of a request have arrived, or the owner says what is wrong."""
        request, staging = flight.request, self._staging
        del self._flights[flight.number]
        if staging is None:
            raise self._gone("not connected")
        if flight.reported:
            staging.free.append(flight.slot)
            return
        flight.reported = True
        if wrong is None and not request.transfer.failed:
            request.moved(flight.digests or self._digests(flight, staging))
        staging.free.append(flight.slot)
        if wrong is None:
            self._report(request, None, False)
            return
        error = wrong if isinstance(wrong, TransferError) else self._gone(repr(wrong))
        error.path = self.path
        if error.slice_index is not None and error.slice_index < len(request.views):
            error.slice_index = request.slice_index(error.slice_index)
        self._report(request, error, isinstance(error, Corrupt))

    def _digests(self, flight: Flight, staging: Staging) -> list[int]:
        """Copy what was read into the caller's memory; its checksums."""
        digests: list[int] = []
        at = flight.slot * SLOT_BYTES
        for view in flight.request.views:
            there = staging.view(at, len(view))
            digests.append(copy_and_hash(view, there, lambda: False))
            at += len(view)
        return digests

    def _look_for_stalls(self) -> None:
        now_s = self._clock.monotonic()
        for flight in self._flights.values():
            if now_s > flight.progress_s + STALL_S:
                raise self._gone(f"nothing came for {STALL_S:g} s")

    def _connect(self) -> Staging:
        """Connect, or after a failure connect again, both ends of the pair."""
        if self._connected and self._staging is not None:
            return self._staging
        if not self._device.active():
            raise self._gone(f"the port of {self._device.name} is down")
        if self._staging is None:
            self._staging = Staging(self._device)
        if self._pair is None:
            self._pair = self._device.pair()
        self._lane = secrets.token_bytes(LANE_BYTES)
        ours = pack_pair(self._index, self._pair.address, self._lane)
        answer = self._owner.ask(Kind.RDMA_PAIR, ours, ASK_S)
        _, theirs, _ = unpack_pair(answer)
        self._pair.connect(theirs)
        self._connected = True
        return self._staging

    def _break(self, error: TransferError) -> None:
        """The pair is of no use until it is reset; all in flight goes back."""
        if not self._closing and self._connected:
            log.info("RDMA by %s to %s broke: %s", self._device.name, self._node, error)
        self._connected = False
        to_blame, self._to_blame = self._to_blame, None
        flights = list(self._flights.values())
        if any(each.request.writes for each in flights):
            # they may still come: what is written from now on names this connection
            self._given_up.add(self._lane)
        self._reset()
        self._flights.clear()
        self._chains.clear()
        self._credits = QUEUE_DEPTH
        if self._staging is not None:
            self._staging.free_all()
        for flight in flights:
            if not flight.reported:
                self._report(flight.request, error, flight is to_blame)

    def _reset(self) -> None:
        """Stop the device, which may still write into the staging area."""
        if self._pair is None:
            return
        try:
            self._pair.reset()
        except TransferError as error:
            log.info("a queue pair is made anew: %s", error)
            pair, self._pair = self._pair, None
            _close(pair)

    def _tear_down(self) -> None:
        self._break(self._gone("the rail is closed"))
        self._send_back(self._gone("the rail is closed"))
        for thing in (self._pair, self._staging):
            if thing is not None:
                _close(thing)


def _close(thing: Pair | Staging) -> None:
    try:
        thing.close()
    except TransferError as error:
        log.warning("%s", error)
