"""A data connection to a peer and whoever drives it: one TCP rail.

Up to ``schedule.DEPTH`` requests are on the way at once, so that the peer never waits
for us. A write goes out only when no read is under way on the same connection: else both
ends could block sending to each other.
"""

import logging
import threading
from collections import deque
from functools import partial

from kvtide.transfer.channel import Channel
from kvtide.transfer.dial import Dialer
from kvtide.transfer.driver import Driver
from kvtide.transfer.errors import (
    Corrupt,
    TimedOut,
    TransferError,
    Unreachable,
)
from kvtide.transfer.handshake import CrowdedError, Session, Use
from kvtide.transfer.line import Line
from kvtide.transfer.rail import Carrier, RailDownError, Report
from kvtide.transfer.requests import Inbox, Request, in_loop
from kvtide.transfer.transfer import Transfer
from kvtide.transfer.wire import (
    FrameError,
)

log = logging.getLogger("kvtide.transfer")

DIAL_S = 3.0


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
        """See ``Carrier.at_once``: only what fits in between. Writes only get in line."""
        if request.writes:
            self.submit(request)
            return True
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
            try:
                if not in_flight and self._inbox.is_all(request):
                    self._step(self._inbox.take(), request.transfer)
                if in_flight and in_flight[0] is request:
                    self._receive(request, request.transfer)
            except (TransferError, OSError) as broken:
                self._drop(broken)
            except Exception as error:
                # as in ``_drive``
                log.exception("a request failed on a TCP rail")
                self._give_up(request, error)
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

    def _connected(self, request: Request) -> Line:
        if self._line is None:
            left_s = min(DIAL_S, max(0.05, request.transfer.remaining_s()))
            try:
                channel, session = self._dialer.dial(Use.DATA, left_s)
            except (Unreachable, TimedOut, CrowdedError) as error:
                raise RailDownError(
                    error.message, node=error.node, path=self.path
                ) from error
            line = self._line_on(channel, session)
            with self._lock:
                self._line = line
                self._cut = False
                if self._closing:
                    channel.shutdown()
        return self._line

    def _line_on(self, channel: Channel, session: Session) -> Line:
        """What speaks on a new connection.

        Raises:
            RailDownError: it can't; the connection is closed.
        """
        dialer = self._dialer
        return Line(channel, session, dialer.address.node, self._clock, dialer.given_up)

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
            writes = any(each.writes for each in self._in_flight)
        if line is not None:
            if writes:
                self._dialer.given_up.add(line.lane)
            line.close()
