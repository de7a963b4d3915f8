"""What a store has in both tiers, as others ask for it. Pure."""

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import chain, groupby

from kvtide.bus.messages import SnapshotPage
from kvtide.kv import BlockKey, Located
from kvtide.store.events import BlockRow
from kvtide.store.inventory import Inventory
from kvtide.store.ssd.tier import SsdTier


def present(
    inventory: Inventory, ssd: SsdTier, keys: Sequence[BlockKey]
) -> tuple[Located, ...]:
    """The best copies of the first keys, up to the first that is in neither tier."""
    here = inventory.present(keys)
    if len(here) == len(keys):
        return here
    found = list(here)
    for key in keys[len(found) :]:
        slot = inventory.index.get(key)
        located = ssd.find(key) if slot is None else inventory.located(slot)
        if located is None:
            break
        found.append(located)
    return tuple(found)


def page(
    inventory: Inventory, ssd: SsdTier, after: BlockKey | None, limit: int
) -> SnapshotPage:
    """A page of the copies in both tiers, as of the last change told."""
    dram = inventory.page(after, limit)
    copies = ssd.page(after, limit)
    if not copies:
        return dram
    by_key = groupby(
        merge(dram.located, copies, key=lambda located: located.key),
        key=lambda located: located.key,
    )
    groups = [(key, tuple(located)) for key, located in by_key]
    more = dram.next_key is not None or len(copies) == limit or len(groups) > limit
    groups = groups[:limit]
    return SnapshotPage(
        store=dram.store,
        seq=dram.seq,
        located=tuple(chain.from_iterable(located for _, located in groups)),
        next_key=groups[-1][0] if more else None,
    )


def rows(inventory: Inventory, ssd: SsdTier) -> Iterator[BlockRow]:
    """The whole state; each row is true when it is taken."""
    yield from inventory.rows()
    yield from ssd.rows()
