"""An answer as blocks that grow one after another: what every API's stream tells."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from kvtide.gateway.reading.parts import (
    Arguments,
    CallBegun,
    Content,
    Part,
    Reasoning,
)


class BlockKind(StrEnum):
    """What a block holds."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """One block; ``index`` counts blocks, ``call`` counts calls.

    The text of a call is its arguments, ``name`` its tool's.
    """

    index: int
    kind: BlockKind
    name: str = ""
    call: int = -1
    pieces: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    """The open block got more text."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The block is whole."""

    block: Block


Change = Opened | Grown | Closed


class Blocks:
    """The blocks of one answer. At most one, the last, is open."""

    def __init__(self) -> None:
        """None yet."""
        self.all: list[Block] = []
        self._open = False

    @property
    def has_calls(self) -> bool:
        """Whether the model has called a tool."""
        return any(block.kind is BlockKind.CALL for block in self.all)

    @property
    def has_reasoning(self) -> bool:
        """Whether the model has thought."""
        return any(block.kind is BlockKind.REASONING for block in self.all)

    def text_of(self, kind: BlockKind) -> str:
        """The text of all blocks of a kind."""
        return "".join(block.text for block in self.all if block.kind is kind)

    def add(self, parts: Iterable[Part]) -> list[Change]:
        """What more parts change, in order."""
        changes: list[Change] = []
        for part in parts:
            match part:
                case CallBegun():
                    changes += self._begin(BlockKind.CALL, part.name, part.call)
                case Arguments():
                    changes.append(self._grow(part.text))
                case Content():
                    changes += self._more(BlockKind.CONTENT, part.text)
                case Reasoning():
                    changes += self._more(BlockKind.REASONING, part.text)
        return changes

    def close(self) -> list[Change]:
        """No part comes any more to the open block."""
        if not self._open:
            return []
        self._open = False
        return [Closed(self.all[-1])]

    def _more(self, kind: BlockKind, text: str) -> list[Change]:
        if self._open and self.all[-1].kind is kind:
            return [self._grow(text)]
        return [*self._begin(kind), self._grow(text)]

    def _begin(self, kind: BlockKind, name: str = "", call: int = -1) -> list[Change]:
        closed = self.close()
        block = Block(len(self.all), kind, name, call)
        self.all.append(block)
        self._open = True
        return [*closed, Opened(block)]

    def _grow(self, text: str) -> Change:
        block = self.all[-1]
        block.pieces.append(text)
        return Grown(block, text)
