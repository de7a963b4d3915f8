"""The bounds of a prefill worker. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Sizes are in tokens where not said otherwise.

    ``step_tokens`` bounds a step when nobody else wants the engine,
    ``shared_step_tokens`` when somebody does; prompts that fit together into
    ``batch_tokens`` share a step. ``prepare_ahead`` prompts load and get their slots
    while others are computed. ``queued`` and ``queued_tokens`` bound what waits,
    ``jobs`` all that is known, also what is computed and not yet taken.
    """

    queued: int = 64
    queued_tokens: int = 262_144
    jobs: int = 256
    step_tokens: int = 2048
    shared_step_tokens: int = 256
    batch_tokens: int = 256
    prepare_ahead: int = 2
    failed_kept_s: float = 30.0
    done_kept_s: float = 600.0
    initial_tokens_per_s: float = 300.0
