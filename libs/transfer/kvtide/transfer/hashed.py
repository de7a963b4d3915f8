"""Bytes with their checksums behind them, as both ends receive them."""

import struct
from collections.abc import Callable, Sequence

import xxhash

from kvtide.transfer.buffers import WINDOW_BYTES, Digests, windows
from kvtide.transfer.channel import Channel, Check

_MOST_VIEWS = 512


def receive_hashed(
    channel: Channel,
    views: Sequence[memoryview],
    check: Check,
    progress: Callable[[], None],
) -> tuple[list[int], list[int]]:
    """Fill the views; xxh3 of what came, and what the sender says they must be.

    Each window is hashed while the cache still has it. ``progress`` is called after
    each. Raises as ``Channel.receive_into``.
    """
    count = len(views)
    trailer = bytearray(8 * count)
    if count <= _MOST_VIEWS and sum(map(len, views)) <= WINDOW_BYTES:
        channel.receive_into([*views, memoryview(trailer)], check)
        digests = list(map(xxhash.xxh3_64_intdigest, views))
    else:
        hashing = Digests(views)
        for window in windows(views):
            channel.receive_into([part for _, part in window], check)
            progress()
            hashing.update(window)
        channel.receive_into([memoryview(trailer)], check)
        digests = hashing.finish()
    return digests, list(struct.unpack(f"<{count}Q", trailer))
