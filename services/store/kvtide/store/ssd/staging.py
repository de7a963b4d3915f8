"""Blocks are brought into DRAM for those who ask: pinned, verified, and for a while.

Pure. All who ask for a block while it is on its way wait for the same read. Its slot
is pinned under the lease of each; it is freed with the last of them, unless the block
was hit often enough to stay in DRAM: then everyone is told of the copy.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtide.bus.messages import BlocksStaged, StageBlocks
from kvtide.kv import BlockKey, Located, SpaceTags
from kvtide.store.events import Reply
from kvtide.store.leases import Held
from kvtide.store.ssd.books import Books
from kvtide.store.ssd.events import ReadRecord, RecordDone

MAX_STAGE_KEYS = 8192


@dataclass(slots=True, eq=False)
class _Waiting:
    """An answer that lacks ``left`` blocks; given at ``until_s`` whatever is there."""

    token: int | None
    held: Held
    located: list[Located | None]
    until_s: float
    left: int = 0
    answered: bool = False

    @property
    def cares(self) -> bool:
        """Whether what comes now is still of use to the asker."""
        return not (self.answered or self.held.expired or self.held.over)


@dataclass(slots=True)
class _Loading:
    """A block on its way into ``slot``, and who waits for it, by place in the answer."""

    era: int
    key: BlockKey
    row: int
    row_generation: int
    segment: int
    slot: int
    generation: int
    slot_bytes: int
    unwanted: bool = False
    waiting: list[tuple[_Waiting, int]] = field(
        default_factory=list[tuple[_Waiting, int]]
    )


@dataclass(frozen=True, slots=True)
class _Guest:
    """A slot that holds a staged block only as long as somebody reads it."""

    slot: int
    generation: int
    slot_bytes: int


Unreadable = Callable[[int | None, RecordDone], None]
"""A record, of this row if it is still there, could not be read as it should be."""

StageCommands = list[Reply | ReadRecord]


class Staging:
    """See the module."""

    def __init__(self, books: Books) -> None:
        """Nothing is under way."""
        self._books = books
        self._loading: dict[int, _Loading] = {}
        self._by_key: dict[BlockKey, _Loading] = {}
        self._guests: dict[BlockKey, _Guest] = {}
        self._waiting: dict[_Waiting, None] = {}

    def __len__(self) -> int:
        """Reads under way."""
        return len(self._loading)

    @property
    def staged_bytes(self) -> int:
        """What staging takes of DRAM: blocks on their way, and those that won't stay."""
        self._forget_guests()
        loading = sum(job.slot_bytes for job in self._loading.values())
        return loading + sum(guest.slot_bytes for guest in self._guests.values())

    @property
    def first_due_s(self) -> float | None:
        """When ``expire`` next has something to do."""
        return min((waiting.until_s for waiting in self._waiting), default=None)

    # ---- asking

    def stage(
        self, held: Held, message: StageBlocks, token: int | None, now_s: float
    ) -> StageCommands:
        """Pin what is in DRAM, read what is not; answer when all is settled."""
        rules = self._books.rules
        wait_s = min(max(0.0, message.wait_ms / 1e3), rules.stage_limit_s)
        keys = message.keys[:MAX_STAGE_KEYS]
        waiting = _Waiting(token, held, [None] * len(message.keys), now_s + wait_s)
        self._forget_guests()
        commands: StageCommands = []
        room = len(self._waiting) < rules.stage_waiters
        for place, key in enumerate(keys):
            located = self._pin(key, held, now_s)
            waiting.located[place] = located
            if located is None and room and self._wait(key, waiting, place):
                continue
            if located is None and room:
                commands += self._load(key, waiting, place, now_s)
        if waiting.left == 0:
            return commands + self._answer(waiting)
        self._waiting[waiting] = None
        return commands

    def _pin(self, key: BlockKey, held: Held, now_s: float) -> Located | None:
        """A copy that is in DRAM already, kept for the lease."""
        inventory, entries = self._books.inventory, self._books.entries
        slot = inventory.index.get(key)
        row = entries.find(key)
        hits = 0 if row is None else entries.hit(row)
        guest = self._guests.get(key)
        if slot is None and guest is not None:
            slot = guest.slot
            if hits >= self._books.rules.promote_hits and inventory.publish(
                slot, key, now_s
            ):
                self._promoted(key)
        if slot is None:
            return None
        return self._keep(slot, key, held)

    def _keep(self, slot: int, key: BlockKey, held: Held) -> Located:
        inventory, table = self._books.inventory, self._books.inventory.table
        generation = table.generation[slot]
        if not held.has(slot, generation):
            table.pin(slot)
            held.slots[slot] = generation
        return Located(key, inventory.slot_ref(slot), table.header_xxh3[slot])

    def _wait(self, key: BlockKey, waiting: _Waiting, place: int) -> bool:
        """Wait for a read that is under way; false: there is none."""
        loading = self._by_key.get(key)
        if loading is None:
            return False
        loading.waiting.append((waiting, place))
        waiting.left += 1
        return True

    def _load(
        self, key: BlockKey, waiting: _Waiting, place: int, now_s: float
    ) -> StageCommands:
        books = self._books
        inventory, entries = books.inventory, books.entries
        row = entries.find(key)
        if row is None:
            return []
        space, tokens = books.space(row), entries.block(row).tokens
        limit = books.rules.stage_share * inventory.table.arena_bytes
        if self.staged_bytes + space.slot_bytes > limit and self.staged_bytes:
            books.tally.stage_refused += 1
            return []
        books.slot_bytes = space.slot_bytes
        slot = inventory.reserve(space, key, tokens, now_s)
        if slot is None:
            books.tally.stage_refused += 1
            return []
        record = entries.place(row)
        number, generation = books.next_number(), inventory.table.generation[slot]
        loading = _Loading(
            era=books.era,
            key=key,
            row=row,
            row_generation=entries.generation[row],
            segment=record.segment,
            slot=slot,
            generation=generation,
            slot_bytes=space.slot_bytes,
        )
        self._loading[number] = self._by_key[key] = loading
        books.segments.begin_use(record.segment)
        self._wait(key, waiting, place)
        offset = inventory.table.offset(slot)
        wanted = books.wanted(row, slot=slot, offset=offset)
        return [ReadRecord(number, record, entries.lsn(row), wanted, generation)]

    # ---- what comes of it

    def done(
        self, done: RecordDone, unreadable: Unreadable, now_s: float
    ) -> list[Reply] | None:
        """A read ended; None: it is none of these."""
        loading = self._loading.pop(done.number, None)
        if loading is None:
            return None
        del self._by_key[loading.key]
        books = self._books
        row: int | None = None
        if loading.era == books.era:
            books.segments.end_use(loading.segment)
            if books.entries.is_use(loading.row, loading.row_generation):
                row = loading.row
        if done.trouble is not None or loading.unwanted:
            books.inventory.free(loading.slot)
            if done.trouble is not None:
                unreadable(row, done)
        else:
            books.tally.staged += 1
            self._settle(loading, row, done.header_xxh3, now_s)
        return self._tell(loading)

    def _settle(
        self, loading: _Loading, row: int | None, header_xxh3: int, now_s: float
    ) -> None:
        books = self._books
        inventory, table, slot = books.inventory, books.inventory.table, loading.slot
        hits = 0 if row is None else books.entries.hits[row]
        stays = hits >= books.rules.promote_hits
        if stays:
            stays = inventory.admit(slot, header_xxh3, now_s)
            books.tally.ssd_promoted += stays
        else:
            table.key[slot] = None
            table.commit(slot, header_xxh3)
        for waiting, place in loading.waiting:
            if waiting.cares:
                kept = self._keep(slot, loading.key, waiting.held)
                waiting.located[place] = kept
        if stays:
            return
        if table.pins[slot]:
            guest = _Guest(slot, loading.generation, loading.slot_bytes)
            self._guests[loading.key] = guest
        else:
            inventory.free(slot)

    def _tell(self, loading: _Loading) -> list[Reply]:
        replies: list[Reply] = []
        for waiting, _ in loading.waiting:
            waiting.left -= 1
            if waiting.left == 0 and not waiting.answered:
                self._waiting.pop(waiting, None)
                replies += self._answer(waiting)
        return replies

    def expire(self, now_s: float) -> list[Reply]:
        """Answer those who have waited for long enough with what is there."""
        late = [waiting for waiting in self._waiting if waiting.until_s <= now_s]
        replies: list[Reply] = []
        for waiting in late:
            del self._waiting[waiting]
            replies += self._answer(waiting)
        return replies

    def delete(self, covers: Callable[[BlockKey, SpaceTags], bool]) -> None:
        """Give what it covers to nobody any more; who reads it already may go on."""
        inventory = self._books.inventory
        for loading in self._loading.values():
            if covers(loading.key, inventory.space(loading.slot).tags):
                loading.unwanted = True
        self._forget_guests()
        for key, guest in list(self._guests.items()):
            if covers(key, inventory.space(guest.slot).tags):
                del self._guests[key]

    # ---- inside

    def _answer(self, waiting: _Waiting) -> list[Reply]:
        waiting.answered = True
        missing = sum(1 for located in waiting.located if located is None)
        self._books.tally.stage_misses += missing
        if waiting.token is None:
            return []
        return [Reply(waiting.token, BlocksStaged(located=tuple(waiting.located)))]

    def _promoted(self, key: BlockKey) -> None:
        del self._guests[key]
        self._books.tally.ssd_promoted += 1

    def _forget_guests(self) -> None:
        """Those whose slots were freed with their last reader's lease."""
        table = self._books.inventory.table
        gone = [
            key
            for key, guest in self._guests.items()
            if not table.is_use(guest.slot, guest.generation)
        ]
        for key in gone:
            del self._guests[key]
