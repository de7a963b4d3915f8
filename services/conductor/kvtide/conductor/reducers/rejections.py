"""The rejections that need no policy."""

from kvtide.bus.messages import Admit, RejectCode, Rejected
from kvtide.conductor.reducers.limits import Denied
from kvtide.conductor.reducers.membership import Membership
from kvtide.kv import ModelFacts, Role

_NO_WORKERS_RETRY_MS = 1000.0


def stale(admit: Admit, why: str) -> Rejected:
    """An attempt that is no longer the newest."""
    return Rejected(
        request=admit.request,
        attempt=admit.attempt,
        code=RejectCode.STALE_ATTEMPT,
        reason=f"attempt {admit.attempt} of the request is stale: {why}",
    )


def too_large(admit: Admit, facts: ModelFacts) -> Rejected:
    """A prompt that leaves no room for even one token of answer."""
    return Rejected(
        request=admit.request,
        attempt=admit.attempt,
        code=RejectCode.TOO_LARGE,
        reason=(
            f"the prompt has {admit.prompt_tokens} tokens; {facts.name} takes "
            f"{facts.max_tokens}, the answer included"
        ),
    )


def denied(admit: Admit, over: Denied) -> Rejected:
    """The tenant's limits leave no room for it."""
    return Rejected(
        request=admit.request,
        attempt=admit.attempt,
        code=RejectCode.TENANT_LIMIT,
        reason=over.reason,
        retry_after_ms=over.retry_after_ms,
    )


def no_model(admit: Admit, members: Membership) -> Rejected:
    """Nobody who is ready has the model: it is unknown, or its workers aren't there."""
    if members.ready(Role.PREFILL) and members.ready(Role.DECODE):
        return Rejected(
            request=admit.request,
            attempt=admit.attempt,
            code=RejectCode.UNKNOWN_MODEL,
            reason=f"no worker serves the model {admit.model!r}",
        )
    return Rejected(
        request=admit.request,
        attempt=admit.attempt,
        code=RejectCode.NO_WORKERS,
        reason="no prefill and decode workers are ready",
        retry_after_ms=_NO_WORKERS_RETRY_MS,
    )
