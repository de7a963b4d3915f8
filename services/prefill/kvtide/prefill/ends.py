"""How an operation ends that failed for a reason nobody foresaw. Pure."""

from kvtide.prefill import events
from kvtide.prefill.events import Command, Event, StepOutcome


def failed_end(command: Command, reason: str) -> Event | None:
    """The event that ends ``command`` without its result; None: nobody waits for it."""
    match command:
        case events.Load(ref):
            return events.Loaded(ref, 0, 0, 0.0)
        case events.Begin(ref):
            return events.SlotsGranted(ref, ())
        case events.Step(number):
            return events.StepEnded(number, StepOutcome.FAILED, 0.0, reason)
        case events.Commit(ref):
            return events.Committed(ref)
        case _:
            return None
