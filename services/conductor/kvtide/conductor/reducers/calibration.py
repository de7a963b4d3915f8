"""How late first tokens come against what was predicted, by model."""

from collections import OrderedDict
from dataclasses import dataclass, field

from kvtide.bus.messages import Outcome, PlacementMade, RequestEnded
from kvtide.kv import RequestId
from kvtide.policy import CrowdFit, Estimate, Lateness, LatenessFit

_MOST_OPEN = 10_000
_MOST_MODELS = 256
_FIRST_ATTEMPT = 1
_EVERY_S = 0.1
"""More samples a second tell nothing new, and each costs."""


@dataclass(frozen=True, slots=True)
class _Open:
    model: str
    queue_ms: float
    rest_ms: float
    ttft_ms: float
    others: int


@dataclass(frozen=True, slots=True)
class _Fits:
    """Of one model."""

    lateness: LatenessFit = field(default_factory=LatenessFit)
    crowd: CrowdFit = field(default_factory=CrowdFit)


class Calibration:
    """Takes placements of this conductor and their ends. Bounded."""

    def __init__(self, *, enabled: bool) -> None:
        """Not ``enabled``: parts are always taken as they add up."""
        self._enabled = enabled
        self._open: OrderedDict[RequestId, _Open] = OrderedDict()
        self._fits: OrderedDict[str, _Fits] = OrderedDict()
        self._next_s = 0.0

    def of(self, model: str) -> Lateness | None:
        """What is believed of a model's requests now."""
        fits = self._fits.get(model)
        return fits.lateness.known if fits is not None else None

    def crowd_ms(self, model: str, others: int, now_s: float) -> float:
        """How much later than predicted a first token comes beside so many requests."""
        fits = self._fits.get(model)
        return fits.crowd.ms(others, now_s) if fits is not None else 0.0

    def placed(
        self,
        made: PlacementMade,
        cost: Estimate,
        lateness: Lateness | None,
        others: int,
    ) -> None:
        """``cost`` is the choice's, made with that ``lateness`` beside ``others``.

        A request that is placed anew teaches nothing: its time counts from its arrival,
        so what it lost before is in it, or the first token came before this placement.
        """
        if not self._enabled or made.attempt > _FIRST_ATTEMPT:
            return
        rest_ms = cost.ttft_ms - cost.queue_ms
        if lateness is not None:
            rest_ms = lateness.rest_ms(cost.queue_ms, cost.ttft_ms)
        self._open[made.request] = _Open(
            made.model, cost.queue_ms, rest_ms, cost.ttft_ms, others
        )
        self._open.move_to_end(made.request)
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)

    def ended(self, ended: RequestEnded, now_s: float) -> None:
        """A request has had its terminal answer."""
        one = self._open.pop(ended.request, None)
        finished = ended.outcome is Outcome.FINISHED and ended.ttft_ms
        if one is None or not finished or ended.attempt > _FIRST_ATTEMPT:
            return
        if now_s < self._next_s:
            return
        self._next_s = now_s + _EVERY_S
        fits = self._fits.setdefault(one.model, _Fits())
        fits.lateness.add(one.queue_ms, one.rest_ms, ended.ttft_ms or 0.0)
        fits.crowd.add(one.others, one.ttft_ms, ended.ttft_ms or 0.0, now_s)
        self._fits.move_to_end(one.model)
        if len(self._fits) > _MOST_MODELS:
            self._fits.popitem(last=False)
