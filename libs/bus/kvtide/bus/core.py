"""A bus over any link: envelopes, requests, ordered handlers, and what is dropped."""

import asyncio
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Self

import structlog

from kvtide.bus.beater import Beater
from kvtide.bus.blobs import BlobShelf, fetch
from kvtide.bus.codec import BlobRef, Codec, DropReason, Opened
from kvtide.bus.complaints import Complaints
from kvtide.bus.delivery import Arrived, Delivery
from kvtide.bus.errors import (
    BusClosed,
    BusError,
    BusTimeout,
    Disconnected,
    NoResponder,
    WireError,
)
from kvtide.bus.identity import Identity
from kvtide.bus.interface import Handler, Incoming, Later, Lost
from kvtide.bus.limits import BusLimits
from kvtide.bus.link import Link, LinkEvents
from kvtide.bus.messages import AnyMessage, Failure, Message
from kvtide.bus.metrics import BusMetrics
from kvtide.bus.subjects import Subjects
from kvtide.bus.subscription import LinkedSubscription
from kvtide.bus.trace import trace_of
from kvtide.kv import NodeRef
from kvtide.runtime import Clock, LimitError, TaskScope
from kvtide.runtime.tracing import NO_TRACES, TRACE, SpanKind, Tracer
from kvtide.transfer import TransferEndpoint

Fence = Callable[[NodeRef], bool]
"""Whether a sender's life is still the newest known of its node."""

_SLACK_BYTES = 1024
"""Room for the envelope around a body."""

log = structlog.get_logger("kvtide.bus")


class LinkedBus:
    """``Bus`` over a ``Link``. Use as an async context manager, in one loop.

    Without an ``endpoint`` large bodies can be neither sent nor received.
    """

    def __init__(
        self,
        link: Link,
        subjects: Subjects,
        identity: Identity,
        clock: Clock,
        *,
        endpoint: TransferEndpoint | None = None,
        limits: BusLimits | None = None,
        metrics: BusMetrics | None = None,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        """Nothing is sent before ``start``."""
        self._link = link
        self._subjects = subjects
        self._identity = identity
        self._clock = clock
        self._endpoint = endpoint
        self._limits = limits or BusLimits()
        self._metrics = metrics or BusMetrics()
        self._tracer = tracer
        self._codec = Codec()
        self._shelf = (
            BlobShelf(endpoint, clock, self._limits) if endpoint is not None else None
        )
        self._tasks = TaskScope(on_error=self._failed)
        self._subscriptions: set[LinkedSubscription] = set()
        self._replies: dict[int, asyncio.Future[Delivery]] = {}
        self._fetches = asyncio.Semaphore(self._limits.fetches)
        self._name = identity.current.node
        self._inbox = secrets.token_hex(8)
        self._asked = 0
        self._fence: Fence | None = None
        self._foreign: set[str] = set()
        self._complaints = Complaints()
        self._closed = False

    @property
    def subjects(self) -> Subjects:
        """See ``Bus.subjects``."""
        return self._subjects

    @property
    def connected(self) -> bool:
        """See ``Bus.connected``."""
        return self._link.connected and not self._closed

    @property
    def waiting_bytes(self) -> int:
        """How much may wait for one subscription."""
        return self._limits.waiting_bytes

    @property
    def metrics(self) -> BusMetrics:
        """What it counts."""
        return self._metrics

    def fence(self, fence: Fence) -> None:
        """Drop messages of senders that ``fence`` is false for, from now on."""
        self._fence = fence

    def beater(self) -> Beater:
        """Something that beats for a node on this bus, over a link of its own.

        Raises:
            NotImplementedError: this kind of bus has none by itself.
        """
        raise NotImplementedError

    async def start(self) -> None:
        """Listen for replies; called by ``async with``."""
        self._link.start(LinkEvents(self._disconnected, self._reconnected))
        await self._link.listen(
            self._subjects.replies(self._name, self._inbox),
            self._replied,
            self._reply_dropped,
        )
        if self._shelf is not None:
            self._tasks.spawn(self._sweep(self._shelf), name="bus blob sweep")

    async def close(self) -> None:
        """End all handlers, send what is on its way, and disconnect. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for subscription in list(self._subscriptions):
            await subscription.close()
        self._fail_requests(BusClosed("the bus was closed"))
        await self._link.close()
        await self._tasks.close()
        if self._shelf is not None:
            await self._shelf.clear()

    async def publish(self, subject: str, message: Message) -> None:
        """See ``Bus.publish``."""
        await self._send(subject, message, trace_of(message), "")

    async def request(
        self, subject: str, message: Message, *, timeout_s: float
    ) -> AnyMessage:
        """See ``Bus.request``."""
        with self._tracer.span(tag_of(message), kind=SpanKind.CLIENT) as span:
            reply = await self._request(subject, message, timeout_s)
            span.note(reply=tag_of(reply))
            return reply

    async def _request(
        self, subject: str, message: Message, timeout_s: float
    ) -> AnyMessage:
        if self._closed:
            raise BusClosed("the bus was closed")
        if len(self._replies) >= self._limits.pending_requests:
            raise LimitError(
                f"{len(self._replies)} requests wait for a reply",
                limit="pending_requests",
            )
        self._asked += 1
        number = self._asked
        future: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self._replies[number] = future
        timer = self._tasks.spawn(self._clock.sleep(timeout_s), name="bus request")
        blob: BlobRef | None = None
        try:
            reply = self._subjects.reply(self._name, self._inbox, number)
            blob = await self._send(subject, message, trace_of(message), reply)
            await asyncio.wait({future, timer}, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise self._unanswered(subject, message, timeout_s, "no reply")
            delivery = future.result()
        finally:
            timer.cancel()
            self._replies.pop(number, None)
            future.cancel()
            # without an answer in time nobody is to begin with it any more
            if blob is not None and self._shelf is not None:
                self._shelf.answered(blob)
        if delivery.no_responder:
            raise NoResponder(f"nobody listens on {subject}", subject=subject)
        opened = await self._open(delivery)
        if opened is None:
            raise self._unanswered(subject, message, timeout_s, "no readable reply")
        return opened.message

    async def subscribe(
        self,
        subject: str,
        handler: Handler,
        *,
        limit: int = 4096,
        on_lost: Lost | None = None,
    ) -> LinkedSubscription:
        """See ``Bus.subscribe``."""
        if self._closed:
            raise BusClosed("the bus was closed")
        subscription = LinkedSubscription(self, subject, handler, limit, on_lost)
        self._subscriptions.add(subscription)
        await subscription.open(self._link, self._tasks)
        return subscription

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        await self.close()

    # ---- sending

    async def _send(
        self, subject: str, message: Message, trace: str, reply: str
    ) -> BlobRef | None:
        """What was shelved for it, if it is too large to go inline."""
        if self._closed:
            raise BusClosed("the bus was closed")
        body = self._codec.encode_body(message)
        inline = min(
            self._limits.inline_bytes, self._link.max_payload_bytes - _SLACK_BYTES
        )
        blob: BlobRef | None = None
        if len(body) > inline:
            blob = await self._shelve(body, inline, asked=reply != "")
            body = self._codec.encode_body(blob)
        data = self._codec.wrap(self._identity.current, trace, body)
        await self._link.send(subject, data, reply)
        self._metrics.sent.labels(tag_of(message)).inc()
        return blob

    async def _shelve(self, body: bytes, inline: int, *, asked: bool) -> BlobRef:
        if self._shelf is None:
            raise LimitError(
                f"a message of {len(body)} bytes needs a transfer endpoint; without "
                f"one the limit is {inline}",
                limit="inline_bytes",
            )
        return await self._shelf.put(body, asked=asked)

    # ---- receiving

    async def handle(self, handler: Handler, incoming: Incoming, reply: str) -> None:
        """Handle and reply; called by a subscription, in order."""
        kind = tag_of(incoming.message)
        self._metrics.received.labels(kind).inc()
        token = TRACE.set(incoming.trace)
        tracer = self._tracer if reply else NO_TRACES
        try:
            with tracer.span(kind, kind=SpanKind.SERVER):
                answer = await handler(incoming)
        except Exception as error:  # noqa: BLE001 - a handler's bug ends no other's work
            answer = self._broken(kind, incoming, error)
        finally:
            TRACE.reset(token)
        if isinstance(answer, Later):
            work = self._answer_later(answer, kind, incoming, reply)
            self._tasks.spawn(work, name=f"bus reply {kind}")
        elif answer is not None and reply:
            await self._answer(reply, answer, incoming.trace)

    async def _answer_later(
        self, later: Later, kind: str, incoming: Incoming, reply: str
    ) -> None:
        TRACE.set(incoming.trace)
        try:
            with self._tracer.span(f"{kind} answer"):
                answer = await later.work
        except Exception as error:  # noqa: BLE001 - as above
            answer = self._broken(kind, incoming, error)
        if answer is not None and reply:
            await self._answer(reply, answer, incoming.trace)

    async def _answer(self, reply: str, answer: Message, trace: str) -> None:
        try:
            await self._send(reply, answer, trace, "")
        except (BusError, LimitError) as error:
            # whoever asked waits for a bounded time and asks again
            log.warning("reply not sent", type=tag_of(answer), error=str(error))

    def _broken(self, kind: str, incoming: Incoming, error: Exception) -> Failure:
        self._metrics.failed.labels(kind).inc()
        log.error(
            "handler failed",
            type=kind,
            sender=incoming.sender.node,
            request=incoming.trace,
            exc_info=error,
        )
        return Failure(code="internal", reason=f"{type(error).__name__}: {error}")

    async def _open(self, delivery: Delivery) -> Incoming | None:
        arrived = self.read(delivery)
        return await self.whole(arrived) if arrived is not None else None

    def read(self, delivery: Delivery) -> Arrived | None:
        """The envelope; None for one that is dropped and counted."""
        try:
            arrived = Arrived(delivery, self._codec.open(delivery.data))
        except WireError as error:
            self._refuse(error, delivery.subject)
            return None
        return None if self._is_stale(arrived) else arrived

    async def whole(self, arrived: Arrived) -> Incoming | None:
        """The message with its body, fetched if it must; None: dropped and counted."""
        delivery, opened = arrived.delivery, arrived.opened
        try:
            message = await self._body(opened)
        except WireError as error:
            self._refuse(error, delivery.subject)
            return None
        if not arrived.is_whole and self._is_stale(arrived):
            return None
        return Incoming(
            message=message,
            sender=opened.sender,
            trace=opened.trace,
            wants_reply=delivery.reply != "",
            subject=delivery.subject,
        )

    def _is_stale(self, arrived: Arrived) -> bool:
        if self._fence is None or self._fence(arrived.opened.sender):
            return False
        self._drop(DropReason.STALE)
        return True

    async def _body(self, opened: Opened) -> AnyMessage:
        if not isinstance(opened.body, BlobRef):
            return opened.body
        if self._endpoint is None:
            raise WireError(
                "a large body came, and there is no transfer endpoint to fetch it",
                reason=DropReason.BLOB,
                node=opened.sender.node,
            )
        async with self._fetches:
            data = await fetch(self._endpoint, opened.body, self._limits, self._clock)
        return self._codec.open_blob(data, opened.body)

    def _refuse(self, error: WireError, subject: str) -> None:
        self._drop(error.reason)
        if error.reason == DropReason.PROTOCOL:
            if error.node in self._foreign:
                return
            if len(self._foreign) < self._limits.shelf_count:
                self._foreign.add(error.node)
        unsaid = self._complaints.of(error.reason, self._clock.monotonic())
        if unsaid is not None:
            log.warning(
                "message dropped",
                reason=str(error.reason),
                sender=error.node,
                subject=subject,
                error=str(error),
                unsaid=unsaid,
            )

    def _drop(self, reason: str, count: int = 1) -> None:
        self._metrics.dropped.labels(str(reason)).inc(count)

    # ---- the link's events

    def _replied(self, delivery: Delivery) -> None:
        number = delivery.subject.rpartition(".")[2]
        future = self._replies.get(int(number)) if number.isdecimal() else None
        if future is not None and not future.done():
            future.set_result(delivery)

    def _reply_dropped(self, count: int) -> None:
        self._drop(DropReason.FULL, count)

    def _unanswered(
        self, subject: str, message: Message, timeout_s: float, what: str
    ) -> BusTimeout:
        kind = tag_of(message)
        self._metrics.unanswered.labels(kind).inc()
        text = f"{what} to {kind!r} on {subject} within {timeout_s:g} s"
        return BusTimeout(text, subject=subject, timeout_s=timeout_s)

    def _disconnected(self) -> None:
        self._metrics.disconnects.inc()
        self._fail_requests(Disconnected("the connection went while waiting"))

    def _reconnected(self) -> None:
        for subscription in list(self._subscriptions):
            subscription.resync()

    def _fail_requests(self, error: BusError) -> None:
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)

    async def _sweep(self, shelf: BlobShelf) -> None:
        while True:
            await self._clock.sleep(self._limits.blob_ttl_s / 4)
            await shelf.sweep()

    def _failed(self, error: BaseException) -> None:
        log.error("bus task failed", exc_info=error)

    def forget(self, subscription: LinkedSubscription) -> None:
        """The subscription is closed; called by itself."""
        self._subscriptions.discard(subscription)

    def slow(self, subscription: LinkedSubscription, count: int) -> None:
        """A subscription had no room; called by itself."""
        self._drop(DropReason.FULL, count)
        if subscription.lost == count:
            log.warning("slow consumer", subject=subscription.subject, lost=count)


def tag_of(message: Message) -> str:
    """What the message is called on the wire."""
    return str(message.__struct_config__.tag)
