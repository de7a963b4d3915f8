"""Which blocks are deleted: looked up for each record that is found. Pure."""

from collections.abc import Iterable

from kvtide.kv import BlockKey, SpaceTags
from kvtide.store.ssd.events import DeletedSpace, RemovedBlock, Tombstone

MAX_KEYS = 100_000
"""Single blocks that are known to be removed; the latest count."""


class Deletions:
    """What is deleted, for quick looks."""

    def __init__(self, deleted: Iterable[Tombstone] = ()) -> None:
        """See ``add`` and ``add_key``."""
        self._until_ms: dict[tuple[bytes | None, bytes | None], int] = {}
        self._keys: dict[BlockKey, int] = {}
        for each in deleted:
            match each:
                case DeletedSpace():
                    self.add(each)
                case RemovedBlock(key, until_ms):
                    self.add_key(key, until_ms)

    def add(self, deleted: DeletedSpace) -> None:
        """Of several that say the same the latest counts."""
        space = (deleted.tenant, deleted.model)
        until_ms = self._until_ms.get(space, deleted.until_ms)
        self._until_ms[space] = max(until_ms, deleted.until_ms)

    def add_key(self, key: BlockKey, until_ms: int) -> None:
        """A single block is removed; so many are known that ``MAX_KEYS`` says."""
        self._keys[key] = max(self._keys.pop(key, until_ms), until_ms)
        if len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]

    def has(self, deleted: Tombstone) -> bool:
        """Whether the same is known, of then or later."""
        if isinstance(deleted, RemovedBlock):
            return deleted.until_ms <= self._keys.get(deleted.key, -1)
        space = (deleted.tenant, deleted.model)
        return deleted.until_ms <= self._until_ms.get(space, -1)

    def cover(self, key: BlockKey, tags: SpaceTags, written_ms: int) -> bool:
        """Whether this block with these tags, written then, is deleted."""
        if written_ms <= self._keys.get(key, -1):
            return True
        spaces = (
            (tags.tenant, tags.model),
            (tags.tenant, None),
            (None, tags.model),
            (None, None),
        )
        known = self._until_ms
        return any(written_ms <= known[each] for each in spaces if each in known)
