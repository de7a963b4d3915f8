"""Headers come back as they were written, and no bytes crash the reader."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from kvtide.kv import (
    PRIVATE_KEY,
    BlockHeader,
    BlockKey,
    HeaderForm,
    HeaderMismatchError,
    Layout,
    PartKind,
    SpaceTags,
    make_header,
)

LAYOUT = Layout(layers=2, kv_heads=3, head_dim=8, kv_dtype="bfloat16", block_tokens=16)
TAGS = SpaceTags(1, b"m" * 16, b"l" * 16, b"t" * 16)
KEY = BlockKey(b"k" * 16)

uint64 = st.integers(0, 2**64 - 1)
digest = st.binary(min_size=16, max_size=16)


def header(**changes: object) -> BlockHeader:
    made = make_header(
        key=KEY,
        tags=TAGS,
        generation=5,
        tokens=16,
        part_xxh3=range(LAYOUT.parts),
        layout=LAYOUT,
    )
    return replace(made, **changes)


def check(
    found: BlockHeader, key: BlockKey = KEY, tags: SpaceTags = TAGS, generation: int = 5
) -> None:
    found.check(key=key, tags=tags, generation=generation, layout=LAYOUT)


@given(
    key=digest,
    key_id=st.integers(0, 2**32 - 1),
    tags=st.tuples(digest, digest, digest),
    generation=uint64,
    tokens=st.integers(1, 16),
    sums=st.lists(uint64, min_size=4, max_size=4),
)
def test_a_header_comes_back_as_written(
    key: bytes,
    key_id: int,
    tags: tuple[bytes, bytes, bytes],
    generation: int,
    tokens: int,
    sums: list[int],
) -> None:
    space = SpaceTags(key_id, *tags)
    made = make_header(
        key=BlockKey(key),
        tags=space,
        generation=generation,
        tokens=tokens,
        part_xxh3=sums,
        layout=LAYOUT,
    )
    encoded = made.encode(LAYOUT)
    assert len(encoded) == LAYOUT.header_bytes
    assert BlockHeader.decode(encoded) == made
    check(made, BlockKey(key), space, generation)


@given(
    generation=uint64,
    tokens=st.integers(1, 16),
    sums=st.lists(uint64, min_size=4, max_size=4),
)
def test_a_form_makes_the_same_bytes(
    generation: int, tokens: int, sums: list[int]
) -> None:
    form = HeaderForm(TAGS, LAYOUT)
    made = make_header(
        key=KEY,
        tags=TAGS,
        generation=generation,
        tokens=tokens,
        part_xxh3=sums,
        layout=LAYOUT,
    )
    for _ in range(2):
        assert form.encode(KEY, generation, tokens, sums) == made.encode(LAYOUT)
    with pytest.raises(ValueError, match="size"):
        form.encode(KEY, generation, tokens, sums[:-1])


def is_header(data: bytes) -> bool:
    try:
        BlockHeader.decode(data)
    except HeaderMismatchError:
        return False
    return True


@given(st.binary(max_size=600))
def test_any_bytes_are_a_header_or_a_mismatch(data: bytes) -> None:
    assert not is_header(data)


@given(st.integers(0, 2**16 - 1), st.binary(max_size=600))
def test_any_count_of_parts_is_believed_only_if_they_are_there(
    count: int, rest: bytes
) -> None:
    data = header().encode(LAYOUT)[:6] + count.to_bytes(2, "little") + rest
    assert is_header(data) == (len(data) >= 128 + 24 * count)


@given(st.integers(0, LAYOUT.header_bytes - 1), st.integers(1, 255))
def test_a_changed_byte_never_crashes_and_never_passes(place: int, change: int) -> None:
    encoded = bytearray(header().encode(LAYOUT))
    encoded[place] ^= change
    sums_and_padding = place >= 128 and (place - 128) % 24 >= 16
    reserved = 96 <= place < 128
    try:
        found = BlockHeader.decode(encoded)
        check(found)
    except HeaderMismatchError:
        return
    # what the header alone can't tell, its checksum in the descriptor does
    assert sums_and_padding or reserved or place >= 128 + 24 * LAYOUT.parts


@given(st.integers(0, 600))
def test_a_cut_header_is_a_mismatch(length: int) -> None:
    encoded = header().encode(LAYOUT)[:length]
    if length >= 128 + 24 * LAYOUT.parts:
        assert BlockHeader.decode(encoded) == header()
        return
    with pytest.raises(HeaderMismatchError):
        BlockHeader.decode(encoded)


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ("key", header(key=PRIVATE_KEY)),
        ("generation", header(generation=6)),
        ("tags", header(tags=replace(TAGS, tenant=bytes(16)))),
        ("tags", header(tags=replace(TAGS, model=bytes(16)))),
        ("tags", header(tags=replace(TAGS, layout=bytes(16)))),
        ("tags", header(tags=replace(TAGS, key_id=2))),
        ("slot_bytes", header(slot_bytes=LAYOUT.slot_bytes + 1)),
        ("tokens", header(tokens=17)),
        ("parts", header(parts=header().parts[:-1])),
        ("parts", header(parts=tuple(reversed(header().parts)))),
        ("parts", header(tokens=8)),
    ],
)
def test_a_mismatch_names_its_field(field: str, found: BlockHeader) -> None:
    with pytest.raises(HeaderMismatchError) as caught:
        check(found)
    assert caught.value.field == field


def test_parts_lie_apart_and_inside_the_slot() -> None:
    ends = [LAYOUT.header_bytes]
    for layer in range(LAYOUT.layers):
        for kind in PartKind:
            part = LAYOUT.part_index(layer, kind)
            assert LAYOUT.part_offset(part) == ends[-1]
            ends.append(LAYOUT.part_offset(part) + LAYOUT.part_bytes)
    assert ends[-1] == LAYOUT.slot_bytes
    assert LAYOUT.part_bytes == 16 * 3 * 8 * 2


@pytest.mark.parametrize("tokens", [0, 8, 15, 24, 1024])
def test_a_block_size_is_a_power_of_two_in_range(tokens: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        replace(LAYOUT, block_tokens=tokens)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown"):
        replace(LAYOUT, kv_dtype="float12")
