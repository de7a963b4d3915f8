"""A public trace as a load: scaled in rate and in length."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.cli.serve_bench.words import Kind, Piece
from kvtide.cli.serve_bench.workload import Ask, Conversation
from kvtide.sim.hit_rates import BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True, slots=True)
class Scale:
    """``speed`` times as dense, ``length`` times as long in tokens.

    Of the trace, in the order of arrival, a ``sample`` of the conversations is kept
    whole; of those requests, ``skip`` are left out and then ``requests`` taken; 0 means
    all. Requests whose prompts share their second block are one conversation: all begin
    with the same first one.
    """

    speed: float = 1.0
    length: float = 1.0
    sample: float = 1.0
    skip: int = 0
    requests: int = 0


def of_trace(trace: Sequence[TraceRequest], scale: Scale) -> tuple[Conversation, ...]:
    """A conversation of one turn for each request.

    Prompts begin alike as far as the trace's block ids are equal: a block of 512
    tokens becomes one of ``512 * scale.length``, at least 1. A prompt is never longer
    than its scaled length, but for that.
    """
    ordered = sorted(trace, key=lambda request: request.timestamp)
    kept = [each for each in ordered if _is_sampled(each, scale.sample)]
    chosen = kept[scale.skip :][: scale.requests or None]
    first_ms = chosen[0].timestamp if chosen else 0.0
    return tuple(
        Conversation(
            number,
            (request.timestamp - first_ms) / 1000 / scale.speed,
            (Ask(_pieces(request, number, scale.length), _output(request, scale)),),
        )
        for number, request in enumerate(chosen)
    )


def _is_sampled(request: TraceRequest, share: float) -> bool:
    name = ",".join(map(str, request.hash_ids[1:2] or request.hash_ids))
    return zlib.crc32(name.encode()) < share * (1 << 32)


def _output(request: TraceRequest, scale: Scale) -> int:
    return max(1, round(request.output_length * scale.length))


def _pieces(request: TraceRequest, number: int, length: float) -> tuple[Piece, ...]:
    block = max(1, round(BLOCK_TOKENS * length))
    left = max(1, round(request.input_length * length))
    pieces: list[Piece] = []
    for key in request.hash_ids:
        if left <= 0:
            break
        pieces.append(Piece(Kind.TRACE, key, min(block, left)))
        left -= block
    if left > 0:  # no ids for the end of it: nobody else's text
        pieces.append(Piece(Kind.OWN, number, left))
    return tuple(pieces)
