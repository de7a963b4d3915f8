"""The frames between two endpoints; pure.

A frame is a fixed head, a body of at most 128 KiB, and for reads and writes the
bytes of all pieces followed by their xxh3 (8 bytes each). The head carries a MAC of
head and body with the connection's key, so that a frame can be neither forged,
replayed, nor misread after a flipped bit. All numbers are little-endian.

    head   magic 4  version 1  kind 1  status 1  spare 1  body_length 4  id 8  mac 16
"""

import hmac
import struct
from collections.abc import Sequence
from enum import IntEnum
from hashlib import blake2b
from itertools import starmap
from typing import NamedTuple

from kvtide.transfer.capability import CAPABILITY_BYTES
from kvtide.transfer.errors import (
    AccessDenied,
    Corrupt,
    OutOfBounds,
    Refused,
    StaleEpoch,
    TimedOut,
    TransferError,
    Unreachable,
)
from kvtide.transfer.handles import PROTOCOL, RegionHandle
from kvtide.transfer.plan import PIECES_PER_REQUEST

MAGIC = b"KVT1"
MOST_BODY_BYTES = 128 << 10
_HEAD = struct.Struct("<4sBBBBIQ")
_MAC_BYTES = 16
HEAD_BYTES = _HEAD.size + _MAC_BYTES
_COUNTS = struct.Struct("<HHBBH")
LANE_BYTES = 16
MOST_LANES = 1024
_GRANT = struct.Struct(f"<Q{CAPABILITY_BYTES}s")
_PIECE = struct.Struct("<HQQ")
_FAULT = struct.Struct("<i")
_MAPPED = struct.Struct("<QdB")
MOST_PURPOSE_BYTES = 64
MOST_TRACE_BYTES = 64
MOST_NAME_BYTES = 16 << 10
"""A path has at most 4,096 bytes, each of three characters in a name."""


class Kind(IntEnum):
    """What a frame asks or says."""

    READ = 1
    WRITE = 2
    MAP = 3
    PING = 4
    REGION_GONE = 5
    RDMA_DEVICES = 6
    RDMA_PAIR = 7
    RDMA_REACH = 8
    NOTIFY = 9
    WAYS = 10
    RDMA_CHECK = 11
    FENCE = 12
    ENGINE_NAME = 13
    ENGINE_OPEN = 14
    ENGINE_READ = 15
    ANSWER = 16
    ENGINE_WRITE = 17


class Status(IntEnum):
    """How an answered request went."""

    OK = 0
    REFUSED = 1
    ACCESS_DENIED = 2
    OUT_OF_BOUNDS = 3
    CORRUPT = 4
    STALE_EPOCH = 5
    TIMED_OUT = 6
    UNREACHABLE = 7


_KINDS = {int(kind): kind for kind in Kind}
_KNOWN_STATUSES = {int(status): status for status in Status}
_ERRORS: dict[Status, type[TransferError]] = {
    Status.REFUSED: Refused,
    Status.ACCESS_DENIED: AccessDenied,
    Status.OUT_OF_BOUNDS: OutOfBounds,
    Status.CORRUPT: Corrupt,
    Status.STALE_EPOCH: StaleEpoch,
    Status.TIMED_OUT: TimedOut,
    Status.UNREACHABLE: Unreachable,
}
_STATUSES = {error: status for status, error in _ERRORS.items()}


class FrameError(Refused):
    """What came is not a frame of ours, or was changed on the way."""


class Head(NamedTuple):
    """The checked head of a frame."""

    kind: Kind
    status: Status
    body_length: int
    request_id: int
    mac: bytes
    packed: bytes


def pack(
    key: bytes, kind: Kind, request_id: int, body: bytes, status: Status = Status.OK
) -> bytes:
    """Head and body of a frame."""
    head = _HEAD.pack(MAGIC, PROTOCOL, kind, status, 0, len(body), request_id)
    return head + _mac(key, head, body) + body


def unpack_head(data: bytes | bytearray | memoryview) -> Head:
    """Read ``HEAD_BYTES``; lengths are within limits, the MAC is not yet checked.

    Raises:
        FrameError: not a frame of this protocol version.
    """
    packed = bytes(data[: _HEAD.size])
    magic, version, kind, status, _, length, request_id = _HEAD.unpack(packed)
    if magic != MAGIC or version != PROTOCOL:
        raise FrameError("not a frame of this protocol")
    if length > MOST_BODY_BYTES:
        raise FrameError(f"a frame's body of {length} bytes is too long")
    known_kind, known_status = _KINDS.get(kind), _KNOWN_STATUSES.get(status)
    if known_kind is None or known_status is None:
        raise FrameError(f"unknown frame {kind}, {status}")
    mac = bytes(data[_HEAD.size : HEAD_BYTES])
    return Head(known_kind, known_status, length, request_id, mac, packed)


def verify(key: bytes, head: Head, body: bytes) -> None:
    """Raise FrameError unless head and body are as the peer made them."""
    if not hmac.compare_digest(head.mac, _mac(key, head.packed, body)):
        raise FrameError("a frame's MAC is wrong")


def _mac(key: bytes, head: bytes, body: bytes) -> bytes:
    return blake2b(head + body, key=key, digest_size=_MAC_BYTES).digest()


class Ask(NamedTuple):
    """The body of READ, WRITE and MAP: ranges of regions, and the right to each.

    ``trace`` is a W3C traceparent, "" without one.

    ``pieces`` are (index in ``grants``, offset, length); MAP has none.

    ``lanes``, of WRITE alone, are connections that the writer gave up: the owner takes
    no byte from them any more before it takes one of this request.
    """

    grants: Sequence[tuple[int, bytes]]
    pieces: Sequence[tuple[int, int, int]]
    purpose: str
    trace: str = ""
    lanes: Sequence[bytes] = ()


def pack_ask(ask: Ask) -> bytes:
    """The body for ``unpack_ask``."""
    purpose = ask.purpose.encode()[:MOST_PURPOSE_BYTES]
    trace = ask.trace.encode()[:MOST_TRACE_BYTES]
    return b"".join(
        [
            _COUNTS.pack(
                len(ask.grants),
                len(ask.pieces),
                len(purpose),
                len(trace),
                len(ask.lanes),
            ),
            purpose,
            trace,
            *ask.lanes,
            *starmap(_GRANT.pack, ask.grants),
            *starmap(_PIECE.pack, ask.pieces),
        ]
    )


def ask_start(region: int, capability: bytes, purpose: str) -> bytes:
    """How the bodies of all requests begin that ask for one piece by this right."""
    return pack_ask(Ask([(region, capability)], [(0, 0, 0)], purpose))[: -_PIECE.size]


def pack_read(
    key: bytes, request_id: int, start: bytes, offset: int, length: int
) -> bytes:
    """A READ frame for one piece; ``start`` is of ``ask_start``."""
    body = start + _PIECE.pack(0, offset, length)
    head = _HEAD.pack(MAGIC, PROTOCOL, Kind.READ, 0, 0, len(body), request_id)
    mac = blake2b(head + body, key=key, digest_size=_MAC_BYTES).digest()
    return b"".join((head, mac, body))


def pack_good(key: bytes, request_id: int) -> bytes:
    """The ANSWER frame that says that all is well."""
    head = _HEAD.pack(MAGIC, PROTOCOL, Kind.ANSWER, 0, 0, 0, request_id)
    return head + blake2b(head, key=key, digest_size=_MAC_BYTES).digest()


def split_ask(body: bytes) -> tuple[bytes, int, int, int]:
    """``ask_start``, and (grant, offset, length) of the last piece, if it is an Ask.

    Raises:
        FrameError: the body is too short.
    """
    if len(body) < _PIECE.size:
        raise FrameError("a request has the wrong length")
    return (body[: -_PIECE.size], *_PIECE.unpack_from(body, len(body) - _PIECE.size))


def unpack_lanes(body: bytes) -> tuple[bytes, ...]:
    """The body of FENCE: connections that were given up; see ``Ask``."""
    if len(body) % LANE_BYTES or len(body) > MOST_LANES * LANE_BYTES:
        raise FrameError("a malformed request")
    return tuple(body[at : at + LANE_BYTES] for at in range(0, len(body), LANE_BYTES))


def unpack_ask(body: bytes) -> Ask:
    """Raise FrameError unless the body is exactly a well-formed Ask."""
    try:
        counts = _COUNTS.unpack_from(body)
        grant_count, piece_count, purpose_size, trace_size, lane_count = counts
        trace_at = _COUNTS.size + purpose_size
        lanes_at = trace_at + trace_size
        grants_at = lanes_at + lane_count * LANE_BYTES
        pieces_at = grants_at + grant_count * _GRANT.size
        if piece_count > PIECES_PER_REQUEST or grant_count > PIECES_PER_REQUEST:
            raise FrameError("too many pieces in a request")
        if lane_count > MOST_LANES:
            raise FrameError("too many connections in a request")
        if len(body) != pieces_at + piece_count * _PIECE.size:
            raise FrameError("a request has the wrong length")
        grants = list(_GRANT.iter_unpack(body[grants_at:pieces_at]))
        pieces = list(_PIECE.iter_unpack(body[pieces_at:]))
        purpose = body[_COUNTS.size : trace_at].decode("ascii", "replace")
        trace = body[trace_at:lanes_at].decode("ascii", "replace")
        starts = range(lanes_at, grants_at, LANE_BYTES)
        lanes = tuple(body[at : at + LANE_BYTES] for at in starts)
    except struct.error as error:
        raise FrameError(f"a request is malformed: {error}") from error
    if pieces and max(pieces)[0] >= grant_count:
        raise FrameError("a piece names no grant")
    return Ask(grants, pieces, purpose, trace, lanes)


def pack_fault(error: TransferError) -> tuple[Status, bytes]:
    """Status and body of an answer that says what went wrong."""
    index = -1 if error.slice_index is None else error.slice_index
    text = error.message.encode()[:1024]
    status = next(
        (code for kind, code in _STATUSES.items() if isinstance(error, kind)),
        Status.REFUSED,
    )
    return status, _FAULT.pack(index) + text


def unpack_fault(status: Status, body: bytes) -> TransferError:
    """The error that an answer tells of; its slice is an index of the request."""
    if len(body) < _FAULT.size:
        return FrameError("an answer is malformed")
    (index,) = _FAULT.unpack_from(body)
    message = body[_FAULT.size :].decode("utf-8", "replace")
    return _ERRORS[status](message, slice_index=None if index < 0 else index)


def pack_ways(devices: int, hosts: Sequence[str]) -> bytes:
    """The body of WAYS: an owner's RDMA devices and hosts, as they are now."""
    return bytes([devices]) + ",".join(hosts).encode()


def unpack_ways(body: bytes) -> tuple[int, tuple[str, ...]]:
    """(number of devices, hosts); raises FrameError unless well-formed."""
    if len(body) < 2:  # noqa: PLR2004
        raise FrameError("news of ways is malformed")
    return body[0], tuple(body[1:].decode("ascii", "replace").split(","))


def pack_mapped(length: int, expires_in_s: float | None, shm_name: str) -> bytes:
    """The body of the answer to MAP."""
    lasts = expires_in_s is not None
    return _MAPPED.pack(length, expires_in_s or 0.0, lasts) + shm_name.encode("ascii")


def unpack_mapped(body: bytes) -> tuple[int, float | None, str]:
    """(length, seconds until the right ends or None, name of the file)."""
    if not _MAPPED.size <= len(body) <= _MAPPED.size + MOST_NAME_BYTES:
        raise FrameError("an answer is malformed")
    length, expires_in_s, lasts = _MAPPED.unpack_from(body)
    name = body[_MAPPED.size :].decode("ascii", "replace")
    return length, expires_in_s if lasts else None, name


def check_handle(handle: RegionHandle, node: str, epoch: int, index: int) -> None:
    """Raise unless the handle is of this process of the peer.

    Raises:
        AccessDenied: it is of another node.
        StaleEpoch: it is of another epoch.
    """
    if handle.node != node:
        raise AccessDenied(
            f"the handle is of node {handle.node!r}", node=node, slice_index=index
        )
    if handle.epoch != epoch:
        raise StaleEpoch(
            f"the handle is of epoch {handle.epoch}, the peer's is {epoch}",
            node=node,
            slice_index=index,
        )
    # a handle may come from a codec that made other types of it
    known = type(handle.capability) is bytes
    if not known or len(handle.capability) != CAPABILITY_BYTES:
        raise AccessDenied("not a capability", node=node, slice_index=index)
    if type(handle.region) is not int or not 0 <= handle.region < 1 << 64:
        raise AccessDenied(f"no region {handle.region!r}", node=node, slice_index=index)
