"""One interest of a bus: a mailbox, its runner, and the link's word."""

import asyncio
import contextlib
from typing import Protocol

from kvtide.bus.delivery import Delivery, Mailbox
from kvtide.bus.interface import Handler, Lost
from kvtide.bus.link import Link, Unlisten
from kvtide.runtime import TaskScope


class SubscriptionOwner(Protocol):
    """What a subscription needs of its bus."""

    @property
    def waiting_bytes(self) -> int:
        """How much may wait for one subscription."""
        ...

    async def handle(self, handler: Handler, delivery: Delivery) -> None:
        """Open, fence, handle, reply."""
        ...

    def forget(self, subscription: "LinkedSubscription") -> None:
        """It is closed."""
        ...

    def slow(self, subscription: "LinkedSubscription", count: int) -> None:
        """It had no room for ``count`` messages."""
        ...


class LinkedSubscription:
    """See ``Subscription``. Made by a bus."""

    def __init__(
        self,
        owner: "SubscriptionOwner",
        subject: str,
        handler: Handler,
        limit: int,
        on_lost: Lost | None,
    ) -> None:
        """Made by ``LinkedBus.subscribe``."""
        self._owner = owner
        self._subject = subject
        self._handler = handler
        self._on_lost = on_lost
        self._mailbox = Mailbox(
            limit=limit, limit_bytes=owner.waiting_bytes, on_full=self._full
        )
        self._unlisten: Unlisten | None = None
        self._runner: asyncio.Task[None] | None = None

    @property
    def subject(self) -> str:
        """See ``Subscription.subject``."""
        return self._subject

    @property
    def lost(self) -> int:
        """See ``Subscription.lost``."""
        return self._mailbox.lost

    @property
    def waiting(self) -> int:
        """See ``Subscription.waiting``."""
        return len(self._mailbox)

    async def open(self, link: Link, tasks: TaskScope) -> None:
        """Begin; called by the bus."""
        self._runner = tasks.spawn(
            self._mailbox.run(self._work), name=f"bus {self._subject}"
        )
        self._unlisten = await link.listen(
            self._subject, self._mailbox.offer, self._mailbox.drop
        )

    async def close(self) -> None:
        """See ``Subscription.close``."""
        self._owner.forget(self)
        unlisten, self._unlisten = self._unlisten, None
        runner, self._runner = self._runner, None
        if unlisten is not None:
            await unlisten()
        if runner is not None and runner is not asyncio.current_task():
            runner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({runner})

    def resync(self) -> None:
        """The connection was away: say that anything may be missing."""
        if self._on_lost is not None:
            self._on_lost(0)

    async def _work(self, delivery: Delivery) -> None:
        await self._owner.handle(self._handler, delivery)

    def _full(self, count: int) -> None:
        self._owner.slow(self, count)
        if self._on_lost is not None:
            self._on_lost(count)
