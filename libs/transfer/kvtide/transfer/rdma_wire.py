"""The bodies of the frames about RDMA; pure."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.transfer.verbs import PairAddress
from kvtide.transfer.wire import LANE_BYTES, Ask, FrameError, pack_ask, unpack_ask

_PAIR = struct.Struct(f"<BII{LANE_BYTES}s")
_DIGESTS = struct.Struct("<H")
_REACH = struct.Struct("<QQdBB")
MOST_GID_BYTES = 64
MOST_DEVICES = 16


@dataclass(frozen=True, slots=True)
class Reach:
    """Where a region lies for RDMA, with a key for each of the owner's devices."""

    address: int
    length: int
    expires_in_s: float | None
    keys: tuple[int, ...]


def pack_pair(device: int, address: PairAddress, lane: bytes) -> bytes:
    """One end of a queue pair on the owner's ``device``-th device.

    ``lane`` names the connection: see ``fence``.
    """
    head = _PAIR.pack(device, address.number, address.sequence, lane)
    return head + address.gid.encode()


def unpack_pair(body: bytes) -> tuple[int, PairAddress, bytes]:
    """(device, end, lane). Raise FrameError unless the body is well-formed."""
    if not _PAIR.size < len(body) <= _PAIR.size + MOST_GID_BYTES:
        raise FrameError("a malformed queue pair")
    device, number, sequence, lane = _PAIR.unpack_from(body)
    gid = body[_PAIR.size :].decode("ascii", "replace")
    return device, PairAddress(number, sequence, gid), lane


def pack_reach(reach: Reach) -> bytes:
    """The answer to a request for a region's keys."""
    lasts = reach.expires_in_s is not None
    keys = struct.pack(f"<{len(reach.keys)}I", *reach.keys)
    return (
        _REACH.pack(
            reach.address,
            reach.length,
            reach.expires_in_s or 0.0,
            lasts,
            len(reach.keys),
        )
        + keys
    )


def unpack_reach(body: bytes) -> Reach:
    """Raise FrameError unless the body is well-formed."""
    if len(body) < _REACH.size:
        raise FrameError("a malformed answer")
    address, length, expires_in_s, lasts, count = _REACH.unpack_from(body)
    if count > MOST_DEVICES or len(body) != _REACH.size + 4 * count:
        raise FrameError("a malformed answer")
    keys = struct.unpack_from(f"<{count}I", body, _REACH.size)
    return Reach(address, length, expires_in_s if lasts else None, keys)


def pack_check(ask: Ask, digests: Sequence[int]) -> bytes:
    """The question whether what was written has these xxh3, one for each piece."""
    count = len(digests)
    return struct.pack(f"<H{count}Q", count, *digests) + pack_ask(ask)


def unpack_check(body: bytes) -> tuple[Ask, tuple[int, ...]]:
    """Raise FrameError unless the body is well-formed."""
    if len(body) < _DIGESTS.size:
        raise FrameError("a malformed request")
    (count,) = _DIGESTS.unpack_from(body)
    end = _DIGESTS.size + 8 * count
    if len(body) < end:
        raise FrameError("a malformed request")
    digests = struct.unpack_from(f"<{count}Q", body, _DIGESTS.size)
    ask = unpack_ask(body[end:])
    if len(ask.pieces) != count:
        raise FrameError("a malformed request")
    return ask, digests
