"""What one engine has cached, as blocks of ours. Pure.

An engine's events name its blocks by hashes of its own, and say their tokens and which
block they follow. From that each block's place in its chain is known, and the key that
the index has for it: a block of ours is there while all of the engine's blocks are that
it is made of. A chain whose beginning was not heard, whose salt is none of ours, or that
holds images or an adapter, has no key and is left out: that costs a hit, never a wrong
one. What was heard is believed until the engine says otherwise, or ``clear``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtide.connect.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KvEvent,
)
from kvtide.kv import BlockKey, KeySpace

SpaceOf = Callable[[str], KeySpace | None]
"""The key space of a salt; None: it is none of ours."""

MOST_BLOCKS = 4_000_000
_DEVICE_MEDIA = (None, "GPU")
_MAIN_GROUPS = (None, 0)


@dataclass(frozen=True, slots=True)
class Moved:
    """The keys that came and went, each in one of them at most."""

    added: tuple[BlockKey, ...] = ()
    dropped: tuple[BlockKey, ...] = ()


@dataclass(slots=True)
class _Block:
    """A block of the engine that is there, and the state of its chain at its end.

    ``last_key`` is that of the chain's last full block of ours, ``rest`` the tokens since,
    ``parts`` the engine's blocks that hold them. ``keys`` are the blocks of ours that
    this one is part of.
    """

    space: KeySpace
    last_key: BlockKey | None
    rest: tuple[int, ...]
    parts: tuple[BlockHash, ...]
    keys: list[BlockKey] = field(default_factory=list[BlockKey])


class CacheMap:
    """The mirror of one engine's prefix cache. Bounded; repeats change nothing."""

    def __init__(self, space_of: SpaceOf, *, most_blocks: int = MOST_BLOCKS) -> None:
        """What comes beyond ``most_blocks`` of the engine is not taken in."""
        self._space_of = space_of
        self._most = most_blocks
        self._blocks: dict[BlockHash, _Block] = {}
        self._parts: dict[BlockKey, tuple[BlockHash, ...]] = {}
        self.unkeyed = 0
        """Engine blocks that were heard of and have no key."""

    def __len__(self) -> int:
        """Blocks of ours that are there."""
        return len(self._parts)

    def apply(self, events: Sequence[KvEvent]) -> Moved:
        """Take events in order; what changed by them in the end."""
        before: dict[BlockKey, bool] = {}
        for event in events:
            match event:
                case BlockStored():
                    self._stored(event, before)
                case BlockRemoved():
                    self._removed(event, before)
                case AllBlocksCleared():
                    for key in self._parts:
                        before.setdefault(key, True)
                    self._blocks.clear()
                    self._parts.clear()
        return Moved(
            tuple(key for key, was in before.items() if key in self._parts and not was),
            tuple(key for key, was in before.items() if was and key not in self._parts),
        )

    def clear(self) -> Moved:
        """Nothing is known any more."""
        return self.apply((AllBlocksCleared(),))

    # ---- inside

    def _stored(self, event: BlockStored, before: dict[BlockKey, bool]) -> None:
        size = event.block_size
        sound = size > 0 and len(event.token_ids) == size * len(event.block_hashes)
        adapted = event.lora_name is not None or event.lora_id is not None
        main = event.group_idx in _MAIN_GROUPS and event.medium in _DEVICE_MEDIA
        if not sound or adapted or not main:
            self.unkeyed += len(event.block_hashes)
            return
        parent = event.parent_block_hash
        for number, name in enumerate(event.block_hashes):
            if name not in self._blocks:
                tokens = event.token_ids[number * size : (number + 1) * size]
                extra = (
                    event.extra_keys[number : number + 1] if event.extra_keys else ()
                )
                space = self._space(parent, extra[0] if extra else None, event)
                if space is None or len(self._blocks) >= self._most:
                    self.unkeyed += 1
                else:
                    self._learn(space, parent, name, tokens, before)
            parent = name

    def _space(
        self,
        parent: BlockHash | None,
        extra: tuple[object, ...] | None,
        event: BlockStored,
    ) -> KeySpace | None:
        """The key space of a chain, said with its first block.

        vLLM names the salt in the extra keys of that block, SGLang in a field.
        """
        if parent is not None:
            block = self._blocks.get(parent)
            return None if block is None or extra else block.space
        salt = event.cache_salt or ""
        if extra:
            if len(extra) != 1 or not isinstance(extra[0], str):
                return None
            salt = extra[0]
        return self._space_of(salt)

    def _learn(
        self,
        space: KeySpace,
        parent: BlockHash | None,
        name: BlockHash,
        tokens: tuple[int, ...],
        before: dict[BlockKey, bool],
    ) -> None:
        """Take a block in, and the blocks of ours that it completes."""
        last_key, rest, parts = None, tokens, (name,)
        if parent is not None:
            ahead = self._blocks[parent]
            last_key, rest = ahead.last_key, (*ahead.rest, *tokens)
            parts = (*ahead.parts, name)
        self._blocks[name] = block = _Block(space, last_key, rest, parts)
        size = space.layout.block_tokens
        while len(block.rest) >= size:
            key = space.key(block.last_key, block.rest[:size])
            block.last_key, block.rest = key, block.rest[size:]
            self._complete(key, block.parts, before)
            block.parts = (name,) if block.rest else ()

    def _complete(
        self,
        key: BlockKey,
        parts: tuple[BlockHash, ...],
        before: dict[BlockKey, bool],
    ) -> None:
        """A block of ours is there, unless one of its parts has gone meanwhile."""
        if key in self._parts or any(part not in self._blocks for part in parts):
            return
        before.setdefault(key, False)
        self._parts[key] = parts
        for part in parts:
            self._blocks[part].keys.append(key)

    def _removed(self, event: BlockRemoved, before: dict[BlockKey, bool]) -> None:
        if event.group_idx not in _MAIN_GROUPS or event.medium not in _DEVICE_MEDIA:
            return
        for name in event.block_hashes:
            block = self._blocks.pop(name, None)
            for key in block.keys if block is not None else ():
                before.setdefault(key, True)
                for part in self._parts.pop(key):
                    if part in self._blocks:
                        self._blocks[part].keys.remove(key)
