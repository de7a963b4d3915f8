"""What is to come: decode's load when a prefill is done, and loads on their way."""

import numpy as np
from numpy.typing import NDArray

from kvtide.bus.messages import Outcome, PlacementMade, RequestEnded
from kvtide.conductor.reducers.fleet import FleetTable, ModelRows
from kvtide.conductor.reducers.flows import Flows
from kvtide.conductor.reducers.membership import Membership
from kvtide.kv import RequestId
from kvtide.policy import Prediction
from kvtide.policy.answers import AnswerLengths
from kvtide.policy.forecast import Coming, DecodeForecast, Stay

Floats = NDArray[np.float64]

_S_TO_MS = 1000.0
_FADE = 0.98


class Outlook:
    """The forecast of one conductor, from all placements and ends that it hears of."""

    def __init__(
        self,
        members: Membership,
        fleet: FleetTable,
        prediction: Prediction,
        *,
        answer_tokens: float,
        tbt_ms: float,
    ) -> None:
        """``answer_tokens`` and ``tbt_ms`` are assumed until answers have ended."""
        self._members = members
        self._fleet = fleet
        self._lengths = AnswerLengths(answer_tokens)
        self._forecast = DecodeForecast(prediction, self._lengths)
        self._flows = Flows()
        self._tbt_ms = tbt_ms
        self._prediction = prediction

    def placed(self, made: PlacementMade, now_s: float) -> None:
        """A request was placed, by whichever conductor."""
        decode = self._fleet.row(made.decode)
        if decode is not None:
            stay = Stay(
                worker=decode,
                start_s=now_s + max(0.0, made.ttft_ms) / _S_TO_MS,
                tbt_ms=made.tbt_ms or self._tbt_ms,
                kv_tokens=made.prompt_tokens + self._lengths.mean_tokens / 2,
                max_new_tokens=made.max_new_tokens,
            )
            self._forecast.place(made.request, stay, now_s)
        loader = self._fleet.row(made.prefill or made.decode)
        beat = self._members.get(made.prefill or made.decode)
        if loader is None or beat is None or not made.sources:
            return
        hosts: list[int] = []
        for node in made.sources:
            store = self._members.get(node)
            if store is not None and (store.host != beat.host or not store.host):
                hosts.append(self._fleet.host_number(store.host))
        before_ms = made.ttft_ms - made.prefill_ms - made.tbt_ms
        end_ms = max(before_ms, made.transfer_ms, 0.0)
        end_s = now_s + end_ms / _S_TO_MS
        self._flows.add(made.request, loader, hosts, end_s)

    def ended(self, ended: RequestEnded, now_s: float) -> None:
        """A request has had its terminal answer."""
        self._flows.remove(ended.request)
        self._forecast.remove(ended.request, now_s)
        if ended.outcome is Outcome.FINISHED:
            self._lengths.ended(ended.output_tokens)
            if ended.tbt_ms:
                self._tbt_ms += (ended.tbt_ms - self._tbt_ms) * (1 - _FADE)

    def released(self, request: RequestId, now_s: float) -> None:
        """The request is about to be placed anew."""
        self._flows.remove(request)
        self._forecast.remove(request, now_s)

    def row_gone(self, row: int) -> None:
        """That row is another node's from now on."""
        self._forecast.clear_worker(row)

    def answer_tokens(self, limit_tokens: float) -> float:
        """How long an answer is expected to get."""
        return max(1.0, self._lengths.expected_tokens(limit_tokens))

    def coming(
        self, rows: ModelRows, now_s: float, start_ms: float, life_tokens: float
    ) -> Coming:
        """The change of decode's load by then; over the life of so many tokens."""
        if self._prediction is Prediction.OFF:
            none = np.zeros(len(rows.decodes))
            return Coming(none, none)
        start_s = now_s + start_ms / _S_TO_MS
        life_s = life_tokens * self._tbt_ms / _S_TO_MS
        return self._forecast.coming(rows.decodes, now_s, start_s, life_s)

    def calm_ms(self, rows: ModelRows, now_s: float, share: float) -> float | None:
        """When decode's batches will be that share of what they are."""
        if self._prediction is Prediction.OFF:
            return None
        return self._forecast.calm_ms(rows.decodes, now_s, share)

    def inflows(self, rows: ModelRows, now_s: float) -> Floats:
        """Loads on their way to each prefill worker."""
        return self._flows.inflows(rows.prefills, now_s)

    def outflows(self, now_s: float) -> Floats:
        """Loads on their way from each host."""
        return self._flows.outflows(self._fleet.hosts, now_s)
