"""Has the arena give memory back while the host needs it, and take it again after."""

import asyncio
from collections.abc import Callable

import structlog

from kvtide.runtime import Clock
from kvtide.store.host import HostRules, arena_limit
from kvtide.store.host_reading import HostMemory

log = structlog.get_logger("kvtide.store")


class HostWatch:
    """Reads the host's memory every ``every_s`` seconds, for as long as it runs."""

    def __init__(
        self, clock: Clock, memory: HostMemory, rules: HostRules, *, every_s: float
    ) -> None:
        """Nothing is read before ``run``."""
        self._clock = clock
        self._memory = memory
        self._rules = rules
        self._every_s = every_s

    async def run(
        self,
        arena_bytes: int,
        backed_bytes: Callable[[], int],
        limit: Callable[[int], None],
    ) -> None:
        """Say ``limit`` how much memory the arena may have, while that is news.

        ``backed_bytes`` is how much it has. Ends by being cancelled.
        """
        said, short = arena_bytes, False
        while True:
            reading = await asyncio.to_thread(self._memory.read)
            backed = backed_bytes()
            wanted = arena_limit(
                self._rules, reading, backed_bytes=backed, arena_bytes=arena_bytes
            )
            if wanted != said or wanted < backed:
                limit(wanted)
                said = wanted
            if (wanted < backed) is not short:
                short = wanted < backed
                log.info(
                    "arena_gives_back" if short else "arena_grows_again",
                    backed_bytes=backed,
                    available_bytes=reading.available_bytes,
                    pressure_percent=reading.pressure_percent,
                )
            await self._clock.sleep(self._every_s)
