"""Sends messages in the order in which they were decided, without making anybody wait."""

import asyncio
from typing import Protocol

import structlog

from kvtide.bus.errors import BusError
from kvtide.bus.messages import Message
from kvtide.runtime import LimitError
from kvtide.runtime.tracing import TRACE

log = structlog.get_logger("kvtide.bus.outbox")


class Publisher(Protocol):
    """What an outbox needs of a bus."""

    async def publish(self, subject: str, message: Message) -> None:
        """As ``Bus.publish``."""
        ...


class Outbox:
    """A bounded line of messages before a bus.

    What finds the line full, or the bus disconnected, is dropped and counted: as
    everything that is published, it must have an owner who repeats or pulls it.
    """

    def __init__(self, bus: Publisher, *, limit: int = 8192) -> None:
        """``run`` sends what ``post`` puts in line."""
        self._bus = bus
        self._line: asyncio.Queue[tuple[str, Message, str]] = asyncio.Queue(limit)
        self.lost = 0

    def post(self, subject: str, message: Message, trace: str = "") -> None:
        """Put it in line, as part of ``trace``; in the loop."""
        try:
            self._line.put_nowait((subject, message, trace))
        except asyncio.QueueFull:
            self._lose(subject, "the line is full")

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            subject, message, trace = await self._line.get()
            TRACE.set(trace)
            try:
                await self._bus.publish(subject, message)
            except (BusError, LimitError) as error:
                self._lose(subject, str(error))
            finally:
                self._line.task_done()

    async def flushed(self, *, timeout_s: float) -> bool:
        """Wait until the line is empty; whether it is."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._line.join()
        except TimeoutError:
            return False
        return True

    def _lose(self, subject: str, reason: str) -> None:
        self.lost += 1
        log.warning("message not sent", subject=subject, reason=reason, lost=self.lost)
