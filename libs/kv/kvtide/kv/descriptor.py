"""Where a copy of a block lies, precisely enough to read and verify it alone.

Stores make very many of these in an answer: as structs they cost a tenth of dataclasses.
"""

import msgspec

from kvtide.kv.ids import BlockKey, NodeId, NodeRef, Tier


class SlotRef(msgspec.Struct, frozen=True, gc=False):
    """One use of one slot of a store's arena.

    ``arena`` is the index of the arena among those in the store's beat; ``offset``
    and ``length`` are bytes within it. ``generation`` grows each time that the slot
    is given out, so a reference from an earlier use is told from a later one.
    """

    node: NodeId
    epoch: int
    tier: Tier
    arena: int
    offset: int
    length: int
    generation: int

    @property
    def owner(self) -> NodeRef:
        """The life of the store that this slot belongs to."""
        return NodeRef(self.node, self.epoch)


class Located(msgspec.Struct, frozen=True, gc=False):
    """A committed copy of a block: the key, the slot, and what its header hashes to.

    ``header_xxh3`` is xxh3-64 over the header's bytes; the header in turn holds the
    xxh3-64 of each part, so one layer or all can be verified alone.
    """

    key: BlockKey
    slot: SlotRef
    header_xxh3: int
