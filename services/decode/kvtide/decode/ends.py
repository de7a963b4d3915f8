"""How an operation ends that failed for a reason nobody foresaw. Pure."""

from kvtide.decode import events
from kvtide.decode.events import Command, Event, LayerPart, StepOutcome


def failed_end(command: Command, reason: str) -> Event | None:
    """The event that ends ``command`` without its result; None: nobody waits for it."""
    ended: Event | None = None
    match command:
        case events.Open(_, ref):
            ended = events.OpenFailed(ref, reason)
        case events.AskHandover(ref):
            ended = events.HandoverAnswered(ref, None)
        case events.TellTaken(ref):
            ended = events.TakenAnswered(ref, acked=False)
        case events.FindCopies(ref):
            ended = events.CopiesFound(ref, ())
        case events.ReadCopies(ref, copies):
            ended = events.CopiesRead(ref, (), tuple(one.block for one in copies))
        case events.ReadParts(ref, parts):
            missed = tuple(LayerPart(one.sums.block, one.sums.layer) for one in parts)
            ended = events.PartsRead(ref, (), missed)
        case events.Step(number):
            ended = events.StepEnded(number, StepOutcome.FAILED, 0.0, reason=reason)
        case events.PutBlocks(ref):
            ended = events.BlocksPut(ref)
        case _:
            pass
    return ended
