"""Turns to dial a peer: one at a time for each."""

import threading
from collections.abc import Generator
from contextlib import contextmanager

from kvtide.runtime import Clock
from kvtide.transfer.errors import TimedOut

Who = tuple[str, int]
"""A peer's node and epoch."""


class Turns:
    """See the module. Thread-safe; nothing is kept of those dialled in vain."""

    def __init__(self, clock: Clock) -> None:
        """Nobody dials."""
        self._clock = clock
        self._lock = threading.Lock()
        # a lock for each peer, and how many dial or wait to
        self._dialling: dict[Who, tuple[threading.Lock, int]] = {}

    @contextmanager
    def of(self, peer: Who, deadline_s: float) -> Generator[None]:
        """Have the turn to dial; raises TimedOut when it is not ours by then."""
        with self._lock:
            turn, users = self._dialling.get(peer, (threading.Lock(), 0))
            self._dialling[peer] = (turn, users + 1)
        wait_s = max(0.0, deadline_s - self._clock.monotonic())
        mine = turn.acquire(timeout=wait_s)
        try:
            if not mine:
                raise TimedOut(f"no answer within {wait_s:g} s", node=peer[0])
            yield
        finally:
            if mine:
                turn.release()
            with self._lock:
                turn, users = self._dialling.pop(peer)
                if users > 1:
                    self._dialling[peer] = (turn, users - 1)
