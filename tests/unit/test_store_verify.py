"""What the store finds wrong in a slot before it says that a block is stored."""

import pytest
from xxhash import xxh3_64_intdigest

from kvtide.kv import (
    PRIVATE_KEY,
    BlockKey,
    Layout,
    PartEntry,
    SpaceTags,
    make_header,
)
from kvtide.kv.header import BlockHeader
from kvtide.store.events import Verify
from kvtide.store.verify import verify_slot

LAYOUT = Layout(layers=1, kv_heads=1, head_dim=8, kv_dtype="bfloat16", block_tokens=16)
TAGS = SpaceTags(0, b"m" * 16, b"l" * 16, b"t" * 16)
KEY = BlockKey(b"k" * 16)
OFFSET = 192
PARTS = [bytes([part + 1]) * LAYOUT.part_bytes for part in range(2)]
SUMS = [xxh3_64_intdigest(part) for part in PARTS]


class Slot:
    """A slot in an arena, and what is expected there."""

    def __init__(self, header: BlockHeader | None = None) -> None:
        self.arena = bytearray(OFFSET + LAYOUT.slot_bytes + 64)
        self.header = header or made()
        for part, data in enumerate(PARTS):
            start = OFFSET + LAYOUT.part_offset(part)
            self.arena[start : start + len(data)] = data
        raw = self.header.encode(LAYOUT)
        self.arena[OFFSET : OFFSET + len(raw)] = raw
        self.header_xxh3 = xxh3_64_intdigest(raw)

    def verify(self, *, header_xxh3: int | None = None) -> str:
        wanted = Verify(
            slot=1,
            generation=5,
            offset=OFFSET,
            slot_bytes=LAYOUT.slot_bytes,
            header_bytes=LAYOUT.header_bytes,
            key=KEY,
            tags=TAGS,
            tokens=16,
            header_xxh3=self.header_xxh3 if header_xxh3 is None else header_xxh3,
        )
        verdict = verify_slot(memoryview(self.arena), wanted)
        assert (verdict.slot, verdict.generation) == (1, 5)
        assert verdict.ok == (not verdict.reason)
        return verdict.reason


def made(
    key: BlockKey = KEY,
    tags: SpaceTags = TAGS,
    generation: int = 5,
    tokens: int = 16,
    layout: Layout = LAYOUT,
) -> BlockHeader:
    return make_header(
        key=key,
        tags=tags,
        generation=generation,
        tokens=tokens,
        part_xxh3=SUMS,
        layout=layout,
    )


def with_parts(*parts: PartEntry) -> BlockHeader:
    header = made()
    return BlockHeader(
        header.key, header.tags, header.generation, 16, header.slot_bytes, parts
    )


def test_a_right_block_is_right() -> None:
    assert Slot().verify() == ""


@pytest.mark.parametrize("place", [0, 4, 8, 16, 24, 40, 100, LAYOUT.header_bytes - 1])
def test_each_byte_of_the_header_counts(place: int) -> None:
    slot = Slot()
    slot.arena[OFFSET + place] ^= 1
    assert slot.verify() == "the header's checksum differs"


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("place", [0, LAYOUT.part_bytes - 1])
def test_each_byte_of_each_part_counts(part: int, place: int) -> None:
    slot = Slot()
    slot.arena[OFFSET + LAYOUT.part_offset(part) + place] ^= 0x80
    assert slot.verify() == f"the checksum of part {part} differs"


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (made(key=PRIVATE_KEY), "the header's key differs"),
        (made(generation=6), "the header's generation differs"),
        (made(tokens=8), "the header's tokens differs"),
        (made(tags=SpaceTags(0, b"m" * 16, b"l" * 16, b"u" * 16)), "the header's tags differs"),
        (with_parts(), "the header's parts differs"),
        (
            with_parts(PartEntry(0, 16, SUMS[0])),
            "part 0 lies outside its slot",
        ),
        (
            with_parts(PartEntry(LAYOUT.slot_bytes, 1, 0)),
            "part 0 lies outside its slot",
        ),
        (
            with_parts(PartEntry(LAYOUT.header_bytes, 2**63, 0)),
            "part 0 lies outside its slot",
        ),
        (
            with_parts(PartEntry(2**64 - 1, 2**64 - 1, 0)),
            "part 0 lies outside its slot",
        ),
    ],
)  # fmt: skip
def test_a_well_formed_header_of_something_else_is_refused(
    header: BlockHeader, reason: str
) -> None:
    assert Slot(header).verify() == reason


def test_a_header_that_is_none_is_refused() -> None:
    slot = Slot()
    slot.arena[OFFSET : OFFSET + 4] = b"ELSE"
    raw = bytes(slot.arena[OFFSET : OFFSET + LAYOUT.header_bytes])
    assert slot.verify(header_xxh3=xxh3_64_intdigest(raw)) == "no block of this format"
