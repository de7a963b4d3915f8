"""Bytes with their checksums behind them, as both ends send and receive them."""

import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor

from xxhash import xxh3_64, xxh3_64_intdigest

from kvtide.transfer.buffers import WINDOW_BYTES
from kvtide.transfer.channel import Channel, Check

SEND_BYTES = 2 << 20
"""So much is given to the kernel at once. The sender is the busier end, and each time
that it pauses the receiver falls asleep: in steps of 256 KiB a stream on loopback was
seen at 0.7 of its speed in steps of 2 MiB."""

HASH_FIRST_BYTES = 128 << 10
"""So little is hashed before it goes out: one call instead of two."""

_MOST_VIEWS = 512


def send_hashed(
    channel: Channel,
    head: bytes,
    views: Sequence[memoryview],
    check: Check,
    aside: Executor | None = None,
) -> list[int]:
    """Send ``head``, the views and their xxh3; which they are.

    With ``aside``, more than ``SEND_BYTES`` is hashed there while it is sent; for less,
    another thread would be awake too late. Memory that changes meanwhile
    is found by the receiver. Raises as ``Channel.send``; then too nobody reads the views
    any more.
    """
    digests: list[int] = []
    trailer = f"<{len(views)}Q"
    total = sum(map(len, views))
    if total <= HASH_FIRST_BYTES and len(views) <= _MOST_VIEWS:
        digests = list(map(xxh3_64_intdigest, views))
        channel.send([head, *views, struct.pack(trailer, *digests)], check)
        return digests
    if aside is not None and total > SEND_BYTES:
        hashing = aside.submit(lambda: list(map(xxh3_64_intdigest, views)))
        try:
            channel.send([head, *views], check)
        finally:
            digests = hashing.result()
        channel.send([struct.pack(trailer, *digests)], check)
        return digests
    for batch in batches_of(views, SEND_BYTES):
        if len(batch) == 1 and len(batch[0]) > SEND_BYTES:
            digests.append(_send_long(channel, head, batch[0], check))
        else:
            channel.send([head, *batch], check)
            # hashed while the kernel delivers what it took
            digests.extend(map(xxh3_64_intdigest, batch))
        head = b""
    channel.send([head, struct.pack(trailer, *digests)], check)
    return digests


def receive_hashed(
    channel: Channel, views: Sequence[memoryview], check: Check
) -> tuple[list[int], list[int]]:
    """Fill the views; xxh3 of what came, and what the sender says they must be.

    Each window is hashed while the cache still has it. Raises as
    ``Channel.receive_into``.
    """
    if len(views) == 1 and len(views[0]) <= WINDOW_BYTES:
        found, sent = receive_lone(channel, views[0], memoryview(bytearray(8)), check)
        return [found], [sent]
    digests: list[int] = []
    trailer = bytearray(8 * len(views))
    rest = memoryview(trailer)
    batches = list(batches_of(views, WINDOW_BYTES))
    for batch in batches:
        if len(batch) == 1 and len(batch[0]) > WINDOW_BYTES:
            digests.append(_receive_long(channel, batch[0], check))
            continue
        if batch is batches[-1]:
            channel.receive_into([*batch, rest], check)
            rest = rest[:0]
        else:
            channel.receive_into(batch, check)
        digests.extend(map(xxh3_64_intdigest, batch))
    channel.receive_into([rest], check)
    return digests, list(struct.unpack(f"<{len(views)}Q", trailer))


def receive_lone(
    channel: Channel, view: memoryview, tail: memoryview, check: Check
) -> tuple[int, int]:
    """As ``receive_hashed``, for one view of up to ``WINDOW_BYTES``; ``tail``: 8 bytes."""
    if len(view) <= HASH_FIRST_BYTES:
        channel.receive_into((view, tail), check)
        return xxh3_64_intdigest(view), int.from_bytes(tail, "little")
    # the sender hashes now too: both at the same time
    channel.receive_into((view,), check)
    found = xxh3_64_intdigest(view)
    channel.receive_into((tail,), check)
    return found, int.from_bytes(tail, "little")


def batches_of(
    views: Sequence[memoryview], most_bytes: int
) -> Iterator[list[memoryview]]:
    """The views in order, in lists of at most ``most_bytes`` and 512 views.

    One that is longer is in a list of its own. The kernel takes 1,024 in a call.
    """
    batch: list[memoryview] = []
    size = 0
    for view in views:
        length = len(view)
        if batch and (size + length > most_bytes or len(batch) == _MOST_VIEWS):
            yield batch
            batch, size = [], 0
        batch.append(view)
        size += length
    if batch:
        yield batch


def _send_long(channel: Channel, head: bytes, view: memoryview, check: Check) -> int:
    digest = xxh3_64()
    for start in range(0, len(view), SEND_BYTES):
        part = view[start : start + SEND_BYTES]
        channel.send([part] if start else [head, part], check)
        digest.update(part)
    return digest.intdigest()


def _receive_long(channel: Channel, view: memoryview, check: Check) -> int:
    digest = xxh3_64()
    for start in range(0, len(view), WINDOW_BYTES):
        part = view[start : start + WINDOW_BYTES]
        channel.receive_into([part], check)
        digest.update(part)
    return digest.intdigest()
