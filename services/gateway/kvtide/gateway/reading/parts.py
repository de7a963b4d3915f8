"""The parts of an answer, in order. Pieces of the same kind belong together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """More of what the model says to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model says to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a tool; ``call`` numbers the calls of an answer from 0."""

    call: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, which together are JSON if the model kept to it."""

    call: int
    text: str


Part = Content | Reasoning | CallBegun | Arguments
