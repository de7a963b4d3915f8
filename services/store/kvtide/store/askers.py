"""Who waits for an answer of the store's machine, by token. For one event loop."""

import asyncio
from collections.abc import Callable
from itertools import count

from kvtide.bus import Later
from kvtide.bus.messages import Failure, Message

MAX_ASKERS = 4096


class Askers:
    """See the module; bounded."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._tokens = count()

    def ask(self, tell: Callable[[int], None]) -> Message | Later:
        """Have the machine told with a token; most answers are there at once."""
        if len(self._waiting) >= MAX_ASKERS:
            return Failure(code="busy", reason="too many wait for an answer")
        token = next(self._tokens)
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[token] = answer
        tell(token)
        return answer.result() if answer.done() else Later(_answered(answer))

    def answer(self, token: int, message: Message) -> None:
        """The machine's answer; nothing if nobody waits for it any more."""
        answer = self._waiting.pop(token, None)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def drop(self) -> None:
        """No answer comes any more: the store's life is over."""
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer.cancel()


async def _answered(answer: asyncio.Future[Message]) -> Message | None:
    try:
        return await answer
    except asyncio.CancelledError:
        if answer.cancelled():
            # the store's life ended before it could answer
            return None
        raise
