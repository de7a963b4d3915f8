"""What the world has not been told yet: changes gathered into numbered batches."""

from dataclasses import dataclass, field

from kvtide.bus.messages import BlocksChanged, Dropped
from kvtide.kv import BlockKey, Located, NodeRef


@dataclass(slots=True)
class ChangeLog:
    """Adds and drops since the last batch. ``seq`` is the last batch's number.

    In a batch drops apply before adds, so a key may be dropped and added in one. What
    was added and dropped again between two batches is never told. A copy is known by
    its generation: a key may have one in each tier.
    """

    store: NodeRef
    seq: int = 0
    since_s: float | None = None
    _added: dict[int, Located] = field(default_factory=dict[int, Located])
    _dropped: list[Dropped] = field(default_factory=list[Dropped])

    def __len__(self) -> int:
        """Changes not yet told."""
        return len(self._added) + len(self._dropped)

    def add(self, located: Located, now_s: float) -> None:
        """A copy is here now."""
        self._added[located.slot.generation] = located
        self._note(now_s)

    def drop(self, key: BlockKey, generation: int, now_s: float) -> None:
        """A copy is gone."""
        if self._added.pop(generation, None) is None:
            self._dropped.append(Dropped(key, generation))
        self._note(now_s)

    def take(self, limit: int) -> list[BlocksChanged]:
        """All changes, in messages of at most ``limit`` each."""
        added, dropped = list(self._added.values()), self._dropped
        self._added, self._dropped, self.since_s = {}, [], None
        batches: list[BlocksChanged] = []
        while added or dropped:
            drops, dropped = dropped[:limit], dropped[limit:]
            # an add may need the drop of its older copy first
            room = 0 if dropped else limit - len(drops)
            adds, added = added[:room], added[room:]
            if not drops and not adds:
                continue
            self.seq += 1
            batches.append(
                BlocksChanged(
                    store=self.store,
                    seq=self.seq,
                    added=tuple(adds),
                    dropped=tuple(drops),
                )
            )
        return batches

    def _note(self, now_s: float) -> None:
        if self.since_s is None:
            self.since_s = now_s
