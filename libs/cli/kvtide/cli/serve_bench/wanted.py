"""From flags to a load: what to send, whom to ask, what to keep."""

from dataclasses import asdict, dataclass
from pathlib import Path

from kvtide.cli.options import chosen
from kvtide.cli.serve_bench.dialogue import Api
from kvtide.cli.serve_bench.figures import Targets
from kvtide.cli.serve_bench.traces import Scale, of_trace
from kvtide.cli.serve_bench.workload import Conversation, Mix, fitted, of_mix, poisson
from kvtide.runtime import ConfigError
from kvtide.sim.hit_rates import read_trace

USUAL_CONVERSATIONS = 100
_PRIVATE = ("api_key", "out", "json", "metrics", "state_dir")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """``kvtide bench serve``'s, by name and as given; ``--help`` says what each means."""

    url: str
    concurrency: int | None
    rate: float | None
    trace: Path | None
    speed: float
    length_scale: float
    sample: float
    skip: int
    requests: int
    span_s: float | None
    prompt_tokens: int
    output_tokens: int
    spread: float
    prefixes: int
    prefix_tokens: int
    zipf: float
    turns: int
    think_s: float
    max_tokens: int
    max_output_tokens: int
    api: str
    model: str
    api_key: str
    ignore_eos: bool
    timeout_s: float
    max_open: int
    warmup: int
    ttft_ms: float | None
    tbt_ms: float | None
    tell_targets: bool
    metrics: list[str] | None
    state_dir: Path | None
    seed: int
    out: Path | None
    json: bool

    @property
    def shown(self) -> dict[str, str]:
        """For a report: enough to ask for the same again, and no secret."""
        return {
            f"--{name.replace('_', '-')}": str(value)
            for name, value in asdict(self).items()
            if value is not None and name not in _PRIVATE
        }

    @property
    def targets(self) -> Targets:
        """What a good answer meets."""
        return Targets(self.ttft_ms, self.tbt_ms)

    def which_api(self) -> Api:
        """The API to ask.

        Raises:
            ConfigError: there is none of that name.
        """
        return chosen(Api, self.api, "api")

    def conversations(self) -> tuple[tuple[Conversation, ...], int]:
        """What to send, and how many turns were cut to fit the context.

        Raises:
            ConfigError: flags that don't go together.
            TraceError: a trace that can't be read.
        """
        made = self._of_rules() if self.trace is None else self._of_trace(self.trace)
        if self.span_s is not None:
            made = tuple(each for each in made if each.at_s <= self.span_s)
        if not made:
            raise ConfigError("no request is left to send", key="requests")
        return fitted(made, self.max_tokens, self.max_output_tokens)

    def _of_rules(self) -> tuple[Conversation, ...]:
        if (self.rate is None) == (self.concurrency is None):
            message = "say when to ask: one of --concurrency, --rate and --trace"
            raise ConfigError(message, key="concurrency")
        mix = Mix(
            conversations=self.requests or USUAL_CONVERSATIONS,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            spread=self.spread,
            prefixes=self.prefixes,
            prefix_tokens=self.prefix_tokens,
            zipf=self.zipf,
            turns=self.turns,
            think_s=self.think_s,
        )
        made = of_mix(mix, self.seed)
        return made if self.rate is None else poisson(made, self.rate, self.seed)

    def _of_trace(self, path: Path) -> tuple[Conversation, ...]:
        if self.rate is not None:
            message = "a trace has arrivals of its own: scale them with --speed"
            raise ConfigError(message, key="rate")
        scale = Scale(
            self.speed, self.length_scale, self.sample, self.skip, self.requests
        )
        return of_trace(read_trace(path), scale)
