"""The bounds of a prefill worker. Pure."""

from dataclasses import dataclass
from enum import StrEnum


class QueueOrder(StrEnum):
    """Who comes next.

    ``SLACK``: whoever has the least time left until its target, less the time that it
    will still take.
    """

    FIRST_COME = "first_come"
    SLACK = "slack"


PREPARED_TIMES = 4
"""Prompts that are prepared, of ``prepare_ahead``: who passes others adds to them."""


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Sizes are in tokens where not said otherwise.

    A step computes as much as is predicted to take ``step_ms`` when nobody else wants
    the engine, and ``shared_step_ms`` when somebody does, at most ``step_tokens`` and
    ``shared_step_tokens``; prompts that fit together into ``batch_tokens`` share a
    step. ``prepare_ahead`` prompts load and get their slots while others are computed.
    ``queued`` and ``queued_tokens`` bound what waits, ``jobs`` all that is known, also
    what is computed and not yet taken. A rate of loads is believed for ``rate_kept_s``.
    """

    order: QueueOrder = QueueOrder.FIRST_COME
    queued: int = 64
    queued_tokens: int = 262_144
    jobs: int = 256
    step_tokens: int = 2048
    shared_step_tokens: int = 256
    step_ms: float = 6000.0
    shared_step_ms: float = 250.0
    least_step_tokens: int = 16
    batch_tokens: int = 256
    prepare_ahead: int = 2
    failed_kept_s: float = 30.0
    done_kept_s: float = 600.0
    rate_kept_s: float = 30.0
    initial_tokens_per_s: float = 300.0
