"""What fetching a copy from another store takes: commands out, what came of them in.

And the checks in between. Pure: whoever moves the bytes calls them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvtide.kv import BlockHeader, HeaderMismatchError, Located

HEADER_LIMIT_BYTES = 32 << 10
"""What is read to find a header; longer ones are not copied."""


class CorruptSource(Exception):  # noqa: N818 - becomes an event
    """The bytes are there and are not what was announced."""


class SourceGone(Exception):  # noqa: N818 - becomes an event
    """The bytes can't be had."""


@dataclass(frozen=True, slots=True)
class FetchHeader:
    """Read and check the header of ``source``; say ``HeaderFetched``."""

    number: int
    source: Located


@dataclass(frozen=True, slots=True)
class HeaderFetched:
    """``raw`` is the whole header as ``source`` announced it; None: it can't be had.

    ``corrupt``: the bytes were there and are not what was announced.
    """

    number: int
    raw: bytes | None
    corrupt: bool = False


@dataclass(frozen=True, slots=True)
class FetchBody:
    """Copy all parts of ``source`` into the slot at ``offset``, and check them.

    They lie behind the header ``raw``, of which the copy gets its own with
    ``generation``. Say ``BodyFetched``.
    """

    number: int
    source: Located
    raw: bytes
    slot: int
    offset: int
    generation: int


@dataclass(frozen=True, slots=True)
class BodyFetched:
    """All bytes are in the slot and right; ``header_xxh3`` is None if they are not."""

    number: int
    header_xxh3: int | None
    corrupt: bool = False


ArrivalEvent = HeaderFetched | BodyFetched
ArrivalCommand = FetchHeader | FetchBody


def announced_header(start: bytes | bytearray, source: Located) -> bytes:
    """The header at the start of a slot: its length is where its first part begins.

    Raises:
        CorruptSource: it is not the one that ``source`` announces.
    """
    try:
        header = BlockHeader.decode(start)
    except HeaderMismatchError as error:
        raise CorruptSource(str(error)) from error
    length = header.parts[0].offset if header.parts else 0
    raw = bytes(start[:length])
    if not raw or xxh3_64_intdigest(raw) != source.header_xxh3:
        raise CorruptSource("the header's checksum differs")
    identity = (
        ("key", header.key == source.key),
        ("generation", header.generation == source.slot.generation),
        ("slot_bytes", header.slot_bytes == source.slot.length),
    )
    for name, holds in identity:
        if not holds:
            raise CorruptSource(f"the header's {name} differs")
    return raw


def part_bounds(raw: bytes) -> list[tuple[int, int]]:
    """Where each part of the block with this header begins and ends in its slot.

    Raises:
        CorruptSource: they overlap, or one lies outside.
    """
    header = BlockHeader.decode(raw)
    bounds = [(part.offset, part.offset + part.length) for part in header.parts]
    end = len(raw)
    for number, (at, upto) in enumerate(bounds):
        if at < end or upto > header.slot_bytes:
            raise CorruptSource(f"part {number} lies outside its slot")
        end = upto
    return bounds


def check_sums(raw: bytes, xxh3: Sequence[int]) -> None:
    """Compare the parts' checksums with the header's.

    Raises:
        CorruptSource: one differs.
    """
    for number, part in enumerate(BlockHeader.decode(raw).parts):
        if xxh3[number] != part.xxh3:
            raise CorruptSource(f"the checksum of part {number} differs")
