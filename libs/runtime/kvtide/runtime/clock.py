"""Time as a dependency: decisions never read a clock, shells are given one."""

import asyncio
import heapq
import time
from typing import Protocol


class Clock(Protocol):
    """A source of time. All durations are in seconds.

    ``monotonic`` never goes back and is the only time that leases, expiries and
    measurements use. ``wall`` is for people (logs, catalog rows) and is never
    compared between machines.
    """

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never decreases."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch, for people only."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for at least ``seconds``; zero or less yields once."""
        ...


class SystemClock:
    """The machine's clock."""

    # itself, not called by another: it is asked for each transfer, and more than once
    monotonic = staticmethod(time.monotonic)  # noqa: TID251 - this is the clock
    """See ``Clock.monotonic``."""

    def wall(self) -> float:
        """See ``Clock.wall``."""
        return time.time()  # noqa: TID251 - this is the clock

    async def sleep(self, seconds: float) -> None:
        """See ``Clock.sleep``."""
        await asyncio.sleep(max(0.0, seconds))


class ManualClock:
    """A clock that moves when a test says so.

    Sleepers wake in the order of their deadlines. Not thread-safe: for one loop.
    """

    def __init__(self, start_s: float = 1000.0) -> None:
        """Start at ``start_s`` seconds; ``wall`` shows the same number."""
        self._now_s = start_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    def monotonic(self) -> float:
        """See ``Clock.monotonic``."""
        return self._now_s

    def wall(self) -> float:
        """See ``Clock.wall``."""
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        """Wait until ``advance`` has moved time past the deadline."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._sleepers, (self._now_s + seconds, self._count, future))
        await future

    async def advance(self, seconds: float) -> None:
        """Move time on, waking each sleeper at its own deadline, in order."""
        target_s = self._now_s + seconds
        await asyncio.sleep(0)
        while self._sleepers and self._sleepers[0][0] <= target_s:
            deadline_s, _, future = heapq.heappop(self._sleepers)
            self._now_s = max(self._now_s, deadline_s)
            if not future.done():
                future.set_result(None)
            # let the sleeper run, and whatever it wakes, before time goes on
            for _ in range(5):
                await asyncio.sleep(0)
        self._now_s = target_s
