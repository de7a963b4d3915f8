"""One data connection to a peer and the thread that drives it.

Up to ``IN_FLIGHT`` requests are on the way at once, so that the peer never waits for
us. A write goes out only when no read is under way on the same connection: else both
ends could block sending to each other.
"""

import logging
import struct
import threading
from collections import deque
from collections.abc import Callable

from kvtide.runtime import Clock
from kvtide.transfer.buffers import Digests, windows
from kvtide.transfer.channel import Channel
from kvtide.transfer.dial import Dialer
from kvtide.transfer.errors import (
    Corrupt,
    TimedOut,
    TransferError,
    Unreachable,
)
from kvtide.transfer.handshake import Session, Use
from kvtide.transfer.requests import Request, RequestQueue
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

IN_FLIGHT = 4
DIAL_S = 3.0

Broken = Callable[[Request, TransferError], None]
"""Told of a request whose connection broke, or whose bytes were wrong."""


class InterruptedLaneError(Unreachable):
    """The connection was cut by us, for another transfer's sake."""


class Lane:
    """See the module."""

    def __init__(
        self,
        name: str,
        dialer: Dialer,
        queue: RequestQueue,
        clock: Clock,
        broken: Broken,
    ) -> None:
        """Take requests from ``queue`` once started."""
        self._dialer = dialer
        self._queue = queue
        self._clock = clock
        self._broken = broken
        self._lock = threading.Lock()
        self._in_flight: deque[Request] = deque()
        self._channel: Channel | None = None
        self._session: Session | None = None
        self._request_id = 0
        self._closing = False
        self._interrupted = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Run until the queue is closed."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the end; the queue must be closed and the lane interrupted."""
        self._thread.join()

    def interrupt(self, transfer: Transfer | None) -> None:
        """Cut the connection if it works for ``transfer`` (None: in any case)."""
        with self._lock:
            if transfer is None:
                self._closing = True
                hit = True
            else:
                hit = any(each.transfer is transfer for each in self._in_flight)
            if hit and self._channel is not None:
                self._interrupted = True
                self._channel.shutdown()

    def _run(self) -> None:
        while True:
            request = self._queue.take(wait=not self._in_flight)
            if request is None and not self._in_flight:
                break
            try:
                self._step(request)
            except (TransferError, OSError) as error:
                self._drop(error)
        self._hang_up()

    def _step(self, request: Request | None) -> None:
        """Send ``request`` if there is one; receive an answer if it is time to."""
        if request is not None:
            with self._lock:
                self._in_flight.append(request)
            if request.transfer.failed:
                self._retire(request)
                return
            self._send_in_turn(request)
        full = len(self._in_flight) >= IN_FLIGHT
        if self._in_flight and (request is None or full):
            self._receive(self._in_flight[0])

    def _send_in_turn(self, request: Request) -> None:
        if request.writes:
            while self._in_flight[0] is not request and not self._in_flight[0].writes:
                self._receive(self._in_flight[0])
        self._send(request)

    def _connected(self, request: Request) -> tuple[Channel, Session]:
        if self._channel is None or self._session is None:
            left_s = min(DIAL_S, max(0.05, request.transfer.remaining_s()))
            channel, session = self._dialer.dial(Use.DATA, left_s)
            with self._lock:
                self._channel, self._session = channel, session
                self._interrupted = False
                if self._closing:
                    channel.shutdown()
            self._request_id = 0
        return self._channel, self._session

    def _send(self, request: Request) -> None:
        channel, session = self._connected(request)
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
        body = pack_ask(Ask(list(grants), pieces, request.transfer.purpose))
        kind = Kind.WRITE if request.writes else Kind.READ
        frame = pack(session.send_key, kind, self._request_id, body)
        check = self._check_of(request)
        if not request.writes:
            channel.send([frame], check)
            return
        digests = Digests(request.views)
        out: list[bytes | memoryview] = [frame]
        for window in windows(request.views):
            digests.update(window)
            out.extend(part for _, part in window)
            channel.send(out, check)
            out = []
        values = digests.finish()
        out.append(struct.pack(f"<{len(values)}Q", *values))
        channel.send(out, check)
        for piece, value in zip(request.pieces, values, strict=True):
            request.transfer.digest(piece.slice_index, value)

    def _check_of(self, request: Request) -> Callable[[], None]:
        def check() -> None:
            if request.transfer.failed:
                raise Unreachable("given up")
            if request.transfer.remaining_s() <= 0:
                request.transfer.expire()
                raise TimedOut("the deadline passed", path="tcp")

        return check

    def _receive(self, request: Request) -> None:
        """Take the answer to the oldest request in flight."""
        channel, session = self._channel, self._session
        if channel is None or session is None:
            raise Unreachable("the connection is gone", path="tcp")
        check = self._check_of(request)
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
        digests = Digests(request.views)
        for window in windows(request.views):
            channel.receive_into([part for _, part in window], check)
            digests.update(window)
        count = len(request.views)
        sent = struct.unpack(f"<{count}Q", channel.receive(8 * count, check))
        for piece, ours, theirs in zip(
            request.pieces, digests.finish(), sent, strict=True
        ):
            if ours != theirs:
                return Corrupt(
                    "the bytes that arrived are not those that were sent",
                    node=self._dialer.address.node,
                    path="tcp",
                    slice_index=piece.slice_index,
                )
            request.transfer.digest(piece.slice_index, ours)
        return None

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
        if error is None:
            request.settle()
        else:
            self._broken(request, error)

    def _drop(self, error: Exception) -> None:
        """The connection is of no use any more; whoever was on it is told."""
        self._hang_up()
        node = self._dialer.address.node
        if self._interrupted or any(each.transfer.failed for each in self._in_flight):
            wrong: TransferError = InterruptedLaneError("cut", node=node, path="tcp")
        elif isinstance(error, FrameError):
            wrong = Corrupt(str(error), node=node, path="tcp")
        elif isinstance(error, TransferError):
            wrong = error
        else:
            wrong = Unreachable(f"the connection broke: {error}", node=node, path="tcp")
        with self._lock:
            dropped = list(self._in_flight)
            self._in_flight.clear()
        for request in dropped:
            self._broken(request, wrong)

    def _hang_up(self) -> None:
        with self._lock:
            channel, self._channel, self._session = self._channel, None, None
        if channel is not None:
            channel.close()
