"""Whether the bytes in a slot are the block that they should be."""

from xxhash import xxh3_64_intdigest

from kvtide.kv import BlockHeader, HeaderMismatchError
from kvtide.store.events import Verified, Verify


def verify_slot(arena: memoryview, wanted: Verify) -> Verified:
    """Read the slot's header and every part; touches nothing else.

    The bytes may change meanwhile (a writer that should be dead): a header is taken
    as a private copy once, and each part is hashed where it lies.
    """
    reason = what_differs(arena, wanted)
    return Verified(wanted.slot, wanted.generation, not reason, reason)


def what_differs(arena: memoryview, wanted: Verify) -> str:
    """What makes the bytes at ``wanted.offset`` another block; empty: nothing does."""
    start = wanted.offset
    slot = arena[start : start + wanted.slot_bytes]
    raw = bytes(slot[: wanted.header_bytes])
    if xxh3_64_intdigest(raw) != wanted.header_xxh3:
        return "the header's checksum differs"
    try:
        header = BlockHeader.decode(raw)
    except HeaderMismatchError as error:
        return str(error)
    identity = (
        ("key", header.key == wanted.key),
        ("tags", header.tags == wanted.tags),
        ("generation", header.generation == wanted.generation),
        ("tokens", header.tokens == wanted.tokens),
        ("slot_bytes", header.slot_bytes == wanted.slot_bytes),
        ("parts", len(header.parts) > 0),
    )
    for field, holds in identity:
        if not holds:
            return f"the header's {field} differs"
    end = wanted.header_bytes
    for number, part in enumerate(header.parts):
        if part.offset < end or part.length > wanted.slot_bytes - part.offset:
            return f"part {number} lies outside its slot"
        end = part.offset + part.length
        if xxh3_64_intdigest(slot[part.offset : end]) != part.xxh3:
            return f"the checksum of part {number} differs"
    return ""
