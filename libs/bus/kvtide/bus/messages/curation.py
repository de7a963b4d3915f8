"""People → a store: list, pin, unpin and remove blocks, a page at a time.

Each question names blocks and where to go on (``after``, by key); its answer says where
the next page starts (``next_key``, None: that was all). A page looks at a bounded number
of blocks, so it may have few that fit, or none, and still not be the last.
"""

import msgspec

from kvtide.bus.messages.base import Message
from kvtide.kv import BlockKey, Located


class BlockSelector(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks that fulfil all that is set; ``tenant`` and ``model`` are tags.

    Nothing set means all blocks, which only ``ListBlocks`` may ask for.
    """

    keys: tuple[BlockKey, ...] | None = None
    tenant: bytes | None = None
    model: bytes | None = None


class ListBlocks(Message, frozen=True, tag="list_blocks"):
    """→ ``BlockPage``."""

    select: BlockSelector
    after: BlockKey | None = None
    limit: int = 1000


class BlockListing(msgspec.Struct, frozen=True, kw_only=True):
    """A copy as its store sees it.

    ``leases`` pin it. ``hard``: a person pinned it for good; ``soft_ms``: for so long,
    unless nothing else can go. ``uses`` are placements that named it since it came;
    ``idle_ms`` is the time since the last, None before the first.
    """

    located: Located
    tokens: int
    tenant: bytes
    model: bytes
    leases: int = 0
    hard: bool = False
    soft_ms: float = 0.0
    extra: bool = False
    uses: int = 0
    idle_ms: float | None = None


class BlockPage(Message, frozen=True, tag="block_page"):
    """Copies in the order of their keys."""

    blocks: tuple[BlockListing, ...]
    next_key: BlockKey | None


class PinBlocks(Message, frozen=True, tag="pin_blocks"):
    """Keep blocks in DRAM → ``BlocksDone``.

    ``hard``: until they are unpinned; the store refuses what goes beyond its limit.
    Else for ``seconds``, bounded by the store, and only while anything else can go.
    Blocks that come later are not meant.
    """

    select: BlockSelector
    hard: bool = False
    seconds: float = 0.0
    after: BlockKey | None = None
    limit: int = 1000


class UnpinBlocks(Message, frozen=True, tag="unpin_blocks"):
    """End what ``PinBlocks`` began → ``BlocksDone``."""

    select: BlockSelector
    after: BlockKey | None = None
    limit: int = 1000


class RemoveBlocks(Message, frozen=True, tag="remove_blocks"):
    """Forget blocks, pinned ones too → ``BlocksDone``.

    They stay removed after a restart. Whoever is reading one still has it. Blocks that
    are being written are not meant.
    """

    select: BlockSelector
    after: BlockKey | None = None
    limit: int = 1000


class BlocksDone(Message, frozen=True, tag="blocks_done"):
    """Of the ``matched`` blocks so many were changed and so many refused.

    The others were so already. ``copies``: removed ones, in DRAM and on the SSD.
    """

    matched: int
    changed: int
    refused: int = 0
    copies: int = 0
    next_key: BlockKey | None = None
