"""What others were told of a prompt, in metrics, spans and logs."""

import structlog

from kvtide.bus.messages import PrefillDone, PrefillFailed
from kvtide.kv import RequestRef
from kvtide.prefill.metrics import PrefillMetrics
from kvtide.worker.spans import RequestSpans

log = structlog.get_logger("kvtide.prefill")


def told(
    message: PrefillDone | PrefillFailed, metrics: PrefillMetrics, spans: RequestSpans
) -> None:
    """Count it, end the request's span, and log it."""
    metrics.said(message)
    ref = RequestRef(message.request, message.attempt)
    if isinstance(message, PrefillDone):
        spans.ended(
            ref,
            reused_tokens=message.reused_tokens,
            computed_tokens=message.computed_tokens,
        )
        log.info(
            "prefill done",
            request=message.request,
            attempt=message.attempt,
            reused=message.reused_tokens,
            computed=message.computed_tokens,
            queue_ms=round(message.times.queue_ms, 1),
            load_ms=round(message.times.load_ms, 1),
            compute_ms=round(message.times.compute_ms, 1),
        )
    else:
        spans.ended(ref, message.code)
        log.warning(
            "prefill failed",
            request=message.request,
            attempt=message.attempt,
            code=message.code,
            reason=message.reason,
        )
