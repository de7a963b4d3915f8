"""A connected stream socket for one thread: whole buffers in, whole buffers out.

The socket blocks in the kernel, with the GIL free, for one tick at a time; between
ticks the caller may give up. ``shutdown`` from another thread ends a call at once.
"""

import contextlib
import errno
import socket
import struct
from collections.abc import Callable, Sequence

from kvtide.runtime import Clock

TICK_S = 0.5
_TIMEVAL = struct.Struct("@ll")
_TIMEOUTS = (errno.EAGAIN, errno.EWOULDBLOCK)
_SILENCE_LIMIT_MS = 10_000
_MOST_BUFFERS = 1024

Check = Callable[[], None]
"""Called after each tick; raises to give up."""


class ChannelClosedError(ConnectionError):
    """The other end, or a ``shutdown`` here, ended the stream."""


class Channel:
    """See the module. One thread sends and receives; any thread may ``shutdown``.

    ``moved`` counts bytes both ways: what waits can tell slow from still.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take over the socket."""
        self.moved = 0
        self._sock = sock
        # what ``receive_ahead`` got and nobody has taken yet
        self._ahead = b""
        sock.settimeout(None)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # a host that vanished without a word is noticed within this time
            sock.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_LIMIT_MS
            )
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self.tick(TICK_S)

    def tick(self, seconds: float) -> None:
        """Set how long a call stays in the kernel before the caller is asked."""
        whole = int(seconds)
        value = _TIMEVAL.pack(whole, int((seconds - whole) * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._sock.setsockopt(socket.SOL_SOCKET, option, value)

    def open(self, check: Check) -> None:
        """Agree with the other end on how to speak; before all else, in its thread.

        Raises:
            Refused: that is not possible.
        """
        del check

    def send_now(self, frame: bytes) -> bool:
        """Send a small frame without blocking; False: not now, nothing was sent."""
        try:
            sent = self._sock.send(frame, socket.MSG_DONTWAIT)
        except OSError:
            # a broken stream is for who can say so
            return False
        self.moved += sent
        if sent < len(frame):
            # no room for a few bytes: rarer than all that could be done about it
            self.shutdown()
        return True

    def send(self, buffers: Sequence[bytes | memoryview], check: Check) -> None:
        """Send all of all buffers.

        Raises:
            ChannelClosedError: the stream ended.
            OSError: it broke.
            whatever ``check`` raises.
        """
        waiting = buffers
        total = sum(map(len, buffers))
        while total:
            some = waiting if len(waiting) <= _MOST_BUFFERS else waiting[:_MOST_BUFFERS]
            try:
                sent = self._sock.sendmsg(some)
            except OSError as error:
                if error.errno not in _TIMEOUTS:
                    raise
                check()
                continue
            total -= sent
            self.moved += sent
            if total:
                waiting = _rest(waiting, sent)
                check()

    def receive_into(self, views: Sequence[memoryview], check: Check) -> None:
        """Fill all of all views (at most 1,024); else as ``send``."""
        waiting = views
        total = sum(map(len, views))
        if self._ahead:
            waiting, total = self._fill_from_ahead(views, total)
        while total:
            try:
                if len(waiting) == 1:
                    got = self._sock.recv_into(waiting[0], 0, socket.MSG_WAITALL)
                else:
                    got = self._sock.recvmsg_into(waiting, 0, socket.MSG_WAITALL)[0]
            except OSError as error:
                if error.errno not in _TIMEOUTS:
                    raise
                check()
                continue
            if got == 0:
                raise ChannelClosedError("the connection was closed")
            total -= got
            self.moved += got
            if total:
                waiting = [memoryview(view) for view in _rest(waiting, got)]
                check()

    def receive(self, length: int, check: Check) -> bytes:
        """The next ``length`` bytes; else as ``send``."""
        data = b""
        if self._ahead:
            data, self._ahead = self._ahead[:length], self._ahead[length:]
        while len(data) < length:
            try:
                part = self._sock.recv(length - len(data), socket.MSG_WAITALL)
            except OSError as error:
                if error.errno not in _TIMEOUTS:
                    raise
                check()
                continue
            if not part:
                raise ChannelClosedError("the connection was closed")
            self.moved += len(part)
            data += part
            if len(data) < length:
                check()
        return data

    def receive_ahead(self, most: int, check: Check) -> bytes:
        """What is there, at least a byte, as ``receive_some``, if that is allowed.

        Give back what is not used, with ``put_back``. "" where it is not allowed.
        """
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        while True:
            try:
                data = self._sock.recv(most)
            except OSError as error:
                if error.errno not in _TIMEOUTS:
                    raise
                check()
                continue
            if not data:
                raise ChannelClosedError("the connection was closed")
            self.moved += len(data)
            return data

    def put_back(self, data: bytes) -> None:
        """The next to be received is this."""
        self._ahead = data

    def _fill_from_ahead(
        self, views: Sequence[memoryview], total: int
    ) -> tuple[Sequence[memoryview], int]:
        """Fill views with what is there; what is left of them, and its bytes."""
        ahead = self._ahead[:total]
        self._ahead = self._ahead[total:]
        at = 0
        for view in views:
            part = ahead[at : at + len(view)]
            view[: len(part)] = part
            at += len(part)
        rest = [memoryview(view) for view in _rest(views, len(ahead))]
        return rest, total - len(ahead)

    def receive_some(self, most: int, check: Check) -> bytes:
        """What the socket has, at least a byte; else as ``send``."""
        return Channel.receive_ahead(self, most, check)

    def pending(self, most: int) -> bytes:
        """What has arrived already, left in place; for saying what was refused."""
        try:
            return self._sock.recv(most, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return b""

    def part(self, most: int = 64 << 10) -> None:
        """End our side and let the other end read what we said.

        Closing with bytes unread would take our last words back.
        """
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            self.tick(0.25)
            while most > 0 and (got := len(self._sock.recv(4096))):
                most -= got

    def shutdown(self) -> None:
        """End the stream both ways; wakes the thread that uses it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back; by the thread that uses it."""
        self.shutdown()
        self._sock.close()


class Stillness:
    """How long nothing has moved on a channel, as far as somebody looked."""

    def __init__(self, channel: Channel, clock: Clock) -> None:
        """Look at ``channel``."""
        self._channel = channel
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Count from now on: until now nothing was waited for."""
        self._moved = self._channel.moved
        self._since_s = self._clock.monotonic()

    def seconds(self) -> float:
        """Since the last look that saw a change; asked after each tick."""
        now_s = self._clock.monotonic()
        if self._channel.moved != self._moved:
            self._moved, self._since_s = self._channel.moved, now_s
        return now_s - self._since_s


def _rest(views: Sequence[bytes | memoryview], size: int) -> list[bytes | memoryview]:
    """What is left of the views after their first ``size`` bytes."""
    for index, view in enumerate(views):
        if size < len(view):
            return [memoryview(view)[size:], *views[index + 1 :]]
        size -= len(view)
    return []
