"""How loaded an engine is, from its ``/metrics`` and from how it served us. Pure."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtide.bus.messages import DecodeLoad, PrefillLoad, StepSample
from kvtide.policy.curves import attended_pairs
from kvtide.router.asking import EngineKind

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_FADE = 0.2
"""The weight of a new measurement."""
_MOST = 1 << 40
"""No engine has more tokens or requests: what says so is held to this."""
_MOST_DIGITS = 13


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """What an engine said. Sizes of 0 are not known."""

    running: int = 0
    waiting: int = 0
    kv_share: float = 0.0
    capacity_tokens: int = 0
    block_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Names:
    running: str
    waiting: str
    kv_share: tuple[str, ...]


_NAMES = {
    EngineKind.VLLM: _Names(
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    ),
    EngineKind.SGLANG: _Names(
        "sglang:num_running_reqs", "sglang:num_queue_reqs", ("sglang:token_usage",)
    ),
}


def read_metrics(kind: EngineKind, text: str) -> EngineMetrics:
    """What the text of ``/metrics`` says; of several ranks the sum, or the greatest."""
    names = _NAMES[kind]
    sums: dict[str, float] = {}
    peaks: dict[str, float] = {}
    labels: Mapping[str, str] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        name, raw, value = found.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        if not math.isfinite(number):
            continue
        sums[name] = sums.get(name, 0.0) + number
        peaks[name] = max(peaks.get(name, number), number)
        if name == "vllm:cache_config_info":
            labels = dict(_LABEL.findall(raw or ""))
    block = _whole(labels.get("block_size"))
    capacity = block * _whole(labels.get("num_gpu_blocks"))
    if kind is EngineKind.SGLANG:
        capacity = _count(sums.get("sglang:max_total_num_tokens", 0.0))
    shares = [peaks[name] for name in names.kv_share if name in peaks]
    return EngineMetrics(
        running=_count(sums.get(names.running, 0.0)),
        waiting=_count(sums.get(names.waiting, 0.0)),
        kv_share=min(1.0, max(0.0, *shares)) if shares else 0.0,
        capacity_tokens=min(capacity, _MOST),
        block_tokens=block,
    )


def _count(number: float) -> int:
    return int(min(max(0.0, number), _MOST))


def _whole(text: str | None) -> int:
    if not text or not text.isdecimal():
        return 0
    return _MOST if len(text) > _MOST_DIGITS else min(int(text), _MOST)


@dataclass(slots=True)
class EngineLoad:
    """The loads of both roles. Times are of requests that went through us.

    Rates of one engine are not told: conductors fit the times of all engines of a class,
    so that one which has served nothing yet looks neither slower nor faster.
    """

    metrics: EngineMetrics = EngineMetrics()
    new_tokens: float = 0.0
    first: StepSample | None = None
    later: StepSample | None = None
    steps: int = 0
    _known: bool = field(default=False)

    def began(self, new: int, reused: int, ms: float, *, alone: bool) -> None:
        """A first token came ``ms`` after the request was sent.

        Only where nothing else ran is that the time of computing the prompt.
        """
        if new <= 0 or ms <= 0:
            return
        self.new_tokens += (new - self.new_tokens) * (_FADE if self._known else 1.0)
        self._known = True
        if not alone:
            return
        self.steps += 1
        self.first = StepSample(1, new, attended_pairs(new, reused), ms)

    def stepped(self, tokens: int, ms: float) -> None:
        """``tokens`` more of a request came ``ms`` after the ones before."""
        if tokens <= 0 or ms < 0:
            return
        seen = self.metrics
        rows = max(1, seen.running)
        attended = max(1.0, seen.kv_share * seen.capacity_tokens)
        self.steps += 1
        self.later = StepSample(rows, rows, attended, ms / tokens)

    def prefill(self) -> PrefillLoad:
        """As a prefill worker reports itself."""
        waiting = self.metrics.waiting
        return PrefillLoad(
            queued=waiting,
            queued_tokens=int(waiting * self.new_tokens),
            step=self.first,
        )

    def decode(self) -> DecodeLoad:
        """As a decode worker reports itself."""
        seen = self.metrics
        return DecodeLoad(
            running=seen.running,
            waiting=seen.waiting,
            kv_tokens_used=int(seen.kv_share * seen.capacity_tokens),
            kv_tokens_capacity=seen.capacity_tokens,
            step=self.later,
        )
