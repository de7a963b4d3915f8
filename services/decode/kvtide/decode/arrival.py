"""Which of a prompt's KV is there, what is coming, and what must be computed. Pure."""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from kvtide.bus.messages import HandoverPlan, PartSums
from kvtide.decode.events import BlockCopy, LayerPart, PartCopy
from kvtide.kv import BlockKey


class Source(StrEnum):
    """Where a block's KV comes from."""

    POOL = "pool"
    HANDOVER = "handover"
    LOCAL = "local"


class Arrival:
    """The KV of the first ``tokens`` tokens of a sequence, block by block.

    Parts of two copies are never mixed: a block is read whole from the pool, or part by
    part from the one slot that prefill planned for it, or computed here. A block whose
    read failed is not read again from the same copy. A copy is read only if it has the
    key that the request gives its block: a descriptor alone would vouch for itself.
    """

    def __init__(
        self, tokens: int, block_tokens: int, layers: int, keys: Sequence[BlockKey]
    ) -> None:
        """Nothing is there yet; of no tokens, everything is.

        ``keys`` are those of the full blocks.
        """
        self._tokens = tokens
        self._keys = keys
        self._block_tokens = block_tokens
        self._whole = (1 << layers) - 1
        self.blocks = -(-tokens // block_tokens)
        self._have = [0] * self.blocks
        self._source: list[Source | None] = [None] * self.blocks
        self._copies: dict[int, BlockCopy] = {}
        self._copying: dict[int, BlockCopy] = {}
        self._missed: set[BlockCopy] = set()
        self._announced: dict[LayerPart, PartSums] = {}
        self._reading: set[LayerPart] = set()
        self._bad_slots: set[int] = set()
        self._seqs: set[int] = set()
        self.plan: HandoverPlan | None = None

    @property
    def complete(self) -> bool:
        """All is there."""
        return all(have == self._whole for have in self._have)

    @property
    def settled(self) -> bool:
        """Nothing is being read, and nothing that was announced is left to read."""
        return not (self._copying or self._reading or self._copies or self._readable())

    @property
    def reused_tokens(self) -> int:
        """Tokens whose KV nobody computed for this request.

        What prefill computed although a copy was read here too counts as computed.
        """
        limit = self._tokens
        if self.plan is not None:
            limit = min(limit, self.plan.first_block * self._block_tokens)
        count = sum(
            self._fill(block)
            for block, source in enumerate(self._source)
            if source is Source.POOL
        )
        return min(count, limit)

    @property
    def absent_tokens(self) -> int:
        """Tokens whose KV is not here, and no copy in the pool is known."""
        return sum(
            self._fill(block)
            for block, have in enumerate(self._have)
            if have != self._whole
            and block not in self._copies
            and block not in self._copying
        )

    def source(self, block: int) -> Source | None:
        """Where a block that is there came from; None beyond the prompt."""
        return self._source[block] if block < self.blocks else None

    def offer(self, copies: Iterable[BlockCopy]) -> None:
        """These blocks can be read from the pool; what has another key is a miss."""
        for copy in copies:
            block = copy.block
            wanted = self._is_ours(copy) and self._have[block] != self._whole
            if wanted and block not in self._copying and copy not in self._missed:
                self._copies[block] = copy

    def planned(self, plan: HandoverPlan) -> None:
        """Prefill says where it will put what."""
        if self.plan is not None:
            return
        self.plan = plan
        self.offer(BlockCopy(copy.block, copy.located) for copy in plan.copies)

    def announced(self, seq: int, parts: Iterable[PartSums]) -> None:
        """Prefill has written these parts (message number ``seq``)."""
        self._seqs.add(seq)
        self.announced_again(parts)

    def announced_again(self, parts: Iterable[PartSums]) -> None:
        """Prefill has written these parts; repeats are harmless."""
        for sums in parts:
            if sums.block >= self.blocks or sums.block in self._bad_slots:
                continue
            part = LayerPart(sums.block, sums.layer)
            have = self._have[sums.block] >> sums.layer & 1
            if not have and part not in self._reading:
                self._announced[part] = sums

    def lacks_messages(self, count: int) -> bool:
        """Whether one of the first ``count`` announcements was lost."""
        return len(self._seqs) < count

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """What is to be read from the pool now; ``copies_read`` ends it."""
        copies = tuple(self._copies[block] for block in sorted(self._copies))
        self._copying.update(self._copies)
        self._copies.clear()
        return copies

    def take_parts(self) -> tuple[PartCopy, ...]:
        """What is to be read from prefill's slots now; ``parts_read`` ends it."""
        if self.plan is None:
            return ()
        slots = {slot.block: slot for slot in self.plan.slots}
        taken: list[PartCopy] = []
        for part in self._readable():
            slot = slots[part.block]
            sums = self._announced.pop(part)
            self._reading.add(part)
            taken.append(PartCopy(slot.slot, slot.tokens, sums))
        return tuple(taken)

    def copies_read(self, read: Iterable[int], missed: Iterable[int]) -> None:
        """Reads from the pool have ended."""
        for block in read:
            self._copying.pop(block, None)
            self._have[block] = self._whole
            self._source[block] = Source.POOL
        for block in missed:
            copy = self._copying.pop(block, None)
            if copy is not None:
                self._missed.add(copy)

    def parts_read(
        self, read: Iterable[LayerPart], missed: Iterable[LayerPart]
    ) -> None:
        """Reads from prefill's slots have ended."""
        for part in missed:
            self._reading.discard(part)
            self._bad_slots.add(part.block)
            self._have[part.block] = 0
        for part in read:
            self._reading.discard(part)
            if part.block not in self._bad_slots:
                self._have[part.block] |= 1 << part.layer
                self._source[part.block] = Source.HANDOVER
        for part in [part for part in self._announced if part.block in self._bad_slots]:
            del self._announced[part]

    def missing(self) -> tuple[int, int] | None:
        """The first range of tokens, whole blocks wide, that is not there."""
        lacking = [have != self._whole for have in self._have]
        if True not in lacking:
            return None
        first = lacking.index(True)
        last = first
        while last < self.blocks and lacking[last]:
            last += 1
        return first * self._block_tokens, min(last * self._block_tokens, self._tokens)

    def computed(self, start: int, end: int) -> None:
        """Tokens ``start`` … ``end`` - 1 were computed here, and all before are there."""
        for block in range(start // self._block_tokens, self.blocks):
            if block * self._block_tokens + self._fill(block) > end:
                break
            self._have[block] = self._whole
            self._source[block] = Source.LOCAL

    def _is_ours(self, copy: BlockCopy) -> bool:
        keyed = 0 <= copy.block < min(self.blocks, len(self._keys))
        return keyed and copy.located.key == self._keys[copy.block]

    def _fill(self, block: int) -> int:
        return min(self._block_tokens, self._tokens - block * self._block_tokens)

    def _readable(self) -> list[LayerPart]:
        if self.plan is None:
            return []
        slots = {slot.block for slot in self.plan.slots}
        return [
            part
            for part in self._announced
            if part.block in slots
            and part.block not in self._copying
            and part.block not in self._copies
            and self._have[part.block] != self._whole
        ]
