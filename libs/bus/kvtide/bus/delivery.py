"""What a link hands up, and the bounded box it waits in."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Delivery:
    """Bytes that arrived. ``reply`` is where an answer goes, "" if none is wanted.

    ``no_responder`` stands for the server's word that nobody listens.
    """

    subject: str
    data: bytes
    reply: str = ""
    no_responder: bool = False


Deliver = Callable[[Delivery], None]
"""Takes a delivery at once, without blocking; called in the loop."""

Work = Callable[[Delivery], Awaitable[None]]


class Mailbox:
    """Deliveries of one subscription, bounded by count and by bytes, in order."""

    def __init__(
        self,
        *,
        limit: int,
        limit_bytes: int,
        on_full: Callable[[int], None],
    ) -> None:
        """Start empty. ``on_full`` hears of each delivery that found no room."""
        if limit < 1:
            message = f"a subscription needs room for one message, not {limit}"
            raise ValueError(message)
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._on_full = on_full
        self._waiting: deque[Delivery] = deque()
        self._bytes = 0
        self._arrived = asyncio.Event()
        self.lost = 0

    def __len__(self) -> int:
        """Deliveries that wait."""
        return len(self._waiting)

    def offer(self, delivery: Delivery) -> None:
        """Keep it, or count it as lost."""
        size = len(delivery.data)
        full = len(self._waiting) >= self._limit
        # one delivery always fits, however large: the server bounds it
        too_much = self._bytes + size > self._limit_bytes and len(self._waiting) > 0
        if full or too_much:
            self.drop(1)
            return
        self._waiting.append(delivery)
        self._bytes += size
        self._arrived.set()

    def drop(self, count: int) -> None:
        """Say that deliveries were lost before they came here."""
        self.lost += count
        self._on_full(count)

    async def run(self, work: Work) -> None:
        """Give each delivery to ``work``, one at a time, for ever."""
        while True:
            while self._waiting:
                delivery = self._waiting.popleft()
                self._bytes -= len(delivery.data)
                await work(delivery)
            self._arrived.clear()
            await self._arrived.wait()
