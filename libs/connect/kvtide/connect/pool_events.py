"""What the pool holds, told as vLLM tells of its cache. Pure.

Where blocks are is known from the stores' gossip, which has keys; what is in them from
whoever has the tokens. A block is told of when both are known, and those before it were
told of: a subscriber can follow each chain from its start. Its hash is the low 64 bits of
its key. It is removed with the last copy of it anywhere.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtide.bus.messages import Dropped
from kvtide.connect.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
)
from kvtide.kv import BlockKey, KeySpace, Located, NodeId, NodeRef

MEDIUM = "CPU"
MOST_KNOWN = 1_000_000
_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Content:
    """What a block is made of. ``salt`` is named with a chain's first block, ``adapter`` with all."""

    parent: BlockKey | None
    tokens: tuple[int, ...]
    salt: str
    adapter: str | None


class PoolEvents:
    """Joins contents and copies. Bounded in contents: the oldest are forgotten first.

    A block whose content is forgotten stays told of until it goes.
    """

    def __init__(self, *, most_known: int = MOST_KNOWN) -> None:
        """Nothing is known."""
        self._most = most_known
        self._contents: OrderedDict[BlockKey, _Content] = OrderedDict()
        self._children: dict[BlockKey, set[BlockKey]] = {}
        self._at: dict[NodeId, dict[BlockKey, int]] = {}
        self._copies: dict[BlockKey, int] = {}
        self._told: set[BlockKey] = set()

    @property
    def told(self) -> int:
        """Blocks that subscribers believe to be there."""
        return len(self._told)

    # ---- what is heard

    def learn(
        self,
        space: KeySpace,
        tokens: Sequence[int],
        keys: Sequence[BlockKey],
        salt: str = "",
    ) -> list[KvEvent]:
        """The tokens of a chain; ``keys`` are those of its first blocks, or all.

        ``salt`` is what tells its space from others; empty: nothing does.
        """
        size = space.layout.block_tokens
        start = len(keys) * size
        last = keys[-1] if keys else None
        facts = space.space.facts
        adapter = facts.name if facts.parent else None
        whole = (*keys, *space.chain(tokens[start:], parent=last))
        fresh: list[BlockKey] = []
        parent: BlockKey | None = None
        for number, key in enumerate(whole):
            if key in self._contents:
                self._contents.move_to_end(key)
            else:
                block = tuple(tokens[number * size : (number + 1) * size])
                named = salt if parent is None else ""
                self._contents[key] = _Content(parent, block, named, adapter)
                if parent is not None:
                    self._children.setdefault(parent, set()).add(key)
                fresh.append(key)
            parent = key
        events = self._tell(fresh)
        while len(self._contents) > self._most:
            self._unlearn()
        return events

    def apply(
        self, store: NodeRef, added: Iterable[Located], dropped: Iterable[Dropped]
    ) -> list[KvEvent]:
        """Copies came and went at a store; drops before adds."""
        held = self._at.setdefault(store.node, {})
        gone = [each.key for each in dropped if self._drop(held, each)]
        come: list[BlockKey] = []
        for each in added:
            if each.key not in held:
                self._copies[each.key] = self._copies.get(each.key, 0) + 1
                come.append(each.key)
            held[each.key] = each.slot.generation
        return [*self._remove(gone), *self._tell(come)]

    def forget(self, store: NodeId) -> list[KvEvent]:
        """Nothing is known of a store any more."""
        held = self._at.pop(store, {})
        for key in held:
            self._less(key)
        if held and not self._copies:
            self._told.clear()
            return [AllBlocksCleared()]
        return self._remove(held)

    # ---- inside

    def _drop(self, held: dict[BlockKey, int], dropped: Dropped) -> bool:
        if held.get(dropped.key) != dropped.generation:
            return False
        del held[dropped.key]
        self._less(dropped.key)
        return True

    def _less(self, key: BlockKey) -> None:
        left = self._copies[key] - 1
        if left:
            self._copies[key] = left
        else:
            del self._copies[key]

    def _remove(self, keys: Iterable[BlockKey]) -> list[KvEvent]:
        gone = [k for k in keys if k in self._told and k not in self._copies]
        self._told.difference_update(gone)
        if not gone:
            return []
        return [BlockRemoved(tuple(map(hash_of, dict.fromkeys(gone))), medium=MEDIUM)]

    def _tell(self, keys: Iterable[BlockKey]) -> list[KvEvent]:
        """Of these and what follows them, those that can be told of now."""
        events: list[KvEvent] = []
        for first in keys:
            waiting = [first]
            run: list[BlockKey] = []
            while waiting:
                key = waiting.pop()
                if not self._can_tell(key):
                    continue
                if run and self._contents[key].parent != run[-1]:
                    events.append(self._stored(run))
                    run = []
                self._told.add(key)
                run.append(key)
                waiting += sorted(self._children.get(key, ()))
            if run:
                events.append(self._stored(run))
        return events

    def _can_tell(self, key: BlockKey) -> bool:
        content = self._contents.get(key)
        if content is None or key in self._told or key not in self._copies:
            return False
        return content.parent is None or content.parent in self._told

    def _stored(self, run: Sequence[BlockKey]) -> BlockStored:
        """Blocks in a row, each the parent of the next."""
        contents = [self._contents[key] for key in run]
        parent, salt = contents[0].parent, contents[0].salt
        extra = ((salt,), *(None for _ in run[1:])) if salt else None
        return BlockStored(
            block_hashes=tuple(map(hash_of, run)),
            parent_block_hash=None if parent is None else hash_of(parent),
            token_ids=tuple(token for each in contents for token in each.tokens),
            block_size=len(contents[0].tokens),
            lora_id=None,
            medium=MEDIUM,
            lora_name=contents[0].adapter,
            extra_keys=extra,
        )

    def _unlearn(self) -> None:
        key, content = self._contents.popitem(last=False)
        siblings = self._children.get(content.parent) if content.parent else None
        if siblings is not None:
            siblings.discard(key)
            if not siblings and content.parent is not None:
                del self._children[content.parent]


def hash_of(key: BlockKey) -> int:
    """The low 64 bits, as vLLM shortens its own hashes."""
    return int.from_bytes(key[-_HASH_BYTES:], "big")
