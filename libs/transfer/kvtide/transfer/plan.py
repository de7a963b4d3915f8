"""How a batch is cut into the requests that go out; pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

REQUEST_BYTES = 2 << 20
"""A request holds at most this much, unless a single piece is larger."""

PIECES_PER_REQUEST = 512
"""And at most this many pieces."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of one slice: ``length`` bytes from ``start`` on."""

    slice_index: int
    start: int
    length: int


def group(
    pieces: Sequence[Piece],
    *,
    request_bytes: int = REQUEST_BYTES,
    most_pieces: int = PIECES_PER_REQUEST,
) -> Iterator[list[Piece]]:
    """Pieces in order, in lists that keep both limits (one piece may pass the first).

    Every piece is in exactly one list; no list is empty.
    """
    current: list[Piece] = []
    size = 0
    for piece in pieces:
        full = size + piece.length > request_bytes or len(current) == most_pieces
        if current and full:
            yield current
            current, size = [], 0
        current.append(piece)
        size += piece.length
    if current:
        yield current


def whole_slices(lengths: Sequence[int]) -> list[Piece]:
    """One piece for each slice."""
    return [Piece(index, 0, length) for index, length in enumerate(lengths)]
