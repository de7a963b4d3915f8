"""What a decode worker hears, and what its machine is told of it. Pure."""

from kvtide.bus import Hop
from kvtide.bus.messages import (
    AnyMessage,
    DecodeWork,
    HandoverPlan,
    PartsReady,
    PrefillDone,
    PrefillFailed,
    TokenAck,
    TokenPull,
)
from kvtide.decode import events

HOPS = (Hop.WORK, Hop.CONTROL, Hop.HANDOVER)
"""The inboxes of the role."""


def event_of(message: AnyMessage) -> events.Event | None:
    """What the machine is told of a message for decode workers alone."""
    event: events.Event | None = None
    match message:
        case DecodeWork():
            event = events.WorkArrived(message)
        case TokenAck():
            event = events.AckArrived(message)
        case TokenPull():
            event = events.PullArrived(message)
        case HandoverPlan() | PartsReady() | PrefillDone() | PrefillFailed():
            event = events.HandoverSaid(message)
        case _:
            pass
    return event
