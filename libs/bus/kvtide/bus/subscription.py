"""One interest of a bus: a mailbox, its runner, and the link's word.

Handlers run one at a time, and the messages of one sender in order. A body that must be
fetched takes as long as its sender lets it: later messages of that sender stand in line
behind it, those of others pass.
"""

import asyncio
import contextlib
from collections import deque
from typing import Protocol

from kvtide.bus.delivery import Arrived, Delivery, Mailbox
from kvtide.bus.interface import Handler, Incoming, Lost
from kvtide.bus.link import Link, Unlisten
from kvtide.kv import NodeId
from kvtide.runtime import TaskScope


class SubscriptionOwner(Protocol):
    """What a subscription needs of its bus."""

    @property
    def waiting_bytes(self) -> int:
        """How much may wait for one subscription."""
        ...

    def read(self, delivery: Delivery) -> Arrived | None:
        """The envelope; None: dropped."""
        ...

    async def whole(self, arrived: Arrived) -> Incoming | None:
        """The message with its body, fetched if it must; None: dropped."""
        ...

    async def handle(self, handler: Handler, incoming: Incoming, reply: str) -> None:
        """Handle, reply."""
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
        self._lines: dict[NodeId, deque[Delivery]] = {}
        self._line_runners: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._tasks: TaskScope | None = None
        self._closed = False

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
        self._tasks = tasks
        self._runner = tasks.spawn(
            self._mailbox.run(self._work), name=f"bus {self._subject}"
        )
        self._unlisten = await link.listen(
            self._subject, self._mailbox.offer, self._mailbox.drop
        )

    async def close(self) -> None:
        """See ``Subscription.close``."""
        self._closed = True
        self._owner.forget(self)
        unlisten, self._unlisten = self._unlisten, None
        runner, self._runner = self._runner, None
        if unlisten is not None:
            await unlisten()
        running = {*self._line_runners, *([runner] if runner is not None else [])}
        running -= {asyncio.current_task()}
        for task in running:
            task.cancel()
        if running:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(running)

    def resync(self) -> None:
        """The connection was away: say that anything may be missing."""
        if self._on_lost is not None:
            self._on_lost(0)

    async def _work(self, delivery: Delivery) -> None:
        arrived = None if self._closed else self._owner.read(delivery)
        if arrived is None:
            return
        line = self._lines.get(arrived.sender)
        if line is None and arrived.is_whole:
            await self._take(arrived)
        elif not self._mailbox.hold(delivery):
            return
        elif line is not None:
            line.append(delivery)
        else:
            self._begin_line(arrived.sender, delivery)

    def _begin_line(self, sender: NodeId, first: Delivery) -> None:
        if self._tasks is None:
            return
        self._lines[sender] = deque([first])
        work = self._run_line(sender, self._lines[sender])
        task = self._tasks.spawn(work, name=f"bus {self._subject} from {sender}")
        self._line_runners.add(task)
        task.add_done_callback(self._line_runners.discard)

    async def _run_line(self, sender: NodeId, line: deque[Delivery]) -> None:
        """Take what one sender sent, in order, until nothing of it is left."""
        try:
            while line and not self._closed:
                arrived = self._owner.read(line[0])
                if arrived is not None:
                    await self._take(arrived)
                self._mailbox.release(line.popleft())
        finally:
            for left in line:
                self._mailbox.release(left)
            del self._lines[sender]

    async def _take(self, arrived: Arrived) -> None:
        incoming = await self._owner.whole(arrived)
        if incoming is not None:
            await self._handle(incoming, arrived.delivery.reply)

    async def _handle(self, incoming: Incoming, reply: str) -> None:
        async with self._turn:
            if not self._closed:
                await self._owner.handle(self._handler, incoming, reply)

    def _full(self, count: int) -> None:
        self._owner.slow(self, count)
        if self._on_lost is not None:
            self._on_lost(count)
