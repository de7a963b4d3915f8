"""A data connection to a peer and the thread that drives it: one TCP rail.

Up to ``schedule.DEPTH`` requests are on the way at once, so that the peer never waits
for us. A write goes out only when no read is under way on the same connection: else both
ends could block sending to each other.
"""

import logging
import struct
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from kvtide.transfer.buffers import Digests, windows
from kvtide.transfer.channel import Channel
from kvtide.transfer.dial import Dialer
from kvtide.transfer.errors import (
    Corrupt,
    TimedOut,
    TransferError,
    Unreachable,
)
from kvtide.transfer.handshake import CrowdedError, Session, Use
from kvtide.transfer.hashed import receive_hashed
from kvtide.transfer.rail import Carrier, RailDownError, Report
from kvtide.transfer.requests import Inbox, Request
from kvtide.transfer.transfer import Transfer
from kvtide.transfer.wire import (
    HEAD_BYTES,
    Ask,
    FrameError,
    Kind,
    Status,
    pack,
    pack_ask,
    unpack_fault,
    unpack_head,
    verify,
)

log = logging.getLogger("kvtide.transfer")

DIAL_S = 3.0
LONGEST_STALL_S = 5.0
SHORTEST_STALL_S = 0.25


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
        self._channel: Channel | None = None
        self._session: Session | None = None
        self._request_id = 0
        self._progress_s = 0.0
        self._closing = False
        self._cut = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False
        # held by the one thread that uses the connection
        self._drive = threading.Lock()

    def submit(self, request: Request) -> None:
        """See ``Carrier.submit``."""
        with self._lock:
            if not self._started and not self._closing:
                self._started = True
                self._thread.start()
        if not self._inbox.put(request):
            self._report(request, self._closed_error(), False)

    def abort(self, transfer: Transfer | None) -> None:
        """See ``Carrier.abort``: cuts the connection if it works for ``transfer``."""
        if transfer is None:
            self._inbox.close()
        for request in self._inbox.discard(transfer):
            self._report(request, self._closed_error(), False)
        with self._lock:
            self._closing = self._closing or transfer is None
            hit = self._closing or any(r.transfer is transfer for r in self._in_flight)
            if hit and self._channel is not None:
                self._cut = True
                self._channel.shutdown()

    def join(self) -> None:
        """See ``Carrier.join``."""
        if self._started:
            self._thread.join()

    def _closed_error(self) -> TransferError:
        return Unreachable("given up", node=self._dialer.address.node, path=self.path)

    def help(self, transfer: Transfer) -> None:
        """See ``Carrier.help``."""
        if not self._drive.acquire(blocking=False):
            return
        try:
            self._work(partial(self._inbox.steal, transfer))
        finally:
            self._drive.release()

    def _run(self) -> None:
        while (request := self._inbox.take(wait=True)) is not None:
            with self._drive:
                self._work(partial(self._inbox.take, wait=False), request)
        with self._drive:
            self._hang_up()

    def _work(
        self, more: Callable[[], Request | None], request: Request | None = None
    ) -> None:
        """Drive the connection until nothing is in flight and there is no more."""
        request = request or more()
        while request is not None or self._in_flight:
            try:
                self._step(request)
            except (TransferError, OSError) as error:
                self._drop(error)
            request = more()

    def _step(self, request: Request | None) -> None:
        """Send ``request`` if there is one; receive an answer if it is time to."""
        if request is not None:
            with self._lock:
                self._in_flight.append(request)
            if request.transfer.failed:
                self._retire(request)
                return
            self._send_in_turn(request)
        elif self._in_flight:
            self._receive(self._in_flight[0])

    def _send_in_turn(self, request: Request) -> None:
        if request.writes:
            while self._in_flight[0] is not request and not self._in_flight[0].writes:
                self._receive(self._in_flight[0])
        self._send(request)

    def _connected(self, request: Request) -> tuple[Channel, Session]:
        if self._channel is None or self._session is None:
            left_s = min(DIAL_S, max(0.05, request.transfer.remaining_s()))
            try:
                channel, session = self._dialer.dial(Use.DATA, left_s)
            except (Unreachable, TimedOut, CrowdedError) as error:
                raise RailDownError(
                    error.message, node=error.node, path=self.path
                ) from error
            with self._lock:
                self._channel, self._session = channel, session
                self._cut = False
                if self._closing:
                    channel.shutdown()
            self._request_id = 0
        return self._channel, self._session

    def _send(self, request: Request) -> None:
        channel, session = self._connected(request)
        self._progress_s = self._clock.monotonic()
        transfer = request.transfer
        self._request_id += 1
        request.frame_id = self._request_id
        grants: dict[tuple[int, bytes], int] = {}
        pieces = [
            (
                grants.setdefault((handle.region, handle.capability), len(grants)),
                offset,
                piece.length,
            )
            for piece, handle, offset in zip(
                request.pieces, request.handles, request.offsets, strict=True
            )
        ]
        body = pack_ask(Ask(list(grants), pieces, transfer.purpose, transfer.trace))
        kind = Kind.WRITE if request.writes else Kind.READ
        frame = pack(session.send_key, kind, self._request_id, body)
        check = self._check_of(request)
        if not request.writes:
            channel.send([frame], check)
            return
        digests = Digests(request.views)
        out: list[bytes | memoryview] = [frame]
        for window in windows(request.views):
            if len(out) > 1:
                channel.send(out, check)
                self._progress()
                out = []
            digests.update(window)
            out.extend(part for _, part in window)
        values = digests.finish()
        out.append(struct.pack(f"<{len(values)}Q", *values))
        channel.send(out, check)
        for piece, value in zip(request.pieces, values, strict=True):
            request.transfer.moved(piece, value)

    def _check_of(self, request: Request) -> Callable[[], None]:
        # a stream that lost bytes is silent: leave time to try again elsewhere
        patience_s = request.transfer.deadline_s - request.transfer.started_s
        stall_s = min(LONGEST_STALL_S, max(SHORTEST_STALL_S, patience_s / 4))

        def check() -> None:
            if request.transfer.failed:
                raise Unreachable("given up")
            if request.transfer.remaining_s() <= 0:
                request.transfer.expire()
                raise TimedOut("the deadline passed")
            if self._clock.monotonic() > self._progress_s + stall_s:
                raise Unreachable(
                    f"nothing came for {stall_s:g} s",
                    node=self._dialer.address.node,
                    path=self.path,
                )

        return check

    def _receive(self, request: Request) -> None:
        """Take the answer to the oldest request in flight."""
        channel, session = self._channel, self._session
        if channel is None or session is None:
            raise Unreachable("the connection is gone", path=self.path)
        check = self._check_of(request)
        self._progress_s = self._clock.monotonic()
        head = unpack_head(channel.receive(HEAD_BYTES, check))
        body = channel.receive(head.body_length, check)
        verify(session.receive_key, head, body)
        if head.kind is not Kind.ANSWER or head.request_id != request.frame_id:
            raise FrameError("an answer to something else")
        error: TransferError | None = None
        if head.status is not Status.OK:
            error = self._fault(request, unpack_fault(head.status, body))
        elif not request.writes:
            error = self._receive_pieces(channel, request, check)
        self._retire(request, error)

    def _receive_pieces(
        self, channel: Channel, request: Request, check: Callable[[], None]
    ) -> TransferError | None:
        found, sent = receive_hashed(channel, request.views, check, self._progress)
        for piece, ours, theirs in zip(request.pieces, found, sent, strict=True):
            if ours != theirs:
                return Corrupt(
                    "the bytes that arrived are not those that were sent",
                    node=self._dialer.address.node,
                    path=self.path,
                    slice_index=piece.slice_index,
                )
            request.transfer.moved(piece, ours)
        return None

    def _progress(self) -> None:
        self._progress_s = self._clock.monotonic()

    def _fault(self, request: Request, error: TransferError) -> TransferError:
        """The peer's error, in terms of the batch instead of the request."""
        error.node = self._dialer.address.node
        error.path = "tcp"
        at = error.slice_index
        if at is not None and at < len(request.pieces):
            error.slice_index = request.pieces[at].slice_index
        return error

    def _retire(self, request: Request, error: TransferError | None = None) -> None:
        with self._lock:
            self._in_flight.remove(request)
        # the rail is to blame for wrong bytes, not for what the peer refuses
        self._report(request, error, isinstance(error, Corrupt))

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
        # cut by us, or given up for one of them: the others go again, at no cost
        blame = not self._cut and not any(each.transfer.failed for each in dropped)
        for request in [*dropped, *self._inbox.discard(None)]:
            # the first was under way, the others only waited behind it
            self._report(request, wrong, blame and request is dropped[0])

    def _hang_up(self) -> None:
        with self._lock:
            channel, self._channel, self._session = self._channel, None, None
        if channel is not None:
            channel.close()
