"""A bus in one process: for tests, simulation, and all roles under one roof."""

from collections.abc import Callable
from dataclasses import dataclass

from kvtide.bus.beater import TaskBeater
from kvtide.bus.core import LinkedBus
from kvtide.bus.delivery import Deliver, Delivery
from kvtide.bus.errors import BusClosed, Disconnected
from kvtide.bus.identity import Identity
from kvtide.bus.limits import BusLimits
from kvtide.bus.link import LinkEvents, Unlisten
from kvtide.bus.metrics import BusMetrics
from kvtide.bus.network import Network, Packet, PerfectNetwork
from kvtide.bus.subjects import Subjects, matches
from kvtide.kv import NodeId
from kvtide.runtime import Clock, TaskScope
from kvtide.transfer import TransferEndpoint

MAX_PAYLOAD_BYTES = 1024 * 1024


@dataclass(eq=False, slots=True)
class _Interest:
    """One link's wish to hear of a subject."""

    link: "MemoryLink"
    pattern: str
    deliver: Deliver


class MemoryHub:
    """Where memory links meet; what the server is for NATS.

    ``network`` decides what becomes of each packet; ``clock`` is what delays run on.
    Close it after its buses.
    """

    def __init__(self, clock: Clock, network: Network | None = None) -> None:
        """Start with nobody."""
        self.clock = clock
        self.network: Network = network or PerfectNetwork()
        self._interests: list[_Interest] = []
        self._links: list[MemoryLink] = []
        self._tasks = TaskScope()

    def link(self, node: NodeId) -> "MemoryLink":
        """A new connection of ``node``."""
        link = MemoryLink(self, node)
        self._links.append(link)
        return link

    def disconnect(self, node: NodeId) -> None:
        """Break the node's connections until ``reconnect``."""
        for link in self._of(node):
            link.set_connected(False)

    def reconnect(self, node: NodeId) -> None:
        """Let the node's connections come back."""
        for link in self._of(node):
            link.set_connected(True)

    async def close(self) -> None:
        """Forget everybody and all packets on their way."""
        self._interests.clear()
        self._links.clear()
        await self._tasks.close()

    # ---- the links' side

    def route(self, source: NodeId, delivery: Delivery) -> int:
        """Send to all who listen; how many did."""
        found = [i for i in self._interests if matches(i.pattern, delivery.subject)]
        for interest in found:
            self._carry(source, interest, delivery)
        return len(found)

    def add(self, interest: _Interest) -> None:
        """Listen from now on."""
        self._interests.append(interest)

    def remove(self, interest: _Interest) -> None:
        """Listen no more."""
        if interest in self._interests:
            self._interests.remove(interest)

    def drop(self, link: "MemoryLink") -> None:
        """The link is closed."""
        self._interests = [i for i in self._interests if i.link is not link]
        if link in self._links:
            self._links.remove(link)

    def _of(self, node: NodeId) -> list["MemoryLink"]:
        return [link for link in self._links if link.node == node]

    def _carry(self, source: NodeId, interest: _Interest, delivery: Delivery) -> None:
        packet = Packet(
            source, interest.link.node, delivery.subject, len(delivery.data)
        )
        for delay_s in self.network.plan(packet, self.clock.monotonic()):
            if delay_s <= 0:
                self._arrive(interest, delivery)
            else:
                self._tasks.spawn(
                    self._arrive_later(interest, delivery, delay_s), name="packet"
                )

    async def _arrive_later(
        self, interest: _Interest, delivery: Delivery, delay_s: float
    ) -> None:
        await self.clock.sleep(delay_s)
        self._arrive(interest, delivery)

    def _arrive(self, interest: _Interest, delivery: Delivery) -> None:
        if interest.link.connected and interest in self._interests:
            interest.deliver(delivery)


class MemoryLink:
    """See ``Link``. Made by a hub."""

    def __init__(self, hub: MemoryHub, node: NodeId) -> None:
        """Made by ``MemoryHub.link``."""
        self.node = node
        self._hub = hub
        self._events: LinkEvents | None = None
        self._connected = True
        self._closed = False

    @property
    def connected(self) -> bool:
        """See ``Link.connected``."""
        return self._connected and not self._closed

    @property
    def max_payload_bytes(self) -> int:
        """See ``Link.max_payload_bytes``."""
        return MAX_PAYLOAD_BYTES

    def start(self, events: LinkEvents) -> None:
        """See ``Link.start``."""
        self._events = events

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        """See ``Link.send``."""
        if self._closed:
            raise BusClosed("the bus was closed")
        if not self._connected:
            raise Disconnected("the node is cut off from the hub")
        heard = self._hub.route(self.node, Delivery(subject, data, reply))
        if not heard and reply:
            nobody = Delivery(reply, b"", no_responder=True)
            self._hub.route(self.node, nobody)

    async def listen(
        self, subject: str, deliver: Deliver, on_dropped: Callable[[int], None]
    ) -> Unlisten:
        """See ``Link.listen``; memory has room for all."""
        del on_dropped
        interest = _Interest(self, subject, deliver)
        self._hub.add(interest)

        async def unlisten() -> None:
            self._hub.remove(interest)

        return unlisten

    async def close(self) -> None:
        """See ``Link.close``."""
        self._closed = True
        self._hub.drop(self)

    def set_connected(self, connected: bool) -> None:
        """Called by the hub."""
        if connected == self._connected:
            return
        self._connected = connected
        if self._events is None:
            return
        if connected:
            self._events.reconnected()
        else:
            self._events.disconnected()


class MemoryBus(LinkedBus):
    """A bus on a ``MemoryHub``."""

    def __init__(
        self,
        hub: MemoryHub,
        identity: Identity,
        *,
        cluster: str = "local",
        endpoint: TransferEndpoint | None = None,
        limits: BusLimits | None = None,
        metrics: BusMetrics | None = None,
    ) -> None:
        """Connect to ``hub`` as ``identity``."""
        self._hub = hub
        super().__init__(
            hub.link(identity.current.node),
            Subjects(cluster),
            identity,
            hub.clock,
            endpoint=endpoint,
            limits=limits,
            metrics=metrics,
        )

    def beater(self) -> TaskBeater:
        """See ``LinkedBus.beater``: a task of this loop."""
        return TaskBeater(self._hub.link(self._identity.current.node))
