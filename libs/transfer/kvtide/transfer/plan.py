"""How a batch is cut into the requests that go out; pure."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

REQUEST_BYTES = 2 << 20
"""A request holds at most this much, unless a single piece is larger."""

PIECES_PER_REQUEST = 512
"""And at most this many pieces."""

PIECE_BYTES = 16 << 20
"""A slice is cut into pieces of this size, so that several rails can share it."""

SHARED_BYTES = 2 << 20
"""And of this size where a peer has several hosts: they differ, so smaller is fairer."""


class Piece(NamedTuple):
    """A range of one slice: ``length`` bytes from ``start`` on."""

    slice_index: int
    start: int
    length: int


def cut(lengths: Sequence[int], piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Cut slices of these lengths into pieces of nearly equal size, in order.

    Every byte is in exactly one piece; none is longer than ``piece_bytes``; an empty
    slice has one empty piece. A slice of up to ``piece_bytes`` stays whole.
    """
    pieces: list[Piece] = []
    for index, length in enumerate(lengths):
        if length <= piece_bytes:
            pieces.append(Piece(index, 0, length))
            continue
        count = -(-length // piece_bytes)
        bounds = [length * at // count for at in range(count + 1)]
        pieces.extend(
            Piece(index, bounds[at], bounds[at + 1] - bounds[at]) for at in range(count)
        )
    return pieces


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
