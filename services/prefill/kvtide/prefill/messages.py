"""What a prefill worker hears, and what its machine is told of it. Pure."""

from kvtide.bus import Hop
from kvtide.bus.messages import (
    AnyMessage,
    BlocksMade,
    BlocksMaking,
    HandoverPull,
    HandoverTaken,
    PrefillWork,
)
from kvtide.prefill import events

HOPS = (Hop.WORK, Hop.CONTROL)
"""The inboxes of the role."""


def event_of(message: AnyMessage) -> events.Event | None:
    """What the machine is told of a message for prefill workers alone."""
    event: events.Event | None = None
    match message:
        case PrefillWork():
            event = events.WorkArrived(message)
        case HandoverPull():
            event = events.PullArrived(message)
        case HandoverTaken():
            event = events.TakenArrived(message)
        case BlocksMaking() | BlocksMade() as said:
            event = events.PeerSaid(said)
        case _:
            pass
    return event
