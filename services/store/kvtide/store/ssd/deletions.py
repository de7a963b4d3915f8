"""Which blocks are deleted: looked up for each record that is found. Pure."""

from collections.abc import Iterable

from kvtide.kv import SpaceTags
from kvtide.store.ssd.events import DeletedSpace


class Deletions:
    """What is deleted, for quick looks."""

    def __init__(self, deleted: Iterable[DeletedSpace] = ()) -> None:
        """See ``add``."""
        self._until_ms: dict[tuple[bytes | None, bytes | None], int] = {}
        for each in deleted:
            self.add(each)

    def add(self, deleted: DeletedSpace) -> None:
        """Of several that say the same the latest counts."""
        space = (deleted.tenant, deleted.model)
        until_ms = self._until_ms.get(space, deleted.until_ms)
        self._until_ms[space] = max(until_ms, deleted.until_ms)

    def cover(self, tags: SpaceTags, written_ms: int) -> bool:
        """Whether a block with these tags, written then, is deleted."""
        spaces = (
            (tags.tenant, tags.model),
            (tags.tenant, None),
            (None, tags.model),
            (None, None),
        )
        known = self._until_ms
        return any(written_ms <= known[each] for each in spaces if each in known)
