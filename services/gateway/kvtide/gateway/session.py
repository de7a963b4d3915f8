"""One request's life, driven by events, and its answer for whoever streams it."""

import asyncio
from collections import deque
from collections.abc import Callable

from kvtide.bus.messages import RequestEnded
from kvtide.gateway.courier import Courier
from kvtide.gateway.life import (
    AnswerCommand,
    Began,
    ClientGone,
    Emit,
    Event,
    Fail,
    Finish,
    Life,
    RecordEnded,
    Tick,
)
from kvtide.kv import RequestId
from kvtide.runtime.tracing import TRACE, recorded


class AnswerChannel:
    """Where the answers to one client's request come together, in order.

    For one reader in one loop. What waits is bounded by the answers' own lengths.
    """

    def __init__(self) -> None:
        """Empty."""
        self._waiting: deque[tuple[int, AnswerCommand]] = deque()
        self._more = asyncio.Event()

    def put(self, choice: int, command: AnswerCommand) -> None:
        """Add a piece of one of the answers."""
        self._waiting.append((choice, command))
        self._more.set()

    async def take(self, timeout_s: float) -> list[tuple[int, AnswerCommand]]:
        """All that waits, each with its answer's number; none after ``timeout_s``."""
        if not self._waiting:
            self._more.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._more.wait()
            except TimeoutError:
                return []
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting


class Session:
    """The asyncio face of a ``Life``. Lives in one loop.

    What the life answers goes to ``on_answer``, ending with one ``Finish`` or ``Fail``.
    ``wake_s`` is when it next wants a ``Tick``.
    """

    def __init__(
        self,
        life: Life,
        courier: Courier,
        now_s: Callable[[], float],
        on_answer: Callable[[AnswerCommand], None],
        on_ended: Callable[[RequestEnded], None],
        on_told: Callable[[RequestId, Event], None],
    ) -> None:
        """Nothing is sent before ``tell(Submitted())``.

        All that is sent is part of the trace of the task that makes the session.
        ``on_told`` hears of what the life is told, before the life does.
        """
        self.life = life
        self.wake_s = float("inf")
        self._courier = courier
        self._now_s = now_s
        self._on_answer = on_answer
        self._on_ended = on_ended
        self._on_told = on_told
        self._trace = recorded(TRACE.get())

    @property
    def request(self) -> RequestId:
        """The request's name."""
        return self.life.spec.request

    def tell(self, event: Event) -> None:
        """Let the life decide, and do what it says."""
        if not isinstance(event, Tick):
            self._on_told(self.request, event)
        for command in self.life.handle(event, self._now_s()):
            if isinstance(command, Began | Emit | Finish | Fail):
                self._on_answer(command)
            elif isinstance(command, RecordEnded):
                self._courier.record(command.message)
                self._on_ended(command.message)
            else:
                self._courier.send(command, self.tell, self._trace)
        self.wake_s = self.life.wake_s

    def leave(self) -> None:
        """The client is gone, or has its answer: what still runs is cancelled."""
        if not self.life.answered:
            self.tell(ClientGone())
