"""An answer's text as what it means: reasoning, content, calls of tools. Pure."""

from kvtide.gateway.reading.blocks import (
    Block,
    BlockKind,
    Blocks,
    Change,
    Closed,
    Grown,
    Opened,
)
from kvtide.gateway.reading.calls import CallFormat, CallReader
from kvtide.gateway.reading.hermes import CALL_END, CALL_START, HermesCalls
from kvtide.gateway.reading.llama import LlamaCalls
from kvtide.gateway.reading.parts import (
    Arguments,
    CallBegun,
    Content,
    Part,
    Reasoning,
)
from kvtide.gateway.reading.reader import AnswerReader, reader_of
from kvtide.gateway.reading.reasoning import (
    THINK_END,
    THINK_START,
    ReasoningSplit,
    Thinking,
)

TAGS = frozenset((THINK_START, THINK_END, CALL_START, CALL_END))
"""What marks the parts of an answer, in models for which each is one token."""

__all__ = [
    "CALL_END",
    "CALL_START",
    "TAGS",
    "THINK_END",
    "THINK_START",
    "AnswerReader",
    "Arguments",
    "Block",
    "BlockKind",
    "Blocks",
    "CallBegun",
    "CallFormat",
    "CallReader",
    "Change",
    "Closed",
    "Content",
    "Grown",
    "HermesCalls",
    "LlamaCalls",
    "Opened",
    "Part",
    "Reasoning",
    "ReasoningSplit",
    "Thinking",
    "reader_of",
]
