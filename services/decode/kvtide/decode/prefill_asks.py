"""What decode asks of the worker that prefills, and tells it."""

import structlog

from kvtide.bus import BusError, Hop, Node
from kvtide.bus.messages import (
    Ack,
    AnyMessage,
    HandoverPull,
    HandoverState,
    HandoverTaken,
)
from kvtide.decode import events
from kvtide.kv import NodeRef, Role
from kvtide.runtime import LimitError

ASK_TIMEOUT_S = 2.0

log = structlog.get_logger("kvtide.decode")


async def ask_prefill(node: Node, ask: events.AskHandover) -> events.HandoverAnswered:
    """Pull the hand-over's state."""
    pull = HandoverPull(request=ask.ref.request, attempt=ask.ref.attempt)
    answer = await _answer(node, ask.prefill, pull)
    state = answer if isinstance(answer, HandoverState) else None
    return events.HandoverAnswered(ask.ref, state)


async def tell_taken(node: Node, taken: events.TellTaken) -> events.TakenAnswered:
    """Tell prefill that it may let go."""
    message = HandoverTaken(request=taken.ref.request, attempt=taken.ref.attempt)
    answer = await _answer(node, taken.prefill, message)
    return events.TakenAnswered(taken.ref, acked=isinstance(answer, Ack))


async def _answer(
    node: Node, prefill: NodeRef, message: HandoverPull | HandoverTaken
) -> AnyMessage | None:
    inbox = node.subjects.inbox(Role.PREFILL, prefill.node, Hop.CONTROL)
    try:
        return await node.bus.request(inbox, message, timeout_s=ASK_TIMEOUT_S)
    except (BusError, LimitError) as error:
        log.info("prefill silent", request=message.request, reason=str(error))
        return None
