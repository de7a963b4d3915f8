"""KV events as vLLM publishes them: read in both encodings, written in the newer. Pure.

A payload is MessagePack of ``[time, events, data-parallel rank]``; an event is a map with
``type`` (vLLM 0.32, seen on the wire) or an array that begins with its name (versions
before, and routers written for them). Hashes are bytes, or integers (their low 64 bits)
where ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES`` is 1. A message has three frames: topic,
number (8 bytes, big-endian), payload.
"""

from collections.abc import Sequence
from typing import Annotated, Any, cast

import msgspec

from kvtide.runtime import KvtideError

MAX_PAYLOAD_BYTES = 64 << 20
NUMBER_BYTES = 8

BlockHash = int | bytes


class KvEventError(KvtideError):
    """These bytes are no KV events of a form that is known."""


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class BlockStored(
    msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored", omit_defaults=True
):
    """Blocks came into a cache; they follow ``parent_block_hash`` (None: the start).

    ``token_ids`` are those of all of them. ``medium`` is ``GPU``, ``CPU`` or ``STORAGE``.
    ``extra_keys`` say for each block what else its hash is of, untagged. ``cache_salt``:
    the same as SGLang says it, which has no extra keys.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[TokenId, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None


class BlockRemoved(
    msgspec.Struct,
    frozen=True,
    tag_field="type",
    tag="BlockRemoved",
    omit_defaults=True,
):
    """Blocks left a cache."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(
    msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"
):
    """A cache is empty."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
_KINDS: dict[str, type[KvEvent]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}


class KvEventBatch(msgspec.Struct, frozen=True):
    """What one message says. ``wall_s`` is the publisher's clock, for people only."""

    wall_s: float
    events: tuple[KvEvent, ...]
    data_parallel_rank: int | None = None


def decode_batch(payload: bytes) -> KvEventBatch:
    """Read a payload from outside; events of kinds that are not known are left out.

    Raises:
        KvEventError: it is too long, no MessagePack, or not of this form.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise KvEventError(f"a payload of {len(payload)} bytes is too long")
    try:
        batch: Any = msgspec.msgpack.decode(payload)
        wall_s, events, *rest = batch
        made = [_event(event) for event in events]
        return msgspec.convert(
            {
                "wall_s": wall_s,
                "events": [event for event in made if event is not None],
                "data_parallel_rank": rest[0] if rest else None,
            },
            KvEventBatch,
        )
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise KvEventError(f"no KV events: {error}") from error


def encode_batch(batch: KvEventBatch) -> bytes:
    """The payload, with events as maps."""
    whole: list[object] = [batch.wall_s, [_written(event) for event in batch.events]]
    if batch.data_parallel_rank is not None:
        whole.append(batch.data_parallel_rank)
    return msgspec.msgpack.encode(whole)


def _written(event: KvEvent) -> dict[str, object]:
    """With the fields that vLLM's own reader needs, though nothing is in them."""
    match event:
        case BlockStored():
            needed = ("lora_id", "medium", "lora_name")
        case BlockRemoved():
            needed = ("medium",)
        case AllBlocksCleared():
            needed = ()
    said: dict[str, object] = msgspec.to_builtins(event, builtin_types=(bytes,))
    return {**dict.fromkeys(needed), **said}


def frames(topic: str, number: int, batch: KvEventBatch) -> tuple[bytes, bytes, bytes]:
    """One message; ``number`` grows by one with each of a publisher."""
    return topic.encode(), number.to_bytes(NUMBER_BYTES, "big"), encode_batch(batch)


def read_frames(parts: Sequence[bytes]) -> tuple[str, int, KvEventBatch]:
    """Topic, number and batch of one message.

    Raises:
        KvEventError: these frames are no such message.
    """
    if len(parts) != 3 or len(parts[1]) != NUMBER_BYTES:  # noqa: PLR2004 - see above
        raise KvEventError(f"{len(parts)} frames are no KV event message")
    topic = parts[0].decode(errors="replace")
    return topic, int.from_bytes(parts[1], "big"), decode_batch(parts[2])


def _event(raw: object) -> dict[str, object] | None:
    """The event as a map with its kind; None: of a kind that is not known.

    Raises:
        ValueError: it is no event.
        TypeError: its kind is no text.
    """
    if isinstance(raw, dict):
        named = cast("dict[str, object]", raw)
        kind = named.get("type")
    elif isinstance(raw, list) and raw:
        kind, *values = cast("list[object]", raw)
        known = _KINDS.get(kind) if isinstance(kind, str) else None
        fields = () if known is None else known.__struct_fields__
        named = {"type": kind, **dict(zip(fields, values, strict=False))}
    else:
        raise ValueError("an event is neither a map nor an array")
    if not isinstance(kind, str):
        raise TypeError("an event has no name")
    return named if kind in _KINDS else None
