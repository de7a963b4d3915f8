"""Carries a request's messages over the bus and brings the answers back as events."""

from collections.abc import Callable
from typing import assert_never

import structlog

from kvtide.bus import BusError, Hop, Node
from kvtide.bus.messages import (
    Ack,
    AnyMessage,
    Failure,
    Message,
    Placed,
    RefuseCode,
    Rejected,
    RequestEnded,
    TokenPage,
    WorkAccepted,
    WorkRefused,
)
from kvtide.gateway.life import (
    AdmitAnswered,
    AdmitLost,
    BusCommand,
    CancelAcked,
    Event,
    LifeLimits,
    PullAnswered,
    SendAdmit,
    SendCancel,
    SendDecodeWork,
    SendPrefillWork,
    SendTokenAck,
    SendTokenPull,
    Stage,
    WorkAnswered,
    WorkLost,
)
from kvtide.kv import NodeRef, Role, rendezvous_order
from kvtide.runtime import LimitError
from kvtide.runtime.tracing import TRACE

log = structlog.get_logger("kvtide.gateway.courier")

Tell = Callable[[Event], None]
WorkSent = Callable[[Stage, NodeRef], None]

_ROLES = {Stage.PREFILL: Role.PREFILL, Stage.DECODE: Role.DECODE}
_SEND_ERRORS = (BusError, LimitError)


class Courier:
    """Sends what lives command. Nothing here decides; every wait has a limit."""

    def __init__(
        self, node: Node, limits: LifeLimits, work_sent: WorkSent | None = None
    ) -> None:
        """Send as ``node``; ``work_sent`` hears of each worker that gets work."""
        self._node = node
        self._limits = limits
        self._work_sent = work_sent

    def send(self, command: BusCommand, tell: Tell, trace: str = "") -> None:
        """Start sending; the answer, if there is one, goes to ``tell`` in the loop."""
        self._node.tasks.spawn(
            self._carry(command, tell, trace), name=f"send {type(command).__name__}"
        )

    def record(self, message: RequestEnded) -> None:
        """Tell all conductors how a request ended."""
        subject = self._node.subjects.ended(self._node.ref.node)
        self._node.tasks.spawn(self._publish(subject, message), name="send ended")

    async def _carry(self, command: BusCommand, tell: Tell, trace: str) -> None:
        # not the trace of whatever happened to begin this task
        TRACE.set(trace)
        match command:
            case SendAdmit():
                await self._admit(command, tell)
            case SendPrefillWork():
                await self._work(Stage.PREFILL, command, tell)
            case SendDecodeWork():
                await self._work(Stage.DECODE, command, tell)
            case SendCancel():
                await self._cancel(command, tell)
            case SendTokenPull():
                await self._pull(command, tell)
            case SendTokenAck():
                subject = self._inbox(Stage.DECODE, command.worker, Hop.CONTROL)
                await self._publish(subject, command.message)
            case _:
                assert_never(command)

    def _inbox(self, stage: Stage, worker: NodeRef, hop: Hop) -> str:
        return self._node.subjects.inbox(_ROLES[stage], worker.node, hop)

    async def _publish(self, subject: str, message: Message) -> None:
        try:
            await self._node.bus.publish(subject, message)
        except _SEND_ERRORS as error:
            log.debug("not published", subject=subject, error=str(error))

    async def _request(
        self, subject: str, message: Message, timeout_s: float
    ) -> AnyMessage:
        """The reply; what keeps it from coming is a ``Failure`` like any other."""
        try:
            return await self._node.bus.request(subject, message, timeout_s=timeout_s)
        except _SEND_ERRORS as error:
            return Failure(code=type(error).__name__, reason=str(error))

    async def _admit(self, command: SendAdmit, tell: Tell) -> None:
        message = command.message
        live = [member.ref for member in self._node.roster.live(Role.CONDUCTOR)]
        order = rendezvous_order(message.tenant, live)
        lost = AdmitLost(message.attempt, command.rank, live=len(order))
        if not order:
            tell(lost)
            return
        conductor = order[command.rank % len(order)]
        subject = self._node.subjects.inbox(Role.CONDUCTOR, conductor.node, Hop.ADMIT)
        reply = await self._request(subject, message, self._limits.admit_limit_s)
        if isinstance(reply, Placed | Rejected):
            tell(AdmitAnswered(reply))
            return
        log.info(
            "conductor did not answer",
            request=message.request,
            conductor=conductor.node,
            reply=_word(reply),
        )
        tell(lost)

    async def _work(
        self, stage: Stage, command: SendPrefillWork | SendDecodeWork, tell: Tell
    ) -> None:
        message, worker = command.message, command.worker
        if self._work_sent is not None:
            self._work_sent(stage, worker)
        subject = self._inbox(stage, worker, Hop.WORK)
        reply = await self._request(subject, message, self._limits.work_patience_s)
        if isinstance(reply, Failure) and reply.code == LimitError.__name__:
            # this gateway's own bounds, such as for large bodies: the worker is well
            reply = WorkRefused(
                request=message.request,
                attempt=message.attempt,
                code=RefuseCode.BUSY,
                reason=reply.reason,
            )
        if isinstance(reply, WorkAccepted | WorkRefused):
            tell(WorkAnswered(stage, worker, reply))
            return
        log.info(
            "worker did not take work",
            request=message.request,
            stage=stage,
            worker=worker.node,
            reply=_word(reply),
        )
        tell(WorkLost(stage, worker, message.attempt, _word(reply)))

    async def _cancel(self, command: SendCancel, tell: Tell) -> None:
        subject = self._inbox(command.stage, command.worker, Hop.CONTROL)
        wait_s = self._limits.cancel_repeat_s
        reply = await self._request(subject, command.message, wait_s)
        if isinstance(reply, Ack):
            attempt = command.message.attempt
            tell(CancelAcked(command.stage, command.worker, attempt))

    async def _pull(self, command: SendTokenPull, tell: Tell) -> None:
        subject = self._inbox(Stage.DECODE, command.worker, Hop.CONTROL)
        wait_s = self._limits.silence_s
        reply = await self._request(subject, command.message, wait_s)
        if isinstance(reply, TokenPage):
            tell(PullAnswered(command.worker, reply))


def _word(reply: AnyMessage) -> str:
    if isinstance(reply, Failure):
        return f"{reply.code}: {reply.reason}"
    return f"an unexpected {type(reply).__name__}"
