"""vLLM's KV events, in both encodings."""

import msgspec
import pytest
from hypothesis import given, strategies as st

from kvtide.connect.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventBatch,
    KvEventError,
    decode_batch,
    encode_batch,
    frames,
    read_frames,
)

HASHES = st.one_of(st.integers(0, 2**64 - 1), st.binary(min_size=1, max_size=32))
TEXT = st.one_of(st.none(), st.text(max_size=8))
STORED = st.builds(
    BlockStored,
    block_hashes=st.lists(HASHES, max_size=3).map(tuple),
    parent_block_hash=st.one_of(st.none(), HASHES),
    token_ids=st.lists(st.integers(0, 2**31), max_size=8).map(tuple),
    block_size=st.integers(1, 512),
    lora_id=st.one_of(st.none(), st.integers(0, 9)),
    medium=TEXT,
    lora_name=TEXT,
    group_idx=st.one_of(st.none(), st.integers(0, 9)),
)
REMOVED = st.builds(
    BlockRemoved, block_hashes=st.lists(HASHES, max_size=3).map(tuple), medium=TEXT
)
EVENTS = st.one_of(STORED, REMOVED, st.just(AllBlocksCleared()))
BATCHES = st.builds(
    KvEventBatch,
    wall_s=st.floats(0, 2e9),
    events=st.lists(EVENTS, max_size=4).map(tuple),
    data_parallel_rank=st.one_of(st.none(), st.integers(0, 9)),
)


@given(BATCHES, st.integers(0, 2**63 - 1))
def test_what_is_written_is_read(batch: KvEventBatch, number: int) -> None:
    assert read_frames(frames("kv", number, batch)) == ("kv", number, batch)


@given(BATCHES)
def test_events_as_arrays_are_read_too(batch: KvEventBatch) -> None:
    """As versions before 0.32 send them, and routers written for those expect."""
    events = [
        [type(event).__name__, *(getattr(event, f) for f in event.__struct_fields__)]
        for event in batch.events
    ]
    whole = [batch.wall_s, events, batch.data_parallel_rank]
    assert decode_batch(msgspec.msgpack.encode(whole)) == batch


def test_the_form_seen_on_the_wire() -> None:
    """As vLLM 0.32 sent it: an event of no fields, 64-bit hashes, no rank."""
    stored = {
        "type": "BlockStored",
        "block_hashes": [2**63 + 5],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["salt"]],
        "some_later_field": 1,
    }
    payload = msgspec.msgpack.encode([1.5, [{"type": "AllBlocksCleared"}, stored]])
    assert decode_batch(payload) == KvEventBatch(
        1.5,
        (
            AllBlocksCleared(),
            BlockStored(
                (2**63 + 5,), None, (1, 2), 2, medium="GPU", extra_keys=(("salt",),)
            ),
        ),
    )
    again = msgspec.msgpack.decode(encode_batch(decode_batch(payload)))
    assert again[1][1]["type"] == "BlockStored"


def test_an_event_of_a_kind_to_come_is_left_out() -> None:
    payload = msgspec.msgpack.encode([0.0, [{"type": "BlockMoved"}, ["BlockMoved", 1]]])
    assert decode_batch(payload).events == ()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(7),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, [7]]),
        msgspec.msgpack.encode([1.0, [{"no": "name"}]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", "no hashes"]]]),
        msgspec.msgpack.encode(["now", []]),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(KvEventError):
        decode_batch(payload)


@given(st.binary(max_size=64))
def test_any_bytes_are_a_batch_or_an_error(payload: bytes) -> None:
    try:
        decode_batch(payload)
    except KvEventError:
        return


def test_frames_that_are_none_are_refused() -> None:
    with pytest.raises(KvEventError, match="2 frames"):
        read_frames([b"kv", b"12345678"])
    with pytest.raises(KvEventError):
        read_frames([b"kv", b"1", encode_batch(KvEventBatch(0.0, ()))])
