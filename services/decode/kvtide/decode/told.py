"""What a gateway was told of a request, in metrics, spans and logs."""

import structlog

from kvtide.bus.messages import DecodeFailed, Tokens
from kvtide.decode.metrics import DecodeMetrics
from kvtide.kv import RequestRef
from kvtide.worker.spans import RequestSpans

log = structlog.get_logger("kvtide.decode")


def told(
    message: Tokens | DecodeFailed, metrics: DecodeMetrics, spans: RequestSpans
) -> None:
    """Count it; an end is logged, and ends the request's span."""
    metrics.said(message)
    ref = RequestRef(message.request, message.attempt)
    if isinstance(message, DecodeFailed):
        spans.ended(ref, message.code)
        log.warning(
            "decode failed",
            request=message.request,
            attempt=message.attempt,
            code=message.code,
            reason=message.reason,
        )
    elif message.finish is not None:
        spans.ended(ref, output_tokens=message.index + len(message.ids))
        log.info(
            "decode finished",
            request=message.request,
            attempt=message.attempt,
            finish=message.finish,
            count=message.index + len(message.ids),
        )
