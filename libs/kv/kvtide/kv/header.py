"""The header of a stored block: what it is, and what each of its parts hashes to.

Layout, little-endian, ``HEADER_FIXED_BYTES`` then one entry a part, zero-padded to
``Layout.header_bytes``:

====== ===== ==========================================
offset bytes field
====== ===== ==========================================
0      4     magic ``KVTB``
4      2     format version
6      2     number of parts
8      4     key id (which cluster key made the block key)
12     4     tokens that are valid
16     8     generation of the slot
24     16    block key (zeros: a private block without a key)
40     16    model tag
56     16    layout tag
72     16    tenant tag
88     8     slot length in bytes
96     32    reserved, zero
====== ===== ==========================================

A part's entry is offset (8), length (8), xxh3-64 (8).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

from kvtide.kv.errors import HeaderMismatchError
from kvtide.kv.ids import KEY_BYTES, BlockKey
from kvtide.kv.layout import HEADER_FIXED_BYTES, PART_ENTRY_BYTES, Layout

MAGIC = b"KVTB"
FORMAT_VERSION = 1
TAG_BYTES = 16
PRIVATE_KEY = BlockKey(bytes(KEY_BYTES))

_FIXED = struct.Struct("<4sHHIIQ16s16s16s16sQ")
_GENERATION_OFFSET = 16
_ENTRY = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class SpaceTags:
    """What a block belongs to, as tags that a reader compares with its own."""

    key_id: int
    model: bytes
    layout: bytes
    tenant: bytes


class PartEntry(NamedTuple):
    """One part: where it starts in the slot, its bytes, and their xxh3-64."""

    offset: int
    length: int
    xxh3: int


_entry_of = partial(tuple.__new__, PartEntry)  # pyright: ignore[reportUnknownMemberType]


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """A decoded header. ``key`` is ``PRIVATE_KEY`` for an unkeyed block."""

    key: BlockKey
    tags: SpaceTags
    generation: int
    tokens: int
    slot_bytes: int
    parts: tuple[PartEntry, ...]

    def encode(self, layout: Layout) -> bytes:
        """The header's ``layout.header_bytes`` bytes."""
        fixed = _FIXED.pack(
            MAGIC,
            FORMAT_VERSION,
            len(self.parts),
            self.tags.key_id,
            self.tokens,
            self.generation,
            self.key,
            self.tags.model,
            self.tags.layout,
            self.tags.tenant,
            self.slot_bytes,
        )
        numbers = chain.from_iterable(self.parts)
        table = struct.pack(f"<{3 * len(self.parts)}Q", *numbers)
        body = fixed.ljust(HEADER_FIXED_BYTES, b"\0") + table
        return body.ljust(layout.header_bytes, b"\0")

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> "BlockHeader":
        """Read a header from untrusted bytes.

        Raises:
            HeaderMismatchError: these bytes are no header of this format.
        """
        if len(data) < HEADER_FIXED_BYTES:
            raise HeaderMismatchError("length", f"{len(data)} bytes hold no header")
        (
            magic,
            version,
            count,
            key_id,
            tokens,
            generation,
            key,
            model,
            layout_tag,
            tenant,
            slot_bytes,
        ) = _FIXED.unpack_from(data)
        if magic != MAGIC or version != FORMAT_VERSION:
            raise HeaderMismatchError("magic", "no block of this format")
        end = HEADER_FIXED_BYTES + count * PART_ENTRY_BYTES
        if len(data) < end:
            raise HeaderMismatchError("parts", f"{count} parts do not fit the header")
        entries = _ENTRY.iter_unpack(memoryview(data)[HEADER_FIXED_BYTES:end])
        # hundreds of headers are read at once: no call in Python for each part
        parts = tuple(map(_entry_of, entries))
        tags = SpaceTags(key_id, model, layout_tag, tenant)
        return cls(BlockKey(key), tags, generation, tokens, slot_bytes, parts)

    def check(
        self, *, key: BlockKey, tags: SpaceTags, generation: int, layout: Layout
    ) -> None:
        """Compare with what the reader was promised.

        Raises:
            HeaderMismatchError: this is another block, another use of the slot, or
                another model's, layout's or tenant's; ``field`` says which.
        """
        expected = (
            ("key", self.key == key),
            ("generation", self.generation == generation),
            ("tags", self.tags == tags),
            ("slot_bytes", self.slot_bytes == layout.slot_bytes),
            ("tokens", self.tokens <= layout.block_tokens),
            ("parts", self._parts_fit(layout)),
        )
        for field, holds in expected:
            if not holds:
                raise HeaderMismatchError(field, f"the header's {field} differs")

    def _parts_fit(self, layout: Layout) -> bool:
        length = self.tokens * layout.token_bytes
        start, step = layout.part_offset(0), layout.part_bytes
        count = layout.parts
        if len(self.parts) != count:
            return False
        offsets, lengths, _ = zip(*self.parts, strict=True)
        end = start + count * step
        return offsets == tuple(range(start, end, step)) and set(lengths) == {length}


class HeaderForm:
    """What the headers of one space have in common; made once for many of them."""

    def __init__(self, tags: SpaceTags, layout: Layout) -> None:
        """The tags and the layout of the blocks."""
        self._layout = layout
        self._tags = (tags.model, tags.layout, tags.tenant, layout.slot_bytes)
        self._start = (MAGIC, FORMAT_VERSION, layout.parts, tags.key_id)
        parts = range(layout.parts)
        self._numbers = [
            number
            for part in parts
            for number in (layout.part_offset(part), layout.part_bytes, 0)
        ]
        self._tokens = layout.block_tokens
        self._token_bytes = layout.token_bytes
        self._table = struct.Struct(f"<{3 * layout.parts}Q")
        self._gap = bytes(HEADER_FIXED_BYTES - _FIXED.size)

    def encode(
        self,
        key: BlockKey,
        generation: int,
        tokens: int,
        part_xxh3: Sequence[int],
    ) -> bytes:
        """As ``make_header(...).encode``, in few steps.

        Raises:
            ValueError: there are more or fewer sums than parts.
        """
        fixed = _FIXED.pack(*self._start, tokens, generation, key, *self._tags)
        numbers = self._numbers[:]
        numbers[2::3] = part_xxh3
        if tokens != self._tokens:
            numbers[1::3] = [tokens * self._token_bytes] * len(part_xxh3)
        table = self._table.pack(*numbers)
        body = b"".join((fixed, self._gap, table))
        return body.ljust(self._layout.header_bytes, b"\0")


def renewed_header(raw: bytes, generation: int) -> bytes:
    """A header's bytes as they are for a copy of the block in another slot's use."""
    at = _GENERATION_OFFSET
    return raw[:at] + generation.to_bytes(8, "little") + raw[at + 8 :]


def make_header(
    *,
    key: BlockKey,
    tags: SpaceTags,
    generation: int,
    tokens: int,
    part_xxh3: Sequence[int],
    layout: Layout,
) -> BlockHeader:
    """The header of a block whose parts hash to ``part_xxh3`` (``layout.parts`` long).

    A block of fewer tokens keeps every part at its full block's offset.
    """
    length = tokens * layout.token_bytes
    parts = tuple(
        PartEntry(layout.part_offset(i), length, xxh3)
        for i, xxh3 in enumerate(part_xxh3)
    )
    return BlockHeader(key, tags, generation, tokens, layout.slot_bytes, parts)
