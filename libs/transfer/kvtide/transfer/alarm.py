"""Calls at a later time, from one thread of its own; needs no event loop."""

import heapq
import logging
import threading
from collections.abc import Callable

from kvtide.runtime import Clock

log = logging.getLogger("kvtide.transfer")


class Alarm:
    """See the module. The calls must be quick."""

    def __init__(self, clock: Clock) -> None:
        """The thread starts with the first call that is wanted."""
        self._clock = clock
        self._changed = threading.Condition()
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        """Have ``call`` called at ``when_s`` of the clock; never after ``close``."""
        with self._changed:
            if self._closed:
                return
            self._count += 1
            heapq.heappush(self._calls, (when_s, self._count, call))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="transfer-alarm", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Forget all calls and end the thread."""
        with self._changed:
            self._closed = True
            self._calls.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                call = self._due()
                if call is None:
                    return
            try:
                call()
            except Exception:
                log.exception("a timed call failed")

    def _due(self) -> Callable[[], None] | None:
        while not self._closed:
            if not self._calls:
                self._changed.wait()
                continue
            left_s = self._calls[0][0] - self._clock.monotonic()
            if left_s <= 0:
                return heapq.heappop(self._calls)[2]
            self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
        return None
