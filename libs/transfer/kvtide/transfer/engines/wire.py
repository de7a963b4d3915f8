"""The bodies of the frames about foreign engines; pure."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvtide.transfer.wire import Ask, FrameError, pack_ask, unpack_ask

_OPENED = struct.Struct("<QQ")
_SLOT = struct.Struct("<HH")
MOST_DESCRIPTION_BYTES = 64 << 10


class Opened(NamedTuple):
    """The owner's slab for a connection, and how its engine is reached."""

    address: int
    length: int
    description: bytes


class SlotAsk(NamedTuple):
    """A request whose bytes pass through a slot of the owner's.

    ``digests`` are a write's: xxh3 of each piece as the writer has it.
    """

    slot: int
    digests: tuple[int, ...]
    ask: Ask


def pack_opened(opened: Opened) -> bytes:
    """The answer to ENGINE_OPEN."""
    return _OPENED.pack(opened.address, opened.length) + opened.description


def unpack_opened(body: bytes) -> Opened:
    """Raise FrameError unless the body is well-formed."""
    if not _OPENED.size < len(body) <= _OPENED.size + MOST_DESCRIPTION_BYTES:
        raise FrameError("a malformed answer")
    address, length = _OPENED.unpack_from(body)
    return Opened(address, length, body[_OPENED.size :])


def pack_slot_ask(slot: int, digests: Sequence[int], ask: Ask) -> bytes:
    """The body of ENGINE_READ (without digests) and ENGINE_WRITE."""
    return _SLOT.pack(slot, len(digests)) + pack_digests(digests) + pack_ask(ask)


def unpack_slot_ask(body: bytes) -> SlotAsk:
    """Raise FrameError unless the body is well-formed."""
    if len(body) < _SLOT.size:
        raise FrameError("a malformed request")
    slot, count = _SLOT.unpack_from(body)
    end = _SLOT.size + 8 * count
    digests = unpack_digests(body[_SLOT.size : end], count)
    return SlotAsk(slot, digests, unpack_ask(body[end:]))


def pack_digests(digests: Sequence[int]) -> bytes:
    """The answer to ENGINE_READ: xxh3 of each piece as the owner has it."""
    return struct.pack(f"<{len(digests)}Q", *digests)


def unpack_digests(body: bytes, count: int) -> tuple[int, ...]:
    """Raise FrameError unless there are exactly so many."""
    if len(body) != 8 * count:
        raise FrameError("malformed checksums")
    return struct.unpack(f"<{count}Q", body)
