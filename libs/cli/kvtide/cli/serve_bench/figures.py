"""What a load measured: pure statistics over its exchanges."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np

from kvtide.cli.serve_bench.outcomes import Exchange, Outcome


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one completed answer, in milliseconds.

    ``tbt_ms`` is the mean of the longest tenth of its gaps between tokens, as the
    Mooncake paper (FAST 2025) has it; ``tpot_ms`` the mean of all. Both are None for
    an answer of one token.
    """

    ttft_ms: float
    tbt_ms: float | None
    tpot_ms: float | None
    e2e_ms: float


class Spread(msgspec.Struct, frozen=True):
    """Of values in milliseconds; all 0 where there is none."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    most: float = 0.0


class Targets(msgspec.Struct, frozen=True):
    """An answer is good if it met both; None is met by all."""

    ttft_ms: float | None = None
    tbt_ms: float | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One load. Times in ms, of completed answers; shares of all requests.

    ``good`` completed and met the targets. ``span_s`` is from the start of the load to
    its last answer's end. ``hit_share`` is of the prompt tokens of those answers whose
    server told; None if none did. ``late_ms`` is how long after it was due a request
    was sent: large values mean that the load was not what was asked for.
    """

    requests: int
    outcomes: dict[str, int]
    targets: Targets
    good: int
    goodput: float
    good_per_s: float
    span_s: float
    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    cached_tokens: int | None
    hit_share: float | None
    hit_requests: int
    short_answers: int
    ttft_ms: Spread
    tbt_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    late_ms: Spread


def longest_tenth_ms(gaps_ms: Sequence[float]) -> float:
    """Mean of the longest tenth, of one gap at least. ``gaps_ms`` is not empty."""
    longest = sorted(gaps_ms, reverse=True)[: math.ceil(len(gaps_ms) / 10)]
    return sum(longest) / len(longest)


def gaps_ms(arrivals_s: Sequence[float], tokens: int) -> list[float]:
    """Between tokens that follow one another.

    A server may send several tokens in a piece: they came together, so that there are
    gaps of 0 between them. ``tokens`` below the number of pieces is ignored.
    """
    gaps = [1000 * (b - a) for a, b in pairwise(arrivals_s)]
    return gaps + [0.0] * (tokens - 1 - len(gaps))


def timing(exchange: Exchange) -> Timing | None:
    """None unless it completed."""
    if exchange.outcome is not Outcome.COMPLETED or exchange.due_s is None:
        return None
    arrivals_s = exchange.arrivals_s
    gaps = gaps_ms(arrivals_s, exchange.usage.output_tokens)
    return Timing(
        ttft_ms=1000 * (arrivals_s[0] - exchange.due_s),
        tbt_ms=longest_tenth_ms(gaps) if gaps else None,
        tpot_ms=sum(gaps) / len(gaps) if gaps else None,
        e2e_ms=1000 * (arrivals_s[-1] - exchange.due_s),
    )


def is_good(found: Timing | None, targets: Targets) -> bool:
    """Whether an answer came and met the targets; no gap meets any target."""
    if found is None:
        return False
    if targets.ttft_ms is not None and found.ttft_ms > targets.ttft_ms:
        return False
    return targets.tbt_ms is None or (found.tbt_ms or 0.0) <= targets.tbt_ms


def summary(exchanges: Sequence[Exchange], targets: Targets) -> Summary:
    """Sum up."""
    timings = [timing(each) for each in exchanges]
    there = [each for each in timings if each is not None]
    done = [each for each in exchanges if each.outcome is Outcome.COMPLETED]
    told = [each for each in done if each.usage.cached_tokens is not None]
    cached = sum(each.usage.cached_tokens or 0 for each in told)
    good = sum(is_good(each, targets) for each in timings)
    span_s = max((each.ended_s or 0.0 for each in exchanges), default=0.0)
    prompt = sum(each.usage.prompt_tokens for each in done)
    output = sum(each.usage.output_tokens for each in done)
    per_s = 1 / span_s if span_s else 0.0
    return Summary(
        requests=len(exchanges),
        outcomes=dict(Counter(each.outcome.value for each in exchanges)),
        targets=targets,
        good=good,
        goodput=good / len(exchanges) if exchanges else 0.0,
        good_per_s=good * per_s,
        span_s=span_s,
        requests_per_s=len(done) * per_s,
        prompt_tokens=prompt,
        output_tokens=output,
        prompt_tokens_per_s=prompt * per_s,
        output_tokens_per_s=output * per_s,
        cached_tokens=cached if told else None,
        hit_share=_share(cached, sum(each.usage.prompt_tokens for each in told)),
        hit_requests=sum(bool(each.usage.cached_tokens) for each in told),
        short_answers=sum(_is_short(each) for each in done),
        ttft_ms=spread(each.ttft_ms for each in there),
        tbt_ms=spread(each.tbt_ms for each in there if each.tbt_ms is not None),
        tpot_ms=spread(each.tpot_ms for each in there if each.tpot_ms is not None),
        e2e_ms=spread(each.e2e_ms for each in there),
        late_ms=spread(late_ms(exchanges)),
    )


def late_ms(exchanges: Iterable[Exchange]) -> Iterable[float]:
    """Of each request that was sent."""
    for each in exchanges:
        if each.due_s is not None and each.sent_s is not None:
            yield 1000 * (each.sent_s - each.due_s)


def _is_short(exchange: Exchange) -> bool:
    return 0 < exchange.usage.output_tokens < exchange.asked_tokens


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def spread(values: Iterable[float]) -> Spread:
    """Mean and percentiles, interpolated."""
    column = np.fromiter(values, dtype=np.float64)
    if not len(column):
        return Spread()
    p50, p90, p99 = (float(each) for each in np.percentile(column, (50, 90, 99)))
    return Spread(float(column.mean()), p50, p90, p99, float(column.max()))
