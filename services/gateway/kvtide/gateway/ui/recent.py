"""An answer that is kept for a moment, so that many pages cost what one does."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from kvtide.runtime import Clock

Answer = TypeVar("Answer")


class Recent(Generic[Answer]):
    """Answers by question; each is asked for once in ``keep_s``, one at a time."""

    def __init__(self, clock: Clock, *, keep_s: float, most: int = 8) -> None:
        """Of more than ``most`` questions the oldest answers are forgotten."""
        self._clock, self._keep_s, self._most = clock, keep_s, most
        self._kept: dict[object, tuple[float, Answer]] = {}
        self._asking = asyncio.Lock()

    async def get(
        self, question: object, ask: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """The answer, at most ``keep_s`` old; raises what ``ask`` raises."""
        async with self._asking:
            kept = self._kept.get(question)
            now_s = self._clock.monotonic()
            if kept is not None and now_s - kept[0] < self._keep_s:
                return kept[1]
            answer = await ask()
            self._kept.pop(question, None)
            self._kept[question] = (now_s, answer)
            while len(self._kept) > self._most:
                del self._kept[next(iter(self._kept))]
            return answer
