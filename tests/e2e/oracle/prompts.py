"""Prompts of exact lengths, plain English, the same on every run."""

from collections.abc import Callable, Sequence
from itertools import count, islice
from typing import Final

Encode = Callable[[str], Sequence[int]]

_WHO: Final = (
    "The harbour master",
    "An old gardener",
    "The night nurse",
    "A travelling clockmaker",
    "Our neighbour's daughter",
    "The youngest surveyor",
    "A retired pilot",
)
_DID: Final = (
    "wrote down",
    "carefully measured",
    "forgot to mention",
    "explained to the children",
    "sold to a stranger",
)
_WHAT: Final = (
    "the height of the spring tide",
    "how bread is baked in the mountains",
    "a map of the northern islands",
    "three rules for growing pears",
    "the history of the stone bridge",
    "why the lighthouse was moved",
    "a recipe for fish soup",
    "the price of copper wire",
    "the names of twelve winds",
    "how to repair a broken compass",
    "the letters of a forgotten poet",
)


def sentence(number: int) -> str:
    """One of 385 sentences, a number in it; neighbours differ in every part."""
    who = _WHO[number % len(_WHO)]
    did = _DID[number % len(_DID)]
    what = _WHAT[number % len(_WHAT)]
    return f"{who} {did} {what} on day {number + 1}."


def text_tokens(encode: Encode, tokens: int, first_sentence: int = 0) -> list[int]:
    """Token ids of running text, exactly this many."""
    ids: list[int] = []
    for number in count(first_sentence):
        ids.extend(encode(f" {sentence(number)}"))
        if len(ids) >= tokens:
            return list(islice(ids, tokens))
    raise AssertionError
