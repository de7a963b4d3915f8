"""A proved data connection to a peer: what goes out on it, and what comes back."""

import struct
from functools import partial
from hmac import compare_digest

from kvtide.runtime import Clock
from kvtide.transfer.buffers import WINDOW_BYTES
from kvtide.transfer.channel import Channel, Check, Stillness
from kvtide.transfer.errors import Corrupt, TimedOut, TransferError, Unreachable
from kvtide.transfer.fence import GivenUp
from kvtide.transfer.handles import Operation
from kvtide.transfer.handshake import Session
from kvtide.transfer.hashed import receive_hashed, receive_lone, send_hashed
from kvtide.transfer.requests import Request
from kvtide.transfer.transfer import Transfer
from kvtide.transfer.wire import (
    HEAD_BYTES,
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

LONGEST_STALL_S = 5.0
SHORTEST_STALL_S = 0.25
_MOST_STARTS = 1024


class Line:
    """A proved connection: requests go out on it, answers come back in that order.

    Whoever drives it watches over the transfer that it does so for (``waiter``) too.
    """

    def __init__(
        self,
        channel: Channel,
        session: Session,
        node: str,
        clock: Clock,
        given_up: GivenUp,
    ) -> None:
        """Speak with ``node``."""
        self.channel = channel
        self.path = "tcp"
        self.lane = session.lane
        self._given_up = given_up
        self._session = session
        self._node = node
        self._stillness = Stillness(channel, clock)
        self._last_id = 0
        # how requests for one piece begin, by region, capability and purpose
        self._starts: dict[tuple[int, bytes, str], bytes] = {}
        self._tail = memoryview(bytearray(8))

    def close(self) -> None:
        """Hang up; by the thread that uses it."""
        self.channel.close()

    def send_now(self, request: Request) -> bool:
        """Send a request for one piece without blocking; False: nothing was sent."""
        if request.transfer.trace:
            return False
        request.frame_id = self._last_id + 1
        try:
            frame = pack_read(
                self._session.send_key,
                request.frame_id,
                self._start_of(request),
                request.offsets[0],
                request.nbytes,
            )
        except (ValueError, struct.error):
            # what no frame can say: somebody else will find the words for it
            return False
        if not self.channel.send_now(frame):
            return False
        self._last_id += 1
        return True

    def _start_of(self, request: Request) -> bytes:
        """How the frame's body begins, always the same for the same right."""
        handle = request.handles[0]
        right = (handle.region, handle.capability, request.transfer.purpose)
        start = self._starts.get(right)
        if start is None:
            start = ask_start(*right)
            if len(self._starts) >= _MOST_STARTS:
                self._starts.clear()
            self._starts[right] = start
        return start

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
        if request.writes:
            request.lanes = self._given_up.lanes()
        body = pack_ask(request.ask())
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
            self._given_up.left(request.lanes)
            return None
        if request.cuts is None and request.nbytes <= WINDOW_BYTES:
            views = request.views
            if len(views) == 1:
                tail = self._tail
                found, sent = receive_lone(self.channel, views[0], tail, check)
                if found != sent:
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
            path=self.path,
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
                f"nothing came for {stall_s:g} s", node=self._node, path=self.path
            )

    def _fault(self, request: Request, error: TransferError) -> TransferError:
        """The peer's error, in terms of the batch instead of the request."""
        error.node = self._node
        error.path = self.path
        at = error.slice_index
        if at is not None and at < len(request.views):
            error.slice_index = request.slice_index(at)
        return error
