"""Verifies slots in threads of its own, so that hashing never holds up the loop."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import structlog
from prometheus_client import Histogram

from kvtide.runtime import Clock
from kvtide.store.events import Verified, Verify
from kvtide.store.verify import verify_slot

log = structlog.get_logger("kvtide.store")


class Verifier:
    """Work in progress is bounded by the slots of the arena: one check for each.

    What comes together is checked together: a thread that is woken, and a loop, cost as
    much as hashing a good part of a block.
    """

    def __init__(
        self, arena: memoryview, clock: Clock, threads: int, seconds: Histogram
    ) -> None:
        """``seconds`` observes how long each check took."""
        self._arena = arena
        self._clock = clock
        self._seconds = seconds
        self._count = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="store-verify")
        self._loop = asyncio.get_running_loop()

    def submit(
        self, wanted: Sequence[Verify], tell: Callable[[Sequence[Verified]], None]
    ) -> None:
        """Have ``tell`` called in the loop with the verdicts, once for each thread."""
        share = -(-len(wanted) // self._count)
        for at in range(0, len(wanted), share):
            batch = wanted[at : at + share]
            checked = self._threads.submit(self._check_all, batch)
            checked.add_done_callback(partial(self._checked, tell))

    async def close(self) -> None:
        """Drop what waits, and wait for what runs."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def _check_all(self, wanted: Sequence[Verify]) -> list[Verified]:
        return list(map(self._check, wanted))

    def _check(self, wanted: Verify) -> Verified:
        started_s = self._clock.monotonic()
        try:
            verdict = verify_slot(self._arena, wanted)
        except Exception as error:
            log.exception("verification_failed")
            verdict = Verified(wanted.slot, wanted.generation, False, repr(error))
        self._seconds.observe(self._clock.monotonic() - started_s)
        return verdict

    def _checked(
        self,
        tell: Callable[[Sequence[Verified]], None],
        done: Future[list[Verified]],
    ) -> None:
        if not done.cancelled() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(tell, done.result())
