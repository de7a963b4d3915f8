"""Verifies slots in threads of its own, so that hashing never holds up the loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import structlog
from prometheus_client import Histogram

from kvtide.runtime import Clock
from kvtide.store.events import Verified, Verify
from kvtide.store.verify import verify_slot

log = structlog.get_logger("kvtide.store")


class Verifier:
    """Work in progress is bounded by the slots of the arena: one check for each."""

    def __init__(
        self, arena: memoryview, clock: Clock, threads: int, seconds: Histogram
    ) -> None:
        """``seconds`` observes how long each check took."""
        self._arena = arena
        self._clock = clock
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="store-verify")
        self._loop = asyncio.get_running_loop()

    def submit(self, wanted: Verify, tell: Callable[[Verified], None]) -> None:
        """Have ``tell`` called in the loop with the verdict."""
        checked = self._threads.submit(self._check, wanted)
        checked.add_done_callback(partial(self._checked, wanted, tell))

    async def close(self) -> None:
        """Drop what waits, and wait for what runs."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def _check(self, wanted: Verify) -> Verified:
        started_s = self._clock.monotonic()
        verdict = verify_slot(self._arena, wanted)
        self._seconds.observe(self._clock.monotonic() - started_s)
        return verdict

    def _checked(
        self, wanted: Verify, tell: Callable[[Verified], None], done: Future[Verified]
    ) -> None:
        if done.cancelled() or self._loop.is_closed():
            return
        error = done.exception()
        if error is None:
            verdict = done.result()
        else:
            log.error("verification_failed", exc_info=error)
            verdict = Verified(wanted.slot, wanted.generation, False, repr(error))
        self._loop.call_soon_threadsafe(tell, verdict)
