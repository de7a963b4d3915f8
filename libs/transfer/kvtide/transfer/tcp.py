"""A data connection to a peer and whoever drives it: one TCP rail.

Up to ``schedule.DEPTH`` requests are on the way at once, so that the peer never waits
for us. A write goes out only when no read is under way on the same connection: else both
ends could block sending to each other.
"""

import logging
import threading
from collections import deque
from functools import partial
from hmac import compare_digest

from xxhash import xxh3_64_intdigest

from kvtide.runtime import Clock
from kvtide.transfer.buffers import WINDOW_BYTES
from kvtide.transfer.channel import Channel, Check, Stillness
from kvtide.transfer.dial import Dialer
from kvtide.transfer.driver import Driver
from kvtide.transfer.errors import (
    Corrupt,
    TimedOut,
    TransferError,
    Unreachable,
)
from kvtide.transfer.handles import Operation
from kvtide.transfer.handshake import CrowdedError, Session, Use
from kvtide.transfer.hashed import receive_hashed, send_hashed
from kvtide.transfer.rail import Carrier, RailDownError, Report
from kvtide.transfer.requests import Inbox, Request, in_loop
from kvtide.transfer.transfer import Transfer
from kvtide.transfer.wire import (
    HEAD_BYTES,
    Ask,
    FrameError,
    Kind,
    Status,
    ask_start,
    pack,
    pack_ask,
    pack_good,
    pack_read,
    unpack_fault,
    unpack_head,
    verify,
)

log = logging.getLogger("kvtide.transfer")

DIAL_S = 3.0
LONGEST_STALL_S = 5.0
SHORTEST_STALL_S = 0.25
_MOST_STARTS = 1024


class TcpCarrier(Carrier):
    """See the module and ``Carrier``. Connects at the first request."""

    path = "tcp"

    def __init__(self, name: str, dialer: Dialer, report: Report) -> None:
        """``name`` is the thread's."""
        self._dialer = dialer
        self._report = report
        self._clock = dialer.clock
        self._inbox = Inbox()
        self._lock = threading.Lock()
        self._in_flight: deque[Request] = deque()
        self._line: Line | None = None
        self._closing = False
        self._cut = False
        self._driver = Driver(name, self._busy, self._drive, self._leave)

    def submit(self, request: Request) -> None:
        """See ``Carrier.submit``."""
        if not self._inbox.put(request):
            self._report(request, self._closed_error(), False)
            return
        # a loop can't drive; a thread that waits soon will
        self._driver.nudge(at_once=in_loop())

    def at_once(self, request: Request) -> bool:
        """See ``Carrier.at_once``: only what fits in between, and only reads."""
        driver, in_flight = self._driver, self._in_flight
        if not driver.turn.acquire(blocking=False):
            return False
        try:
            line = self._line
            # what is written may still fill the way out
            if line is None or self._inbox or (in_flight and in_flight[-1].writes):
                return False
            with self._lock:
                if self._closing:
                    return False
                in_flight.append(request)
            if not line.send_now(request):
                with self._lock:
                    in_flight.remove(request)
                return False
        finally:
            driver.turn.release()
        if driver.parked or driver.missed or in_loop():
            driver.nudge(at_once=driver.missed or in_loop())
        return True

    def finish(self, request: Request) -> None:
        """See ``Carrier.finish``."""
        driver, in_flight = self._driver, self._in_flight
        if not driver.turn.acquire(blocking=False):
            return
        try:
            line = self._line
            if line is None or not in_flight or in_flight[0] is not request:
                return
            try:
                error = line.receive(request, request.transfer)
            except (TransferError, OSError) as broken:
                self._drop(broken)
            else:
                self._retire(request, error)
        finally:
            driver.turn.release()
        if in_flight or self._inbox:
            driver.nudge(at_once=driver.missed)

    def abort(self, transfer: Transfer | None) -> None:
        """See ``Carrier.abort``: cuts the connection if it works for ``transfer``."""
        if transfer is None:
            self._inbox.close()
        for request in self._inbox.discard(transfer):
            self._report(request, self._closed_error(), False)
        with self._lock:
            self._closing = self._closing or transfer is None
            hit = self._closing or any(r.transfer is transfer for r in self._in_flight)
            if hit and self._line is not None:
                self._cut = True
                self._line.channel.shutdown()
        if transfer is None:
            self._driver.close()
        elif hit:
            self._driver.nudge(at_once=True)

    def join(self) -> None:
        """See ``Carrier.join``."""
        self._driver.join()

    def help(self, transfer: Transfer) -> None:
        """See ``Carrier.help``."""
        if self._busy():
            self._driver.share(partial(self._drive, transfer))

    def _closed_error(self) -> TransferError:
        return Unreachable("given up", node=self._dialer.address.node, path=self.path)

    def _busy(self) -> bool:
        return bool(self._in_flight) or bool(self._inbox)

    def _drive(self, until: Transfer | None = None) -> None:
        """Drive the connection until there is no more to do, or ``until`` is over."""
        while until is None or not until.done():
            request = self._inbox.take()
            if request is None and not self._in_flight:
                return
            try:
                self._step(request, until)
            except (TransferError, OSError) as error:
                self._drop(error)
            except Exception as error:
                # whoever waits must hear of it, and the rail must go on for the others
                log.exception("a request failed on a TCP rail")
                self._give_up(self._in_flight[0] if request is None else request, error)

    def _step(self, request: Request | None, waiter: Transfer | None) -> None:
        """Send ``request`` if there is one; else receive an answer."""
        if request is None:
            self._receive(self._in_flight[0], waiter)
            return
        with self._lock:
            self._in_flight.append(request)
        if request.transfer.failed:
            with self._lock:
                self._in_flight.remove(request)
            self._report(request, self._closed_error(), False)
            return
        if request.writes:
            while self._in_flight[0] is not request and not self._in_flight[0].writes:
                self._receive(self._in_flight[0], waiter)
        self._connected(request).send(request, waiter)

    def _receive(self, request: Request, waiter: Transfer | None) -> None:
        if self._line is None:
            raise Unreachable("the connection is gone", path=self.path)
        self._retire(request, self._line.receive(request, waiter))

    def _connected(self, request: Request) -> "Line":
        if self._line is None:
            left_s = min(DIAL_S, max(0.05, request.transfer.remaining_s()))
            try:
                channel, session = self._dialer.dial(Use.DATA, left_s)
            except (Unreachable, TimedOut, CrowdedError) as error:
                raise RailDownError(
                    error.message, node=error.node, path=self.path
                ) from error
            line = Line(channel, session, self._dialer.address.node, self._clock)
            with self._lock:
                self._line = line
                self._cut = False
                if self._closing:
                    channel.shutdown()
        return self._line

    def _retire(self, request: Request, error: TransferError | None = None) -> None:
        with self._lock:
            self._in_flight.remove(request)
        if error is None:
            self._report(request, None, False)
            return
        # the rail is to blame for wrong bytes, not for what the peer refuses; what the
        # peer could not reach is tried again, but not for ever
        blame = isinstance(error, (Corrupt, Unreachable, TimedOut))
        self._report(request, error, blame)

    def _drop(self, error: Exception) -> None:
        """The connection is of no use any more; whoever was on it is told."""
        self._hang_up()
        node = self._dialer.address.node
        if isinstance(error, FrameError):
            wrong: TransferError = Corrupt(str(error), node=node, path=self.path)
        elif isinstance(error, TransferError):
            wrong = error
        else:
            wrong = Unreachable(
                f"the connection broke: {error}", node=node, path=self.path
            )
        with self._lock:
            dropped = list(self._in_flight)
            self._in_flight.clear()
            # of this connection alone: the next may fail by itself
            cut, self._cut = self._cut, False
        # cut by us, or given up for one of them: the others go again, at no cost
        blame = not cut and not any(each.transfer.failed for each in dropped)
        for request in [*dropped, *self._inbox.discard(None)]:
            # the first was under way, the others only waited behind it
            self._report(request, wrong, blame and request is dropped[0])

    def _leave(self) -> None:
        """The driver ends: nobody else would see to what is still in flight."""
        if self._in_flight:
            self._drop(self._closed_error())
        else:
            self._hang_up()

    def _give_up(self, request: Request, error: Exception) -> None:
        node = self._dialer.address.node
        failure = TransferError(repr(error), node=node, path=self.path)
        request.transfer.fail(failure)
        self._drop(Unreachable("given up", node=node, path=self.path))

    def _hang_up(self) -> None:
        with self._lock:
            line, self._line = self._line, None
        if line is not None:
            line.channel.close()


class Line:
    """A proved connection: requests go out on it, answers come back in that order.

    Whoever drives it watches over the transfer that it does so for (``waiter``) too.
    """

    def __init__(
        self, channel: Channel, session: Session, node: str, clock: Clock
    ) -> None:
        """Speak with ``node``."""
        self.channel = channel
        self._session = session
        self._node = node
        self._stillness = Stillness(channel, clock)
        self._last_id = 0
        # how requests for one piece begin, by region, capability and purpose
        self._starts: dict[tuple[int, bytes, str], bytes] = {}
        self._tail = memoryview(bytearray(8))

    def send_now(self, request: Request) -> bool:
        """Send a request for one piece without blocking; False: nothing was sent."""
        transfer, handle = request.transfer, request.handles[0]
        if transfer.trace:
            return False
        right = (handle.region, handle.capability, transfer.purpose)
        start = self._starts.get(right)
        if start is None:
            start = ask_start(*right)
            if len(self._starts) >= _MOST_STARTS:
                self._starts.clear()
            self._starts[right] = start
        request.frame_id = self._last_id + 1
        frame = pack_read(
            self._session.send_key,
            request.frame_id,
            start,
            request.offsets[0],
            request.nbytes,
        )
        if not self.channel.send_now(frame):
            return False
        self._last_id += 1
        return True

    def send(self, request: Request, waiter: Transfer | None) -> None:
        """Send a request, and its bytes if it writes.

        Raises:
            OSError, TransferError: the connection is of no use any more.
        """
        self._stillness.restart()
        self._last_id += 1
        request.frame_id = self._last_id
        transfer = request.transfer
        kind = Kind.WRITE if request.writes else Kind.READ
        body = pack_ask(_ask(request))
        frame = pack(self._session.send_key, kind, self._last_id, body)
        check = partial(self._check, transfer, waiter)
        if not request.writes:
            self.channel.send([frame], check)
            return
        request.moved(send_hashed(self.channel, frame, request.views, check))

    def receive(
        self, request: Request, waiter: Transfer | None
    ) -> TransferError | None:
        """Take the answer to the oldest request that has none; what is wrong with it.

        Raises:
            OSError, TransferError: the connection is of no use any more.
        """
        self._stillness.restart()
        check = partial(self._check, request.transfer, waiter)
        good = pack_good(self._session.receive_key, request.frame_id)
        data = self.channel.receive(HEAD_BYTES, check)
        if not compare_digest(data, good):
            return self._receive_other(request, data, check)
        transfer = request.transfer
        if transfer.operation is Operation.WRITE:
            return None
        if request.cuts is None and request.nbytes <= WINDOW_BYTES:
            views = request.views
            if len(views) == 1:
                self.channel.receive_into((views[0], self._tail), check)
                found = xxh3_64_intdigest(views[0])
                if found != int.from_bytes(self._tail, "little"):
                    return self._corrupt(0)
                transfer.moved_all((found,))
                return None
        return self._receive_pieces(request, check)

    def _receive_other(
        self, request: Request, data: bytes, check: Check
    ) -> TransferError:
        """Take an answer that begins with ``data``, other than that all is well."""
        head = unpack_head(data)
        body = self.channel.receive(head.body_length, check)
        verify(self._session.receive_key, head, body)
        if head.kind is not Kind.ANSWER or head.request_id != request.frame_id:
            raise FrameError("an answer to something else")
        if head.status is Status.OK:
            raise FrameError("an answer with more than was asked for")
        return self._fault(request, unpack_fault(head.status, body))

    def _receive_pieces(self, request: Request, check: Check) -> TransferError | None:
        found, sent = receive_hashed(self.channel, request.views, check)
        if found != sent:
            pairs = zip(found, sent, strict=True)
            at = next(at for at, (ours, theirs) in enumerate(pairs) if ours != theirs)
            return self._corrupt(request.slice_index(at))
        request.moved(found)
        return None

    def _corrupt(self, slice_index: int) -> Corrupt:
        return Corrupt(
            "the bytes that arrived are not those that were sent",
            node=self._node,
            path=TcpCarrier.path,
            slice_index=slice_index,
        )

    def _check(self, transfer: Transfer, waiter: Transfer | None) -> None:
        """Raise when it makes no sense to go on for ``transfer``."""
        if waiter is not None and waiter.remaining_s() <= 0:
            # cuts this connection if it is on it
            waiter.expire()
        if transfer.failed:
            raise Unreachable("given up")
        if transfer.remaining_s() <= 0:
            transfer.expire()
            raise TimedOut("the deadline passed")
        # a stream that lost bytes is silent: leave time to try again elsewhere
        patience_s = transfer.deadline_s - transfer.started_s
        stall_s = min(LONGEST_STALL_S, max(SHORTEST_STALL_S, patience_s / 4))
        if self._stillness.seconds() > stall_s:
            raise Unreachable(
                f"nothing came for {stall_s:g} s", node=self._node, path="tcp"
            )

    def _fault(self, request: Request, error: TransferError) -> TransferError:
        """The peer's error, in terms of the batch instead of the request."""
        error.node = self._node
        error.path = "tcp"
        at = error.slice_index
        if at is not None and at < len(request.views):
            error.slice_index = request.slice_index(at)
        return error


def _ask(request: Request) -> Ask:
    grants: dict[tuple[int, bytes], int] = {}
    pieces: list[tuple[int, int, int]] = []
    for view, handle, offset in zip(
        request.views, request.handles, request.offsets, strict=True
    ):
        right = (handle.region, handle.capability)
        pieces.append((grants.setdefault(right, len(grants)), offset, len(view)))
    transfer = request.transfer
    return Ask(list(grants), pieces, transfer.purpose, transfer.trace)
