"""What is going to be asked and when: conversations, made by rule from a seed."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvtide.cli.serve_bench.words import Kind, Piece


@dataclass(frozen=True, slots=True)
class Ask:
    """What a turn adds to its conversation, and how much is to be answered.

    ``think_s`` passes between the end of the answer before and this turn.
    """

    pieces: tuple[Piece, ...]
    output_tokens: int
    think_s: float = 0.0

    @property
    def words(self) -> int:
        """Of the text that this turn adds."""
        return sum(piece.words for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that are asked one after the other, the first at ``at_s``.

    ``at_s`` counts from the start of the load; a load of fixed concurrency ignores it.
    """

    number: int
    at_s: float
    turns: tuple[Ask, ...]


@dataclass(frozen=True, slots=True)
class Mix:
    """Rules for a load.

    ``conversations`` of ``turns`` turns. The first prompt is a prefix that one of
    ``prefixes`` gives (Zipf with exponent ``zipf``; none if ``prefix_tokens`` is 0)
    and own text; each later turn adds text to all before. Lengths are log-normal with
    these means and ``spread``, or exact where that is 0; pauses are exponential with
    mean ``think_s``.
    """

    conversations: int
    prompt_tokens: int
    output_tokens: int
    spread: float = 0.0
    prefixes: int = 1
    prefix_tokens: int = 0
    zipf: float = 1.0
    turns: int = 1
    think_s: float = 0.0


def of_mix(mix: Mix, seed: int) -> tuple[Conversation, ...]:
    """Conversations by the rules, all at 0 s; equal seeds mean equal ones."""
    return tuple(_made(mix, np.random.default_rng((seed, 0))))


def _made(mix: Mix, draw: np.random.Generator) -> Iterator[Conversation]:
    weights = 1 / np.arange(1, max(1, mix.prefixes) + 1) ** mix.zipf
    weights /= weights.sum()
    key = 0
    for number in range(mix.conversations):
        prefix: tuple[Piece, ...] = ()
        which = int(draw.choice(len(weights), p=weights))
        if mix.prefix_tokens:
            prefix = (Piece(Kind.PREFIX, which, mix.prefix_tokens),)
        turns: list[Ask] = []
        for turn in range(mix.turns):
            own = Piece(Kind.OWN, key, _length(draw, mix.prompt_tokens, mix.spread))
            pause_s = float(draw.exponential(mix.think_s)) if turn else 0.0
            output = _length(draw, mix.output_tokens, mix.spread)
            turns.append(Ask((*prefix, own), output, pause_s))
            prefix = ()
            key += 1
        yield Conversation(number, 0.0, tuple(turns))


def _length(draw: np.random.Generator, mean: float, spread: float) -> int:
    if not spread:
        return max(1, round(mean))
    middle = math.log(max(1.0, mean)) - spread * spread / 2
    return max(1, round(float(draw.lognormal(middle, spread))))


def poisson(
    conversations: Iterable[Conversation], per_s: float, seed: int
) -> tuple[Conversation, ...]:
    """The same, begun as a Poisson process of ``per_s`` conversations a second."""
    draw = np.random.default_rng((seed, 1))
    at_s, begun = 0.0, list[Conversation]()
    for each in conversations:
        at_s += float(draw.exponential(1 / per_s))
        begun.append(replace(each, at_s=at_s))
    return tuple(begun)


def fitted(
    conversations: Sequence[Conversation], most_tokens: int, most_output: int
) -> tuple[tuple[Conversation, ...], int]:
    """Those within a context of ``most_tokens``, and how many turns were cut.

    Answers are at most ``most_output`` long, and at most half the context. A
    conversation ends before the turn that would not fit; if that is its first, the
    prompt loses its end.
    """
    kept, cut = list[Conversation](), 0
    limit = max(1, min(most_output, most_tokens // 2))
    for each in conversations:
        total, turns = 0, list[Ask]()
        for ask in each.turns:
            shorter = replace(ask, output_tokens=min(ask.output_tokens, limit))
            total += shorter.words + shorter.output_tokens
            if total > most_tokens:
                cut += len(each.turns) - len(turns)
                break
            turns.append(shorter)
        if not turns:
            turns = [_without_end(each.turns[0], most_tokens, limit)]
        kept.append(replace(each, turns=tuple(turns)))
    return tuple(kept), cut


def _without_end(ask: Ask, most_tokens: int, most_output: int) -> Ask:
    output = min(ask.output_tokens, most_output)
    left = max(1, most_tokens - output)
    pieces: list[Piece] = []
    for piece in ask.pieces:
        if left <= 0:
            break
        pieces.append(replace(piece, words=min(piece.words, left)))
        left -= piece.words
    return replace(ask, pieces=tuple(pieces), output_tokens=output)
