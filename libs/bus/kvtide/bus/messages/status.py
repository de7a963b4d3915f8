"""Anyone → conductor: what do you know? For ``kvtide status`` and the dashboard."""

import msgspec

from kvtide.bus.messages.admission import CandidateEstimate
from kvtide.bus.messages.base import Message
from kvtide.bus.messages.membership import Beat
from kvtide.kv import RequestId


class StatusQuery(Message, frozen=True, tag="status_query"):
    """→ ``StatusReply``."""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node as the conductor sees it. ``blocks`` are those indexed at it."""

    beat: Beat
    age_ms: float
    blocks: int = 0


class StatusReply(Message, frozen=True, tag="status_reply"):
    """The cluster as one conductor knows it."""

    nodes: tuple[NodeView, ...]
    indexed_blocks: int
    indexed_copies: int
    bookings: int
    exact: bool


class ExplainQuery(Message, frozen=True, tag="explain_query"):
    """→ ``Explained`` or ``Failure``: the decisions on one request."""

    request: RequestId


class OtherCandidates(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted times to first token of the candidates that are not listed."""

    candidates: int
    least_ttft_ms: float
    median_ttft_ms: float
    most_ttft_ms: float


class ActualTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a placement. Times are None when no token, or only one, was sent."""

    outcome: str
    cached_tokens: int
    output_tokens: int
    ttft_ms: float | None
    tbt_ms: float | None


class Explained(Message, frozen=True, tag="explained"):
    """The candidates of the newest attempt, best first, and the sentence.

    ``considered`` counts all; ``others`` sums up those that are not listed. ``actual``
    is there once the request has ended.
    """

    request: RequestId
    attempt: int
    candidates: tuple[CandidateEstimate, ...]
    reason: str
    considered: int = 0
    others: OtherCandidates | None = None
    actual: ActualTimes | None = None


class CostsQuery(Message, frozen=True, tag="costs_query"):
    """→ ``CostsKnown``: what workers' work was found to cost."""


class CostsKnown(Message, frozen=True, tag="costs_known"):
    """Costs by worker class, as TOML that a conductor takes as its ``profiles``.

    ``samples`` are those that they were fitted to, seeds included none.
    """

    profiles: str
    samples: int
