"""Why the latest requests were placed as they were."""

from collections import OrderedDict

from kvtide.bus.messages import CandidateEstimate, Explained, Failure
from kvtide.conductor.commands import Answer
from kvtide.kv import RequestId, name_prefix


class Explanations:
    """The newest decision on each of the last ``limit`` requests."""

    def __init__(self, limit: int) -> None:
        """Start empty."""
        self._limit = limit
        self._kept: OrderedDict[RequestId, Explained] = OrderedDict()

    def __len__(self) -> int:
        """Requests that can be explained."""
        return len(self._kept)

    def keep(self, answer: Answer, candidates: tuple[CandidateEstimate, ...]) -> None:
        """Remember a decision in place of the request's earlier one."""
        self._kept[answer.request] = Explained(
            request=answer.request,
            attempt=answer.attempt,
            candidates=candidates,
            reason=answer.reason,
        )
        self._kept.move_to_end(answer.request)
        while len(self._kept) > self._limit:
            self._kept.popitem(last=False)

    def predicted_ttft_ms(self, request: RequestId, attempt: int) -> float | None:
        """What the first token of this attempt was predicted to take, if known."""
        explained = self._kept.get(request)
        if explained is None or explained.attempt != attempt:
            return None
        return explained.candidates[0].ttft_ms if explained.candidates else None

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
