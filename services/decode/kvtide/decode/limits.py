"""The bounds of a decode worker. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """``waiting`` and ``batch`` are requests; the rest says its unit.

    ``picture_bytes`` bounds the pictures of all requests that have not ended.

    ``batch`` bounds those that have pages. Pages are bound for what a sequence has and
    ``growth_blocks`` more, later ones as its tokens come. A missing prefix is computed
    ``fill_tokens`` a step beside running sequences, ``fill_alone_tokens`` when nobody
    runs. A sequence with ``unacked_tokens`` that its gateway has not acknowledged
    pauses.
    """

    waiting: int = 256
    batch: int = 32
    picture_bytes: int = 1 << 29
    growth_blocks: int = 2
    fill_tokens: int = 64
    fill_alone_tokens: int = 512
    unacked_tokens: int = 4096
    put_blocks: int = 16
    silence_s: float = 0.5
    asks: int = 3
    ended_kept_s: float = 120.0
    early_requests: int = 128
    early_messages: int = 128
    early_kept_s: float = 5.0
    taken_tries: int = 5
    taken_retry_s: float = 1.0
    initial_step_ms: float = 100.0
