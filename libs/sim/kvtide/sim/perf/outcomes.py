"""What a run measured, in columns: a few bytes a request, however many there are."""

from array import array
from dataclasses import dataclass, field

import msgspec
import numpy as np

_TBT_TARGETS_MS = (25.0, 30.0, 40.0, 50.0, 75.0, 100.0, 150.0, 200.0, 300.0)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times in ms; shares of all requests; ``hit_tokens`` of prompt tokens.

    ``ttft_*`` and ``tbt_*`` are of the requests that were served. ``goodput`` is the
    share that met both targets, so that a rejected request meets none.
    """

    system: str
    seed: int
    requests: int
    served: int
    rejected_early: int
    rejected_late: int
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tbt_mean_ms: float
    tbt_p90_ms: float
    tbt_p99_ms: float
    goodput: float
    goodput_by_tbt: dict[str, float]
    ttft_target_ms: float
    tbt_target_ms: float
    prompt_tokens: int
    hit_tokens_local: int
    hit_tokens_remote: int
    hit_tokens_ssd: int
    hit_share: float
    prefill_gpu_s: float
    decode_gpu_s: float
    network_bytes: float
    ssd_written_bytes: float
    predicted_ttft_error: float | None
    virtual_s: float
    samples: tuple["Sample", ...] = ()


class Sample(msgspec.Struct, frozen=True):
    """The state at a time: mean copies of the hottest blocks, and the two loads."""

    at_s: float
    copies: float
    prefill_load: float
    decode_load: float
    blocks: int


def _empty() -> "array[float]":
    return array("f")


@dataclass(slots=True)
class Outcomes:
    """Collects; ``report`` sums up."""

    ttft_ms: "array[float]" = field(default_factory=_empty)
    tbt_ms: "array[float]" = field(default_factory=_empty)
    errors: "array[float]" = field(default_factory=_empty)
    requests: int = 0
    rejected_early: int = 0
    rejected_late: int = 0
    prompt_tokens: int = 0
    hit_local: int = 0
    hit_remote: int = 0
    hit_ssd: int = 0
    samples: list[Sample] = field(default_factory=list[Sample])

    @property
    def ended(self) -> int:
        """Requests that were served or rejected."""
        return len(self.ttft_ms) + self.rejected_early + self.rejected_late

    def served(self, ttft_ms: float, tbt_ms: float) -> None:
        """A request has had its last token."""
        self.ttft_ms.append(ttft_ms)
        self.tbt_ms.append(tbt_ms)

    def goodput(self, ttft_ms: float, tbt_ms: float) -> float:
        """The share of all requests that met both."""
        if not self.requests:
            return 0.0
        met = np.asarray(self.ttft_ms) <= ttft_ms
        met &= np.asarray(self.tbt_ms) <= tbt_ms
        return float(met.sum()) / self.requests


class Spent(msgspec.Struct, frozen=True):
    """What was used up."""

    prefill_gpu_s: float
    decode_gpu_s: float
    network_bytes: float
    ssd_written_bytes: float
    virtual_s: float


def report(
    found: Outcomes,
    spent: Spent,
    *,
    system: str,
    seed: int,
    ttft_target_ms: float,
    tbt_target_ms: float,
) -> Report:
    """Sum up. Nothing served: the times are 0."""
    ttft = np.asarray(found.ttft_ms, dtype=np.float64)
    tbt = np.asarray(found.tbt_ms, dtype=np.float64)
    errors = np.asarray(found.errors, dtype=np.float64)
    targets = sorted({*_TBT_TARGETS_MS, tbt_target_ms})
    hits = found.hit_local + found.hit_remote + found.hit_ssd
    return Report(
        system=system,
        seed=seed,
        requests=found.requests,
        served=len(ttft),
        rejected_early=found.rejected_early,
        rejected_late=found.rejected_late,
        ttft_mean_ms=_mean(ttft),
        ttft_p50_ms=_at(ttft, 50),
        ttft_p90_ms=_at(ttft, 90),
        ttft_p99_ms=_at(ttft, 99),
        tbt_mean_ms=_mean(tbt),
        tbt_p90_ms=_at(tbt, 90),
        tbt_p99_ms=_at(tbt, 99),
        goodput=found.goodput(ttft_target_ms, tbt_target_ms),
        goodput_by_tbt={
            f"{target:.0f}": found.goodput(ttft_target_ms, target) for target in targets
        },
        ttft_target_ms=ttft_target_ms,
        tbt_target_ms=tbt_target_ms,
        prompt_tokens=found.prompt_tokens,
        hit_tokens_local=found.hit_local,
        hit_tokens_remote=found.hit_remote,
        hit_tokens_ssd=found.hit_ssd,
        hit_share=hits / max(1, found.prompt_tokens),
        prefill_gpu_s=spent.prefill_gpu_s,
        decode_gpu_s=spent.decode_gpu_s,
        network_bytes=spent.network_bytes,
        ssd_written_bytes=spent.ssd_written_bytes,
        predicted_ttft_error=float(np.median(errors)) if len(errors) else None,
        virtual_s=spent.virtual_s,
        samples=tuple(found.samples),
    )


def _mean(column: np.ndarray) -> float:
    return float(column.mean()) if len(column) else 0.0


def _at(column: np.ndarray, percent: float) -> float:
    return float(np.percentile(column, percent)) if len(column) else 0.0
