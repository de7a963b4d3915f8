"""What a link hands up, what it is once it was read, and the bounded box it waits in."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvtide.bus.codec import BlobRef, Opened
from kvtide.kv import NodeId


@dataclass(frozen=True, slots=True)
class Delivery:
    """Bytes that arrived. ``reply`` is where an answer goes, "" if none is wanted.

    ``no_responder`` stands for the server's word that nobody listens.
    """

    subject: str
    data: bytes
    reply: str = ""
    no_responder: bool = False


@dataclass(frozen=True, slots=True)
class Arrived:
    """A delivery whose envelope could be read."""

    delivery: Delivery
    opened: Opened

    @property
    def sender(self) -> NodeId:
        """The node that sent it."""
        return self.opened.sender.node

    @property
    def is_whole(self) -> bool:
        """Whether its body is here: nothing has to be fetched."""
        return not isinstance(self.opened.body, BlobRef)


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
        self._held = 0
        self._held_bytes = 0
        self._bytes = 0
        self._arrived = asyncio.Event()
        self.lost = 0

    def __len__(self) -> int:
        """Deliveries that wait, those that are held included."""
        return len(self._waiting) + self._held

    def offer(self, delivery: Delivery) -> None:
        """Keep it, or count it as lost."""
        size = len(delivery.data)
        full = len(self) >= self._limit
        # one delivery always fits, however large: the server bounds it
        too_much = self._bytes + size > self._limit_bytes and len(self) > 0
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

    def hold(self, delivery: Delivery) -> bool:
        """Count one that ``work`` got as waiting until ``release``; false: no room.

        Half of the room stays for others.
        """
        size = len(delivery.data)
        full = self._held >= max(1, self._limit // 2)
        too_much = self._held_bytes + size > self._limit_bytes // 2 and self._held > 0
        if full or too_much:
            self.drop(1)
            return False
        self._held += 1
        self._held_bytes += size
        self._bytes += size
        return True

    def release(self, delivery: Delivery) -> None:
        """It waits no longer."""
        self._held -= 1
        self._held_bytes -= len(delivery.data)
        self._bytes -= len(delivery.data)

    async def run(self, work: Work) -> None:
        """Give each delivery to ``work``, one at a time, for ever."""
        while True:
            while self._waiting:
                delivery = self._waiting.popleft()
                self._bytes -= len(delivery.data)
                await work(delivery)
            self._arrived.clear()
            await self._arrived.wait()
