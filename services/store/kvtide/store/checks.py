"""What the bytes of a slot are to be compared with, and what came of it."""

from dataclasses import dataclass

from kvtide.kv import BlockKey, SpaceTags


@dataclass(frozen=True, slots=True)
class Verify:
    """Compare a slot's bytes with this, off the hot path, and say ``Verified``.

    ``key`` is ``PRIVATE_KEY`` for a private block; the slot starts at ``offset``.
    """

    slot: int
    generation: int
    offset: int
    slot_bytes: int
    header_bytes: int
    key: BlockKey
    tags: SpaceTags
    tokens: int
    header_xxh3: int


@dataclass(frozen=True, slots=True)
class Verified:
    """The bytes of a slot were compared with what they should be (see ``Verify``)."""

    slot: int
    generation: int
    ok: bool
    reason: str = ""
