"""Why the latest requests were placed as they were."""

from collections import OrderedDict

import msgspec

from kvtide.bus.messages import (
    ActualTimes,
    CandidateEstimate,
    Explained,
    Failure,
    OtherCandidates,
    RequestEnded,
)
from kvtide.conductor.commands import Answer
from kvtide.kv import RequestId, name_prefix
from kvtide.policy import RestSummary


class Explanations:
    """The newest decision on each of the last ``limit`` requests."""

    def __init__(self, limit: int) -> None:
        """Start empty."""
        self._limit = limit
        self._kept: OrderedDict[RequestId, Explained] = OrderedDict()

    def __len__(self) -> int:
        """Requests that can be explained."""
        return len(self._kept)

    def keep(
        self,
        answer: Answer,
        candidates: tuple[CandidateEstimate, ...],
        considered: int = 0,
        rest: RestSummary | None = None,
    ) -> None:
        """Remember a decision in place of the request's earlier one."""
        others = None
        if rest is not None:
            others = OtherCandidates(
                candidates=rest.candidates,
                least_ttft_ms=rest.least_ttft_ms,
                median_ttft_ms=rest.median_ttft_ms,
                most_ttft_ms=rest.most_ttft_ms,
            )
        self._kept[answer.request] = Explained(
            request=answer.request,
            attempt=answer.attempt,
            candidates=candidates,
            reason=answer.reason,
            considered=considered,
            others=others,
        )
        self._kept.move_to_end(answer.request)
        while len(self._kept) > self._limit:
            self._kept.popitem(last=False)

    def ended(self, ended: RequestEnded) -> CandidateEstimate | None:
        """Remember what came of a decision; what was predicted for it, if known."""
        explained = self._kept.get(ended.request)
        if explained is None or explained.attempt != ended.attempt:
            return None
        actual = ActualTimes(
            outcome=ended.outcome.value,
            cached_tokens=ended.cached_tokens,
            output_tokens=ended.output_tokens,
            ttft_ms=ended.ttft_ms,
            tbt_ms=ended.tbt_ms,
        )
        self._kept[ended.request] = msgspec.structs.replace(explained, actual=actual)
        return explained.candidates[0] if explained.candidates else None

    def explain(self, request: RequestId) -> Explained | Failure:
        """The decision on a request, or that it isn't known here.

        ``request`` is a request's name, or what a client called it: then the newest.
        """
        explained = self._kept.get(request) or self._newest_called(request)
        if explained is not None:
            return explained
        return Failure(
            code="unknown_request",
            reason=(
                f"this conductor has no decision on request {request!r} in memory: "
                "another one made it, or it is long ago"
            ),
        )

    def _newest_called(self, given: str) -> Explained | None:
        prefix = name_prefix(given)
        names = reversed(self._kept)
        return next((self._kept[n] for n in names if n.startswith(prefix)), None)
