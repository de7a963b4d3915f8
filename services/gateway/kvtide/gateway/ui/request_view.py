"""One request as the pages show it: a row, its marks, its waterfall, its KV's origins."""

from enum import StrEnum

import msgspec


class MarkKind(StrEnum):
    """What happened; the page has a word and a colour for each."""

    ARRIVED = "arrived"
    PLACED = "placed"
    REJECTED = "rejected"
    REFUSED = "refused"
    PREFILLED = "prefilled"
    FIRST_TOKEN = "first_token"  # noqa: S105 - no password
    LOST = "lost"
    FAILED = "failed"
    CLIENT_GONE = "client_gone"
    ENDED = "ended"


class Mark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened ``at_ms`` after the request's arrival."""

    kind: MarkKind
    at_ms: float
    attempt: int = 0
    node: str = ""
    text: str = ""


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of the waterfall, in milliseconds after the arrival."""

    name: str
    start_ms: float
    end_ms: float
    node: str = ""
    attempt: int = 1


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where the KV of the prompt's positions ``[start, end)`` came from.

    ``source`` is ``computed``, ``host`` (DRAM of the prefill worker's host), ``remote``
    (DRAM of another) or ``ssd``.
    """

    start: int
    end: int
    source: str
    node: str = ""


class RequestView(msgspec.Struct, kw_only=True):
    """One request as the pages show it. Times are milliseconds, counts are tokens."""

    request: str
    tenant: str
    model: str
    arrived_s: float
    gateway: str = ""
    state: str = "running"
    code: str = ""
    attempt: int = 1
    prefill: str = ""
    decode: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    predicted_ttft_ms: float | None = None
    predicted_tbt_ms: float | None = None
    ttft_target_ms: float | None = None
    tbt_target_ms: float | None = None
    ttft_ms: float | None = None
    tbt_ms: float | None = None
    total_ms: float | None = None


class RequestDetail(msgspec.Struct, kw_only=True):
    """A request and all that is known of its time and its KV."""

    view: RequestView
    marks: list[Mark]
    spans: list[Span]
    origins: list[Origin]
    block_tokens: int
    token_ms: list[float]
