"""What carries bytes for a bus: NATS, or memory."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from kvtide.bus.delivery import Deliver

Unlisten = Callable[[], Awaitable[None]]
"""Ends an interest; nothing is delivered after it returns."""


@dataclass(frozen=True, slots=True)
class LinkEvents:
    """What a link tells its bus, in the loop."""

    disconnected: Callable[[], None]
    reconnected: Callable[[], None]


class Link(Protocol):
    """One connection that comes back by itself."""

    @property
    def connected(self) -> bool:
        """Whether bytes sent now would leave."""
        ...

    @property
    def max_payload_bytes(self) -> int:
        """The largest message that the server takes."""
        ...

    def start(self, events: LinkEvents) -> None:
        """Tell these from now on; called once."""
        ...

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        """Send at most once.

        Raises:
            Disconnected: there is no connection; nothing was kept.
        """
        ...

    async def listen(
        self, subject: str, deliver: Deliver, on_dropped: Callable[[int], None]
    ) -> Unlisten:
        """Deliver what comes on ``subject``, from now on and after each reconnect.

        ``on_dropped`` hears of messages that the link itself had no room for.
        """
        ...

    async def close(self) -> None:
        """Send what is on its way, then end. Idempotent."""
        ...
