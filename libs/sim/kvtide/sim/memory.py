"""The stores' arenas, and one-sided reads of them by anybody."""

from collections.abc import Callable

from kvtide.kv import NodeRef, SlotRef
from kvtide.sim.kernel import Kernel, Life


class SimMemory:
    """All memory that is shared in a simulation, by the life of the store it is of."""

    def __init__(self, kernel: Kernel, read_s: float = 0.002) -> None:
        """``read_s`` is how long a read takes; what it sees is of the end of it."""
        self._kernel = kernel
        self._read_s = read_s
        self._arenas: dict[NodeRef, memoryview] = {}
        self._watchers: list[Callable[[SlotRef], bool]] = []
        self.strays = 0

    def allocate(self, store: NodeRef, length: int) -> memoryview:
        """A new arena of one life of a store."""
        arena = memoryview(bytearray(length))
        self._arenas[store] = arena
        return arena

    def adopt(self, store: NodeRef, arena: memoryview) -> None:
        """The same process goes on with its memory as another life."""
        self.free(arena)
        self._arenas[store] = arena

    def watch(self, in_use: Callable[[SlotRef], bool]) -> None:
        """Have each written slot shown to a store, which says if the writer may."""
        self._watchers.append(in_use)

    def written(self, slot: SlotRef) -> None:
        """Somebody wrote into a slot; into another's if a store says so."""
        self.strays += not all(in_use(slot) for in_use in self._watchers)

    def free(self, arena: memoryview) -> None:
        """The process of the store is dead."""
        self._arenas = {
            ref: one for ref, one in self._arenas.items() if one is not arena
        }

    def arena(self, store: NodeRef) -> memoryview | None:
        """The arena, mapped for writing, if that life lives."""
        return self._arenas.get(store)

    async def read(
        self, slot: SlotRef, offset: int, length: int, life: Life
    ) -> bytes | None:
        """A private copy of bytes of a slot; None: its store is gone."""
        await self._kernel.sleep(self._read_s, life)
        arena = self._arenas.get(slot.owner)
        if arena is None:
            return None
        start = slot.offset + offset
        return bytes(arena[start : start + length])
