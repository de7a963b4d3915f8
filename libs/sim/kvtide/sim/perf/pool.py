"""A store's blocks by the store's own eviction code, in DRAM and on SSD."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from kvtide.store.eviction import NONE, Policy


@dataclass(frozen=True, slots=True)
class Held:
    """A block's place in one tier."""

    block: int
    slot: int
    generation: int


class Tier:
    """Blocks in slots of one tier; slots grow with use up to the capacity."""

    def __init__(
        self,
        capacity_blocks: int,
        policy: Policy,
        generations: Iterator[int] | None = None,
    ) -> None:
        """Empty. Tiers of one store share ``generations``."""
        self.limit = capacity_blocks
        self._generations = generations or count(1)
        self._eviction = policy.make()
        self._line = self._eviction.add_line()
        self._slots: dict[int, int] = {}
        self._block: list[int] = []
        self._generation: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        """Blocks that are here."""
        return len(self._slots)

    def __contains__(self, block: int) -> bool:
        """Whether the block is here."""
        return block in self._slots

    def held(self, block: int) -> Held | None:
        """Where the block is."""
        slot = self._slots.get(block)
        return None if slot is None else Held(block, slot, self._generation[slot])

    def prefix(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are here."""
        slots = self._slots
        return next((n for n, b in enumerate(blocks) if b not in slots), len(blocks))

    def use(self, block: int) -> bool:
        """It was read; False if it isn't here."""
        slot = self._slots.get(block)
        if slot is None:
            return False
        self._eviction.use(slot)
        return True

    def put(self, block: int, depth: int) -> tuple[Held | None, list[Held]]:
        """Keep a block that is not here; what had to go for it. None: no room at all."""
        gone = self.trim(self.limit - 1)
        if self.limit < 1:
            return None, gone
        slot = self._slot()
        self._slots[block] = slot
        self._block[slot] = block
        self._generation[slot] = next(self._generations)
        self._eviction.begin(slot, block, depth)
        self._eviction.enter(self._line, slot)
        return Held(block, slot, self._generation[slot]), gone

    def trim(self, blocks: int) -> list[Held]:
        """Let the next ones go until so many are left."""
        gone: list[Held] = []
        while len(self._slots) > max(0, blocks):
            slot = self._eviction.next(self._line)
            if slot == NONE:
                break
            held = Held(self._block[slot], slot, self._generation[slot])
            self._eviction.evict(slot, held.block)
            del self._slots[held.block]
            self._free.append(slot)
            gone.append(held)
        return gone

    def drop(self, block: int) -> Held | None:
        """Let a block go, if it is here."""
        held = self.held(block)
        if held is not None:
            self._eviction.leave(held.slot)
            del self._slots[block]
            self._free.append(held.slot)
        return held

    def _slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._eviction.add_slots(1)
        self._block.append(NONE)
        self._generation.append(0)
        return len(self._block) - 1


@dataclass(frozen=True, slots=True)
class Change:
    """What came and what went, by tier (True: SSD); nothing that did both."""

    added: tuple[tuple[Held, bool], ...]
    dropped: tuple[tuple[Held, bool], ...]

    @classmethod
    def of(
        cls, added: list[tuple[Held, bool]], dropped: list[tuple[Held, bool]]
    ) -> "Change":
        """Of what happened, in any order."""
        both = {held.generation for held, _ in added}
        both &= {held.generation for held, _ in dropped}
        return cls(
            tuple(each for each in added if each[0].generation not in both),
            tuple(each for each in dropped if each[0].generation not in both),
        )


class Store:
    """One host's part of the pool. What DRAM lets go moves to the SSD, if there is one."""

    def __init__(self, dram_blocks: int, ssd_blocks: int, policy: Policy) -> None:
        """Empty."""
        generations = count(1)
        self.dram = Tier(dram_blocks, policy, generations)
        self.ssd = Tier(ssd_blocks, policy, generations)
        self.ssd_written = 0

    def holds(self, block: int) -> bool:
        """In any tier."""
        return block in self.dram or block in self.ssd

    def use(self, block: int) -> bool:
        """It was read, from any tier; False if it isn't here."""
        return self.dram.use(block) or self.ssd.use(block)

    def put(self, blocks: Sequence[int]) -> Change:
        """Use what is in DRAM and keep the rest there, tail first."""
        added: list[tuple[Held, bool]] = []
        dropped: list[tuple[Held, bool]] = []
        for depth in reversed(range(len(blocks))):
            block = blocks[depth]
            if self.dram.use(block):
                continue
            held, gone = self.dram.put(block, depth)
            if held is not None:
                added.append((held, False))
            for old in gone:
                dropped.append((old, False))
                self._demote(old.block, added, dropped)
        return Change.of(added, dropped)

    def drop(self, blocks: Sequence[int]) -> Change:
        """Let these go."""
        dropped: list[tuple[Held, bool]] = []
        for block in blocks:
            for tier, ssd in ((self.dram, False), (self.ssd, True)):
                held = tier.drop(block)
                if held is not None:
                    dropped.append((held, ssd))
        return Change((), tuple(dropped))

    def _demote(
        self,
        block: int,
        added: list[tuple[Held, bool]],
        dropped: list[tuple[Held, bool]],
    ) -> None:
        if self.ssd.limit < 1 or self.ssd.use(block):
            return
        held, gone = self.ssd.put(block, 0)
        if held is not None:
            self.ssd_written += 1
            added.append((held, True))
        dropped += [(old, True) for old in gone]
