"""How an operation ends that failed for a reason nobody foresaw. Pure."""

from kvtide.prefill import events
from kvtide.prefill.events import Command, Event, StepOutcome


def failed_end(command: Command, reason: str) -> Event | None:
    """The event that ends ``command`` without its result; None: nobody waits for it."""
    ended: Event | None = None
    match command:
        case events.Open(_, ref):
            ended = events.OpenFailed(ref, reason)
        case events.Load(ref, _, first):
            ended = events.Loaded(ref, 0, 0, 0.0, first, whole=False)
        case events.Begin(ref):
            ended = events.SlotsGranted(ref, ())
        case events.Step(number):
            ended = events.StepEnded(number, StepOutcome.FAILED, 0.0, reason)
        case events.Commit(ref):
            ended = events.Committed(ref)
        case _:
            pass
    return ended
