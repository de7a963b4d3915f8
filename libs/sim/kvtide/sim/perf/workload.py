"""Requests to be simulated: a trace, scaled in rate, or made by rule from a seed."""

import math
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice
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


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Requests by rule: made anew, and the same, whenever they are walked through."""

    text: SyntheticText
    block_tokens: int
    rate: float
    seed: int

    def __iter__(self) -> Iterator[SimRequest]:
        """See ``synthetic``."""
        return synthetic(self.text, self.block_tokens, rate=self.rate, seed=self.seed)


def read_workload(
    path: Path, block_tokens: int, *, rate: float = 1.0, seed: int = 0
) -> Iterable[SimRequest]:
    """A trace in JSON lines, or a TOML that describes one; ``rate`` makes it denser.

    Can be walked through more than once; what a TOML describes is never in memory whole.

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
        except (OSError, ValueError, RecursionError) as error:
            message = f"{path} is no workload: {error}"
            raise ConfigError(message, key="workload") from error
        return Synthetic(text, block_tokens, rate, seed)
    return of_trace(read_trace(path), block_tokens, rate=rate)


def of_trace(
    trace: list[TraceRequest], block_tokens: int, *, rate: float = 1.0
) -> list[SimRequest]:
    """Arrivals ``rate`` times as dense; ids of the last, unfinished block left out.

    Blocks of ``block_tokens`` are made of the trace's smaller ones: ids are those of
    chains, so the last of them names all.

    Raises:
        ConfigError: the trace's blocks don't make up blocks of that size.
    """
    ordered = sorted(trace, key=lambda request: request.timestamp)
    first = ordered[0].timestamp if ordered else 0.0
    return [
        SimRequest(
            number,
            (request.timestamp - first) / 1000 / rate,
            request.input_length,
            max(1, request.output_length),
            _whole_blocks(request, block_tokens),
        )
        for number, request in enumerate(ordered)
    ]


def _whole_blocks(request: TraceRequest, block_tokens: int) -> tuple[int, ...]:
    parts, rest = divmod(block_tokens, max(1, request.block_tokens))
    if rest or not parts:
        message = (
            f"the trace has blocks of {request.block_tokens} tokens: give the cluster's "
            f"model.block_tokens a multiple of it instead of {block_tokens}"
        )
        raise ConfigError(message, key="model.block_tokens")
    full = request.input_length // block_tokens
    return request.hash_ids[parts - 1 :: parts][:full]


def synthetic(
    text: SyntheticText, block_tokens: int, *, rate: float, seed: int
) -> Iterator[SimRequest]:
    """The requests that a description means; equal seeds mean equal ones.

    In order of arrival; only conversations that are under way are in memory.
    """
    return islice(_merged(text, block_tokens, rate, seed), text.requests)


def _merged(
    text: SyntheticText, block_tokens: int, rate: float, seed: int
) -> Iterator[SimRequest]:
    draw = np.random.default_rng(seed)
    number = 0
    ahead: list[tuple[float, int, SimRequest]] = []
    for turns in _conversations(text, block_tokens, rate, draw):
        while ahead and ahead[0][0] <= turns[0].at_s:
            yield replace(heappop(ahead)[2], number=number)
            number += 1
        for turn in turns:
            heappush(ahead, (turn.at_s, turn.number, turn))
    while ahead:
        yield replace(heappop(ahead)[2], number=number)
        number += 1


def _conversations(
    text: SyntheticText, block_tokens: int, rate: float, draw: np.random.Generator
) -> Iterator[list[SimRequest]]:
    """Each one's turns, in the order in which conversations begin."""
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
        made: list[SimRequest] = []
        for _turn in range(turns):
            tokens += _length(draw, text.prompt_tokens, text.spread)
            tokens = min(tokens, text.most_prompt_tokens)
            more = tokens // block_tokens - len(blocks)
            blocks += tuple(range(block, block + max(0, more)))
            block += max(0, more)
            output = _length(draw, text.output_tokens, text.spread)
            made.append(SimRequest(number, turn_s, tokens, output, blocks))
            number += 1
            tokens += output
            turn_s += float(draw.exponential(text.think_s))
        yield made


def _length(draw: np.random.Generator, mean: float, spread: float) -> int:
    middle = math.log(max(1.0, mean)) - spread * spread / 2
    drawn = float(draw.lognormal(middle, spread))
    return max(1, int(drawn))
