"""What an endpoint does beside its transfers, at its time, in a thread of its own."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvtide.runtime import Clock
from kvtide.transfer.alarm import Alarm

log = logging.getLogger("kvtide.transfer")


class Upkeep:
    """One call after the other; each may take its time. Thread-safe."""

    def __init__(self, name: str, alarm: Alarm, clock: Clock) -> None:
        """The thread starts with the first call; ``alarm`` says when it is time."""
        self._alarm = alarm
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, f"transfer-{name}")

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        """Have ``call`` called at ``when_s`` of the clock or soon after."""
        self._alarm.at(when_s, partial(self._begin, call))

    def every(self, seconds: float, call: Callable[[], None]) -> None:
        """Have ``call`` called again and again, so long after each end."""

        def again() -> None:
            try:
                call()
            finally:
                self.every(seconds, call)

        self.at(self._clock.monotonic() + seconds, again)

    def close(self) -> None:
        """Wait for a call under way; there are no others after it."""
        self._thread.shutdown(cancel_futures=True)

    def _begin(self, call: Callable[[], None]) -> None:
        try:
            self._thread.submit(self._safely, call)
        except RuntimeError:
            log.debug("it was time at the end")

    def _safely(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            log.exception("the endpoint's upkeep failed")
