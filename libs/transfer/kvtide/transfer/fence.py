"""Connections that were given up with writes on them, whose bytes may still come late.

A write that is cut may lie in the owner's socket buffer for a while, or in the network,
when it went by RDMA. Were it taken from there after a later write to the same range, the
old bytes would win. So each write names the connections given up before it, by TCP and by
RDMA, until the owner has said that it left them; before one by RDMA it is asked to
(``Kind.FENCE``), for its processor hears nothing of that.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from kvtide.transfer.errors import TimedOut
from kvtide.transfer.wire import MOST_LANES

LEAVE_S = 2.0
"""So long an owner waits for its thread to leave a connection that was given up."""

MOST_SHUT = 4096


@dataclass(slots=True)
class GivenUp:
    """The writer's side, for one peer. Thread-safe."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _lanes: dict[bytes, None] = field(default_factory=dict[bytes, None])

    def add(self, lane: bytes) -> None:
        """A connection was given up with a write on it."""
        with self._lock:
            self._lanes[lane] = None
            if len(self._lanes) > MOST_LANES:
                # an owner leaves a silent connection by itself long before that
                del self._lanes[next(iter(self._lanes))]

    def lanes(self) -> Sequence[bytes]:
        """What the next write must name."""
        if not self._lanes:
            return ()
        with self._lock:
            return tuple(self._lanes)

    def left(self, lanes: Sequence[bytes]) -> None:
        """The owner took a write that named these."""
        if lanes:
            with self._lock:
                for lane in lanes:
                    self._lanes.pop(lane, None)


@dataclass(slots=True)
class Shut:
    """The owner's side: which connections it serves, and which it must not. Thread-safe."""

    _changed: threading.Condition = field(default_factory=threading.Condition)
    _served: dict[bytes, Callable[[], None]] = field(
        default_factory=dict[bytes, Callable[[], None]]
    )
    _shut: dict[bytes, None] = field(default_factory=dict[bytes, None])

    def enter(self, lane: bytes, end: Callable[[], None]) -> bool:
        """A connection begins to be served; ``end`` leads to ``leave``. False: it must not.

        A connection is one by TCP, with a thread, or a queue pair.
        """
        with self._changed:
            if lane in self._shut:
                return False
            self._served[lane] = end
            return True

    def leave(self, lane: bytes) -> None:
        """Nothing is taken from the connection any more."""
        with self._changed:
            self._served.pop(lane, None)
            self._changed.notify_all()

    def shut(self, lanes: Collection[bytes], wait_s: float = LEAVE_S) -> None:
        """End connections and wait until all have left; what comes later may not enter.

        Raises:
            TimedOut: some have not left within ``wait_s``.
        """
        with self._changed:
            self._shut.update(dict.fromkeys(lanes))
            ends = [self._served[lane] for lane in lanes if lane in self._served]
            while len(self._shut) > MOST_SHUT:
                del self._shut[next(iter(self._shut))]
        # what they hold to end a connection, they may hold when they enter
        for end in ends:
            end()
        with self._changed:
            left = self._changed.wait_for(
                lambda: self._served.keys().isdisjoint(lanes), wait_s
            )
        if not left:
            raise TimedOut(f"a connection given up is in use after {wait_s:g} s")
