"""Requests to be simulated: a trace, scaled in rate, or made by rule from a seed."""

import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from kvtide.runtime import ConfigError
from kvtide.sim.hit_rates import TraceRequest, read_trace


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request: when it comes, how long it is, and an id for each full block."""

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


class SyntheticText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Conversations that begin as a Poisson process.

    Each is of ``turns`` turns with ``think_s`` between them (exponential, from the
    arrival of the one before). The first prompt is a prefix that one of
    ``shared_prefixes`` gives (Zipf) and own tokens; each later one repeats all before.
    Lengths are log-normal with these means.
    """

    requests: int
    requests_per_s: float
    prompt_tokens: float
    output_tokens: float
    spread: float = 0.5
    shared_prefixes: int = 0
    shared_tokens: int = 0
    zipf: float = 1.0
    turns: int = 1
    think_s: float = 30.0
    most_prompt_tokens: int = 131_072


def read_workload(
    path: Path, block_tokens: int, *, rate: float = 1.0, seed: int = 0
) -> list[SimRequest]:
    """A trace in JSON lines, or a TOML that describes one; ``rate`` makes it denser.

    Raises:
        ConfigError: a TOML that can't be read, or a rate that isn't above zero.
        TraceError: a trace that can't be read.
    """
    if not rate > 0:
        raise ConfigError(f"--rate {rate} must be above zero", key="rate")
    if path.suffix == ".toml":
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
            text = msgspec.convert(table, SyntheticText)
        except (OSError, ValueError) as error:
            message = f"{path} is no workload: {error}"
            raise ConfigError(message, key="workload") from error
        return list(synthetic(text, block_tokens, rate=rate, seed=seed))
    return of_trace(read_trace(path), block_tokens, rate=rate)


def of_trace(
    trace: list[TraceRequest], block_tokens: int, *, rate: float = 1.0
) -> list[SimRequest]:
    """Arrivals ``rate`` times as dense; ids of the last, unfinished block left out."""
    ordered = sorted(trace, key=lambda request: request.timestamp)
    first = ordered[0].timestamp if ordered else 0.0
    return [
        SimRequest(
            number,
            (request.timestamp - first) / 1000 / rate,
            request.input_length,
            max(1, request.output_length),
            request.hash_ids[: request.input_length // block_tokens],
        )
        for number, request in enumerate(ordered)
    ]


def synthetic(
    text: SyntheticText, block_tokens: int, *, rate: float, seed: int
) -> Iterator[SimRequest]:
    """The requests that a description means; equal seeds mean equal ones."""
    draw = np.random.default_rng(seed)
    made = sorted(_conversations(text, block_tokens, rate, draw), key=_arrival)
    for number, request in enumerate(made[: text.requests]):
        yield replace(request, number=number)


def _arrival(request: SimRequest) -> tuple[float, int]:
    return request.at_s, request.number


def _conversations(
    text: SyntheticText, block_tokens: int, rate: float, draw: np.random.Generator
) -> Iterator[SimRequest]:
    turns = max(1, text.turns)
    begun = -(-text.requests // turns)
    at_s, block, number = 0.0, 1 << 32, 0
    weights = 1 / np.arange(1, max(1, text.shared_prefixes) + 1) ** text.zipf
    weights /= weights.sum()
    prefix_blocks = text.shared_tokens // block_tokens
    for _ in range(begun):
        at_s += float(draw.exponential(turns / (text.requests_per_s * rate)))
        which = int(draw.choice(len(weights), p=weights))
        shared = prefix_blocks if text.shared_prefixes else 0
        blocks = tuple(which * prefix_blocks + n for n in range(shared))
        tokens, turn_s = shared * block_tokens, at_s
        for _turn in range(turns):
            tokens += _length(draw, text.prompt_tokens, text.spread)
            tokens = min(tokens, text.most_prompt_tokens)
            more = tokens // block_tokens - len(blocks)
            blocks += tuple(range(block, block + max(0, more)))
            block += max(0, more)
            output = _length(draw, text.output_tokens, text.spread)
            yield SimRequest(number, turn_s, tokens, output, blocks)
            number += 1
            tokens += output
            turn_s += float(draw.exponential(text.think_s))


def _length(draw: np.random.Generator, mean: float, spread: float) -> int:
    middle = math.log(max(1.0, mean)) - spread * spread / 2
    drawn = float(draw.lognormal(middle, spread))
    return max(1, int(drawn))
