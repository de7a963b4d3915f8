"""The control connection to a peer: small questions, news, and whether it lives."""

import contextlib
import logging
import struct
import threading
from collections.abc import Callable
from concurrent.futures import (
    Future,
    InvalidStateError,
    TimeoutError as FutureTimeoutError,
)
from functools import partial
from typing import NoReturn

from kvtide.transfer.channel import Channel
from kvtide.transfer.dial import Dialer
from kvtide.transfer.errors import TimedOut, TransferError, Unreachable
from kvtide.transfer.handshake import Session, Use
from kvtide.transfer.wire import (
    HEAD_BYTES,
    Kind,
    Status,
    pack,
    unpack_fault,
    unpack_head,
    verify,
)

log = logging.getLogger("kvtide.transfer")

REDIAL_S = 2.0


class Control:
    """See the module. ``ask`` is for any thread; the callbacks come from its own."""

    def __init__(
        self,
        dialer: Dialer,
        *,
        region_gone: Callable[[int], None],
        ways: Callable[[bytes], None],
        peer_gone: Callable[[TransferError], None],
    ) -> None:
        """Nothing is opened before ``open``."""
        self._dialer = dialer
        self._region_gone = region_gone
        self._ways = ways
        self._peer_gone = peer_gone
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._session: Session | None = None
        self._request_id = 0
        self._waiting: dict[int, Future[bytes]] = {}
        self._closing = False
        self._thread = threading.Thread(
            target=self._run,
            name=f"transfer-control-{dialer.address.node}",
            daemon=True,
        )

    def open(self, timeout_s: float) -> None:
        """Connect and watch; raises as ``Dialer.dial``."""
        self._take(*self._dialer.dial(Use.CONTROL, timeout_s))
        self._thread.start()

    def ask(self, kind: Kind, body: bytes, timeout_s: float) -> bytes:
        """The body of the peer's answer.

        Raises:
            Unreachable: the peer is gone.
            TimedOut: no answer in time.
            TransferError: what the peer answered.
        """
        node = self._dialer.address.node
        answer = self.begin(kind, body)
        try:
            return answer.result(timeout_s)
        except FutureTimeoutError as error:
            raise TimedOut(f"no answer within {timeout_s:g} s", node=node) from error
        finally:
            answer.cancel()

    def begin(self, kind: Kind, body: bytes) -> Future[bytes]:
        """The body of the peer's answer, or its error, when it comes.

        Who does not wait any more cancels it. Callbacks come from the connection's
        thread and must be quick.

        Raises:
            Unreachable: the peer is gone.
        """
        node = self._dialer.address.node
        with self._lock:
            channel, session = self._channel, self._session
            if channel is None or session is None:
                raise Unreachable("the peer is gone", node=node)
            self._request_id += 1
            request_id = self._request_id
            answer: Future[bytes] = Future()
            self._waiting[request_id] = answer
            try:
                frame = pack(session.send_key, kind, request_id, body)
                channel.send([frame], self._check)
            except (TransferError, OSError) as error:
                self._waiting.pop(request_id, None)
                # half a frame may be on the way: nothing else can follow it
                channel.shutdown()
                raise Unreachable(
                    f"the connection broke: {error}", node=node
                ) from error
        answer.add_done_callback(partial(self._forget, request_id))
        return answer

    def _forget(self, request_id: int, answer: Future[bytes]) -> None:
        del answer
        self._waiting.pop(request_id, None)

    def close(self) -> None:
        """Hang up and wait for the thread; may be called from it."""
        with self._lock:
            self._closing = True
            if self._channel is not None:
                self._channel.shutdown()
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join()

    def _check(self) -> None:
        raise Unreachable("the peer does not read", node=self._dialer.address.node)

    def _take(self, channel: Channel, session: Session) -> None:
        with self._lock:
            # numbers go on: who waited on the old one may still be about to leave
            self._channel, self._session = channel, session
            if self._closing:
                channel.shutdown()

    def _run(self) -> None:
        while True:
            if not self._again(self._listen()):
                return

    def _again(self, lost: Exception) -> bool:
        """Hang up, and connect again unless we close or the peer is gone."""
        with self._lock:
            channel, self._channel, self._session = self._channel, None, None
            waiting = list(self._waiting.values())
        if channel is not None:
            channel.close()
        node = self._dialer.address.node
        for answer in waiting:
            # who gave it up hears no more
            with contextlib.suppress(InvalidStateError):
                answer.set_exception(Unreachable(f"connection lost: {lost}", node=node))
        if self._closing:
            return False
        try:
            self._take(*self._dialer.dial(Use.CONTROL, REDIAL_S))
        except TransferError as error:
            self._peer_gone(error)
            return False
        log.info("control connection to %s was lost and is back: %s", node, lost)
        return True

    def _listen(self) -> Exception:
        """Take what comes until the connection is lost; why it was."""
        channel, session = self._channel, self._session
        if channel is None or session is None:
            return Unreachable("not connected", node=self._dialer.address.node)
        try:
            self._take_frames(channel, session)
        except (TransferError, OSError) as error:
            return error

    def _take_frames(self, channel: Channel, session: Session) -> NoReturn:
        while True:
            head = unpack_head(channel.receive(HEAD_BYTES, lambda: None))
            body = channel.receive(head.body_length, lambda: None)
            verify(session.receive_key, head, body)
            if head.kind is Kind.REGION_GONE:
                self._region_gone(*struct.unpack("<Q", body))
                continue
            if head.kind is Kind.WAYS:
                self._ways(body)
                continue
            answer = self._waiting.get(head.request_id)
            if answer is not None:
                with contextlib.suppress(InvalidStateError):
                    self._settle(answer, head.status, body)

    def _settle(self, answer: Future[bytes], status: Status, body: bytes) -> None:
        if status is Status.OK:
            answer.set_result(body)
            return
        error = unpack_fault(status, body)
        error.node = self._dialer.address.node
        answer.set_exception(error)
