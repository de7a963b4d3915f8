"""A bus in virtual time: the wire's own bytes over a network that loses and delays."""

from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from kvtide.bus import (
    Codec,
    Disconnected,
    Handler,
    Identity,
    Incoming,
    Later,
    Lost,
    NoResponder,
    Subjects,
    WireError,
)
from kvtide.bus.beater import Beater
from kvtide.bus.codec import Opened
from kvtide.bus.core import Fence
from kvtide.bus.errors import BusTimeout
from kvtide.bus.messages import AnyMessage, Failure, Message
from kvtide.bus.network import Network, Packet
from kvtide.bus.subjects import matches
from kvtide.bus.trace import trace_of
from kvtide.kv import NodeId
from kvtide.sim.beater import SimBeater
from kvtide.sim.kernel import Kernel, Life, Promise

_NOBODY_S = 0.001
_FOUND_LIMIT = 10_000


@dataclass(slots=True)
class _Parcel:
    """Bytes on their way. All who get them read them once: messages never change."""

    subject: str
    data: bytes
    reply: str
    read: Opened | None = None

    def open(self, codec: Codec) -> Opened:
        """What is in it.

        Raises:
            WireError: nothing of ours.
        """
        if self.read is None:
            self.read = codec.open(self.data)
        return self.read


class SimNet:
    """Where all buses of a simulation meet."""

    def __init__(self, kernel: Kernel, network: Network) -> None:
        """Nobody listens yet."""
        self.kernel = kernel
        self.network = network
        self.sent = 0
        self._exact: dict[str, list[SimSubscription]] = {}
        self._wild: list[SimSubscription] = []
        self._found: dict[str, list[SimSubscription]] = {}

    def add(self, subscription: "SimSubscription") -> None:
        """Listen from now on."""
        self._found.clear()
        if "*" in subscription.subject:
            self._wild.append(subscription)
        else:
            self._exact.setdefault(subscription.subject, []).append(subscription)

    def remove(self, subscription: "SimSubscription") -> None:
        """Listen no more."""
        self._found.clear()
        if subscription in self._wild:
            self._wild.remove(subscription)
        listening = self._exact.get(subscription.subject, [])
        if subscription in listening:
            listening.remove(subscription)

    def forget(self, life: Life) -> None:
        """A process is dead: the server has dropped its connection."""
        self._found.clear()
        self._wild = [x for x in self._wild if x.life is not life]
        for subject, listening in self._exact.items():
            self._exact[subject] = [x for x in listening if x.life is not life]

    def send(self, source: NodeId, parcel: _Parcel) -> bool:
        """Carry it to all who listen; whether anybody does."""
        self.sent += 1
        subject = parcel.subject
        listening = self._found.get(subject)
        if listening is None:
            listening = [x for x in self._wild if matches(x.subject, subject)]
            listening += self._exact.get(subject, [])
            # replies go to subjects that never come again
            if len(self._found) < _FOUND_LIMIT:
                self._found[subject] = listening
        for subscription in listening:
            self._carry(source, subscription, parcel)
        return bool(listening)

    def _carry(
        self, source: NodeId, subscription: "SimSubscription", parcel: _Parcel
    ) -> None:
        target = subscription.bus.node
        packet = Packet(source, target, parcel.subject, len(parcel.data))
        for delay_s in self.network.plan(packet, self.kernel.now_s):
            self.kernel.at(
                delay_s, lambda: subscription.arrived(parcel), subscription.life
            )


class SimSubscription:
    """See ``kvtide.bus.Subscription``; never full."""

    def __init__(self, bus: "SimBus", subject: str, handler: Handler) -> None:
        """Made by ``SimBus.subscribe``."""
        self.bus = bus
        self.life = bus.life
        self.lost = 0
        self._subject = subject
        self._handler = handler
        self._waiting: deque[_Parcel] = deque()
        self._running = False
        self._closed = False

    @property
    def subject(self) -> str:
        """See ``Subscription.subject``."""
        return self._subject

    @property
    def waiting(self) -> int:
        """See ``Subscription.waiting``."""
        return len(self._waiting)

    async def close(self) -> None:
        """See ``Subscription.close``."""
        self._closed = True
        self.bus.net.remove(self)

    def arrived(self, parcel: _Parcel) -> None:
        """A parcel is here: handle it after those before it."""
        if self._closed:
            return
        self._waiting.append(parcel)
        if not self._running:
            self._running = True
            self.bus.kernel.spawn(self._run(), self.life)

    async def _run(self) -> None:
        while self._waiting and not self._closed:
            await self.bus.handle(self._handler, self._waiting.popleft())
        self._running = False


@dataclass(eq=False)
class SimBus:
    """See ``kvtide.bus.Bus``; one connection of one life of a process."""

    net: SimNet
    identity: Identity
    life: Life
    subjects: Subjects = field(default_factory=lambda: Subjects("sim"))

    def __post_init__(self) -> None:
        """Listen for replies."""
        self.kernel = self.net.kernel
        self.codec = Codec()
        self._fence: Fence | None = None
        self._asked = 0
        self._replies: dict[str, Promise[AnyMessage]] = {}
        # a dead life's late replies must not reach the next one
        epoch = self.identity.current.epoch
        self._inbox = f"{epoch}"
        pattern = self.subjects.replies(self.node, self._inbox)
        self.net.add(SimSubscription(self, pattern, self._replied))

    @property
    def node(self) -> NodeId:
        """Whose it is."""
        return self.identity.current.node

    @property
    def connected(self) -> bool:
        """See ``Bus.connected``."""
        return True

    def fence(self, fence: Fence) -> None:
        """See ``NodeBus.fence``."""
        self._fence = fence

    def beater(self) -> Beater:
        """See ``NodeBus.beater``."""
        return SimBeater(self.kernel, self.life, self)

    async def publish(self, subject: str, message: Message) -> None:
        """See ``Bus.publish``."""
        self._send(subject, message, trace_of(message), "")

    async def request(
        self, subject: str, message: Message, *, timeout_s: float
    ) -> AnyMessage:
        """See ``Bus.request``."""
        self._asked += 1
        reply = self.subjects.reply(self.node, self._inbox, self._asked)
        promise: Promise[AnyMessage] = Promise(self.kernel)
        self._replies[reply] = promise
        if not self._send(subject, message, trace_of(message), reply):
            nobody = NoResponder(f"nobody listens on {subject}", subject=subject)
            self.kernel.at(_NOBODY_S, lambda: promise.fail(nobody), self.life)
        late = BusTimeout("no reply", subject=subject, timeout_s=timeout_s)
        self.kernel.at(timeout_s, lambda: promise.fail(late), self.life)
        try:
            return await promise
        finally:
            self._replies.pop(reply, None)

    async def subscribe(
        self,
        subject: str,
        handler: Handler,
        *,
        limit: int = 4096,
        on_lost: Lost | None = None,
    ) -> SimSubscription:
        """See ``Bus.subscribe``."""
        del limit, on_lost
        subscription = SimSubscription(self, subject, handler)
        self.net.add(subscription)
        return subscription

    def _send(self, subject: str, message: Message, trace: str, reply: str) -> bool:
        if not self.life.alive:
            raise Disconnected("a dead process sends nothing")
        body = self.codec.encode_body(message)
        data = self.codec.wrap(self.identity.current, trace, body)
        return self.net.send(self.node, _Parcel(subject, data, reply))

    async def handle(self, handler: Handler, parcel: _Parcel) -> None:
        """Open, fence, handle, reply; called by a subscription, in order."""
        try:
            opened = parcel.open(self.codec)
        except WireError as error:
            self.kernel.failures.append(error)
            return
        if self._fence is not None and not self._fence(opened.sender):
            return
        incoming = Incoming(
            message=opened.body,  # pyright: ignore[reportArgumentType]
            sender=opened.sender,
            trace=opened.trace,
            wants_reply=parcel.reply != "",
            subject=parcel.subject,
        )
        try:
            answer = await handler(incoming)
        except Exception as error:  # noqa: BLE001 - the checker reports it
            self.kernel.failures.append(error)
            answer = Failure(code="internal", reason=repr(error))
        if isinstance(answer, Later):
            self.kernel.spawn(
                self._answer_later(answer.work, incoming, parcel), self.life
            )
        elif answer is not None and parcel.reply:
            self._send(parcel.reply, answer, incoming.trace, "")

    async def _answer_later(
        self,
        work: Coroutine[Any, Any, Message | None],
        incoming: Incoming,
        parcel: _Parcel,
    ) -> None:
        answer = await work
        if answer is not None and parcel.reply:
            self._send(parcel.reply, answer, incoming.trace, "")

    async def _replied(self, incoming: Incoming) -> None:
        promise = self._replies.get(incoming.subject)
        if promise is not None:
            promise.set(incoming.message)
