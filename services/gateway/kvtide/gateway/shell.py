"""The gateway among the others: all open requests, ticks, owner lists. Decides nothing."""

from collections import defaultdict
from collections.abc import Callable

import structlog

from kvtide.bus import (
    BusError,
    Changed,
    Gone,
    Hop,
    Incoming,
    Joined,
    Node,
    Restarted,
    RosterEvent,
    Subscription,
)
from kvtide.bus.messages import (
    DecodeFailed,
    GatewayLoad,
    NodeState,
    Owned,
    PrefillDone,
    PrefillFailed,
    RequestEnded,
    Tokens,
)
from kvtide.gateway.courier import Courier
from kvtide.gateway.errors import (
    NameTakenError,
    RequestFailedError,
    UnavailableError,
)
from kvtide.gateway.life import (
    Aborted,
    AnswerCommand,
    Event,
    FailureKind,
    Life,
    LifeLimits,
    NodeGone,
    NodeJoined,
    Quarantine,
    RequestFailure,
    RequestSpec,
    Stage,
    Submitted,
    TextSink,
    Tick,
    WorkerSaid,
)
from kvtide.gateway.metrics import GatewayMetrics
from kvtide.gateway.observing import Observer
from kvtide.gateway.session import Session
from kvtide.kv import KeySpace, NodeId, NodeRef, RequestId, RequestRef, Role

TICK_S = 0.025
OWNED_S = 1.0
OWNED_AFTER = 5
"""Lists that a worker still gets after the last one that named something."""

log = structlog.get_logger("kvtide.gateway")

_ROLES = {Stage.PREFILL: Role.PREFILL, Stage.DECODE: Role.DECODE}


class Gateway:
    """Owns every open request of this process, on one node, in one loop."""

    def __init__(
        self,
        node: Node,
        limits: LifeLimits,
        metrics: GatewayMetrics,
        *,
        max_open_requests: int,
        max_open_picture_bytes: int = 1 << 29,
        quarantine_s: float = 600.0,
    ) -> None:
        """Nothing is heard before ``start``."""
        self._max_picture_bytes = max_open_picture_bytes
        self._picture_bytes = 0
        self._quarantine = Quarantine(quarantine_s)
        self.node = node
        self._limits = limits
        self._metrics = metrics
        self._max_open = max_open_requests
        self._courier = Courier(node, limits, self._owe_lists)
        self._sessions: dict[RequestId, Session] = {}
        self._owners: dict[tuple[Stage, NodeId], int] = {}
        self._owned_seq = 0
        self._open = 0
        self._draining = False
        self._inbox: Subscription | None = None
        self._observers: list[Observer] = []

    @property
    def open_requests(self) -> int:
        """Requests without their terminal answer."""
        return self._open

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the gateway ends."""
        return self._draining

    async def start(self) -> None:
        """Listen to workers and begin to tick."""
        self._inbox = await self.node.inbox(
            Role.GATEWAY, Hop.TOKENS, self._on_message, on_lost=self._on_lost
        )
        self.node.on_member(self._on_member)
        self.node.on_fenced(self._on_fenced)
        self.node.tasks.spawn(self._tick_all(), name="gateway ticks")
        self.node.tasks.spawn(self._tell_owners(), name="gateway owner lists")
        # nobody has asked yet: that is a load, and others would not know of any
        self._count(0)

    def observe(self, observer: Observer) -> None:
        """Have ``observer`` look on too, from now on."""
        self._observers.append(observer)

    def drain(self) -> None:
        """Take no new request; others hear it."""
        self._draining = True
        self.node.set_state(NodeState.DRAINING)

    async def close(self) -> None:
        """End what is open with an error, and wait a moment for cancels to arrive."""
        self.drain()
        self._tell_all(Aborted("the gateway is shutting down"))
        deadline_s = self._now_s() + self._limits.silence_s
        while self._sessions and self._now_s() < deadline_s:
            await self.node.clock.sleep(TICK_S)
        if self._inbox is not None:
            await self._inbox.close()

    def check_room(self, requests: int = 1) -> None:
        """Refuse at once what would be too much.

        Raises:
            UnavailableError: draining, or too many requests are open.
        """
        if self._draining:
            raise UnavailableError("the gateway is shutting down", retry_after_ms=1000)
        if self.open_requests + requests > self._max_open:
            raise UnavailableError(
                f"{self._max_open} requests are open, which is the limit",
                retry_after_ms=1000,
            )

    def submit(
        self,
        spec: RequestSpec,
        space: KeySpace,
        text: TextSink,
        on_answer: Callable[[AnswerCommand], None],
    ) -> Session:
        """Open a request; its answer comes to ``on_answer``, in the loop.

        The caller must call ``Session.leave`` when it stops listening.

        Raises:
            UnavailableError: see ``check_room``.
            NameTakenError: a request of this name is not over; it goes on as it was.
            RequestFailedError: such a request killed its workers not long ago.
        """
        self.check_room()
        self._check_pictures(spec)
        if self._quarantine.refuses(spec, self._now_s()):
            reason = "workers died with this prompt, so it is refused for a while"
            raise RequestFailedError(RequestFailure(FailureKind.QUARANTINED, reason))
        if spec.request in self._sessions:
            log.error("name taken", request=spec.request)
            raise NameTakenError(spec.request)
        life = Life(spec, space, text, self._limits)
        session = Session(
            life,
            self._courier,
            self._now_s,
            on_answer,
            self._on_ended,
            self._on_told,
        )
        for observer in self._observers:
            observer.arrived(spec, space)
        self._sessions[spec.request] = session
        self._picture_bytes += spec.picture_bytes
        self._count(1)
        session.tell(Submitted())
        return session

    def _check_pictures(self, spec: RequestSpec) -> None:
        """They are kept until the answer is there, for another worker may need them."""
        more = spec.picture_bytes
        if more and self._picture_bytes + more > self._max_picture_bytes:
            raise UnavailableError(
                f"pictures of open requests have {self._picture_bytes} bytes; the limit "
                f"is {self._max_picture_bytes}",
                retry_after_ms=1000,
            )

    # ---- what others say

    async def _on_message(self, incoming: Incoming) -> None:
        message = incoming.message
        if isinstance(message, Tokens | DecodeFailed | PrefillDone | PrefillFailed):
            session = self._sessions.get(message.request)
            if session is not None:
                session.tell(WorkerSaid(incoming.sender, message))

    def _on_lost(self, count: int) -> None:
        # what was lost is pulled by each life after its silence
        log.warning("token events lost", count=count)

    def _on_member(self, event: RosterEvent) -> None:
        match event:
            case Joined():
                self._tell_all(NodeJoined(event.member.ref))
            case Restarted():
                self._tell_all(NodeGone(event.before.ref))
                self._tell_all(NodeJoined(event.member.ref))
            case Gone():
                self._tell_all(NodeGone(event.member.ref))
            case Changed():
                if event.member.ready and not event.before.ready:
                    self._tell_all(NodeJoined(event.member.ref))

    def _on_fenced(self, ref: NodeRef) -> None:
        """Workers have freed what this process owned while it was paused."""
        log.warning("paused for too long", epoch=ref.epoch)
        self._owners.clear()
        self._tell_all(Aborted("the gateway was paused for too long"))
        self._count(0)  # the new life has said nothing of its load yet

    def _on_told(self, request: RequestId, event: Event) -> None:
        for observer in self._observers:
            observer.told(request, event)

    def _on_ended(self, record: RequestEnded) -> None:
        self._count(-1)
        self._metrics.ended(record)
        for observer in self._observers:
            observer.ended(record)
        session = self._sessions.get(record.request)
        if session is not None:
            self._picture_bytes -= session.life.spec.picture_bytes
            if record.code == FailureKind.QUARANTINED:
                self._quarantine.add(session.life.spec, self._now_s())
        log.info(
            "request ended",
            request=record.request,
            outcome=record.outcome,
            code=record.code,
            attempt=record.attempt,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            output_tokens=record.output_tokens,
            ttft_ms=record.ttft_ms,
            total_ms=record.total_ms,
        )

    # ---- time

    def _now_s(self) -> float:
        return self.node.clock.monotonic()

    def _tell_all(self, event: Event) -> None:
        for session in list(self._sessions.values()):
            session.tell(event)

    async def _tick_all(self) -> None:
        while True:
            await self.node.clock.sleep(TICK_S)
            now_s = self._now_s()
            due = [s for s in self._sessions.values() if s.wake_s <= now_s]
            for session in due:
                try:
                    session.tell(Tick())
                except Exception:
                    # one request's trouble must not stop the clock of all others
                    log.exception("tick failed", request=session.request)
            over = [r for r, s in self._sessions.items() if s.life.over]
            for request in over:
                del self._sessions[request]

    def _count(self, change: int) -> None:
        self._open += change
        self._metrics.open_requests.set(self._open)
        self.node.report(GatewayLoad(open_requests=self._open))

    async def _tell_owners(self) -> None:
        while True:
            await self.node.clock.sleep(OWNED_S)
            await self._send_owned()

    def _owe_lists(self, stage: Stage, worker: NodeRef) -> None:
        """A worker gets work, perhaps for less time than there is between two lists."""
        self._owners[stage, worker.node] = OWNED_AFTER

    async def _send_owned(self) -> None:
        """Each worker its full list; an empty one for a while after its last work.

        By name: work that was meant for a life of a worker may have been taken by the
        next one, which must hear that it is not wanted. Also to one that is not heard:
        it may hear us, and go on with what was given up here.
        """
        lists: defaultdict[tuple[Stage, NodeId], list[RequestRef]] = defaultdict(list)
        for session in self._sessions.values():
            for stage, worker, ref in session.life.owned():
                lists[stage, worker.node].append(ref)
        for key in lists:
            self._owners[key] = OWNED_AFTER
        self._owned_seq += 1
        for key, left in list(self._owners.items()):
            if left < 0:
                del self._owners[key]
                continue
            self._owners[key] = left - 1
            await self._send_list(key, tuple(lists.get(key, ())))

    async def _send_list(
        self, key: tuple[Stage, NodeId], requests: tuple[RequestRef, ...]
    ) -> None:
        stage, worker = key
        subject = self.node.subjects.inbox(_ROLES[stage], worker, Hop.CONTROL)
        message = Owned(owner=self.node.ref, seq=self._owned_seq, requests=requests)
        try:
            await self.node.bus.publish(subject, message)
        except BusError as error:
            log.debug("owner list not sent", worker=worker, error=str(error))
