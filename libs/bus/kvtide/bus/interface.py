"""The seam: what a bus does, whatever carries the messages.

Delivery is at most once. Whatever matters has an owner that repeats it, an expiry, or
a sequence number whose gap is repaired by a pull. Messages of one sender on one
subject arrive in order or not at all, except across a reconnect.
"""

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from kvtide.bus.messages import AnyMessage, Message
from kvtide.bus.subjects import Subjects
from kvtide.kv import NodeRef


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message that arrived, with what its envelope says.

    ``sender`` is the life of the node that sent it; senders older than what is known
    of their node were dropped before. ``trace`` follows a request through the system.
    ``wants_reply`` is true for a request: what the handler returns is the reply.
    """

    message: AnyMessage
    sender: NodeRef
    trace: str
    wants_reply: bool
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Later:
    """An answer that takes a while: the bus awaits ``work`` and sends what it returns.

    The next message is handled meanwhile. The bus owns the work and ends it when it
    closes. The handler must bound how many it starts.
    """

    work: Coroutine[Any, Any, Message | None]


Handler = Callable[[Incoming], Awaitable[Message | Later | None]]
"""Takes one message; a returned message is the reply to a request."""

Lost = Callable[[int], None]
"""Told how many messages were dropped; 0: an unknown number (a reconnect)."""


class Subscription(Protocol):
    """Interest in a subject, until closed."""

    @property
    def subject(self) -> str:
        """What it listens to."""
        ...

    @property
    def lost(self) -> int:
        """Messages dropped so far because this subscription was full."""
        ...

    @property
    def waiting(self) -> int:
        """Messages that arrived and are not handled yet."""
        ...

    async def close(self) -> None:
        """End it: no handler runs after this returns. Idempotent.

        A handler that is running is cancelled, unless it is the caller.
        """
        ...


class Bus(Protocol):
    """One process's connection to all others."""

    @property
    def subjects(self) -> Subjects:
        """The subjects of this bus's cluster."""
        ...

    @property
    def connected(self) -> bool:
        """Whether a message sent now would leave."""
        ...

    async def publish(self, subject: str, message: Message) -> None:
        """Send to whoever listens, at most once.

        Raises:
            Disconnected: there is no connection now; nothing is kept for later.
            LimitError: the message is larger than blobs may be, or the shelf of
                large bodies is full.
            BusClosed: the bus was closed.
        """
        ...

    async def request(
        self, subject: str, message: Message, *, timeout_s: float
    ) -> AnyMessage:
        """Send and wait for one reply. A ``Failure`` reply is returned, not raised.

        Raises:
            BusTimeout: no reply within ``timeout_s``, or one that can't be read.
            NoResponder: nobody listens there.
            Disconnected: the connection is gone, or went while waiting; the message
                may have been handled.
            LimitError, BusClosed: as for ``publish``.
        """
        ...

    async def subscribe(
        self,
        subject: str,
        handler: Handler,
        *,
        limit: int = 4096,
        on_lost: Lost | None = None,
    ) -> Subscription:
        """Have ``handler`` called for each message on ``subject``.

        Handlers of one subscription run in order, one at a time: keep them quick.
        While a large body is fetched, its sender's later messages wait behind it and
        those of others pass; at most half of the room is for such waiting. At
        most ``limit`` messages (and 64 MiB) wait for it; more are dropped, counted, and
        reported to ``on_lost`` in the loop. A handler that raises is logged and
        counted, the requester gets ``Failure(code="internal")``, the next message is
        handled. Lasts through reconnects; after one, ``on_lost(0)`` is called. When
        this returns the server knows of the interest, unless there is no connection
        now: then it will with the next one.

        Raises:
            BusClosed: the bus was closed.
        """
        ...
