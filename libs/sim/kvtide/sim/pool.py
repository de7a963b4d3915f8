"""A worker's way to the pool in virtual time: production puts and checks over it."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count

from xxhash import xxh3_64_intdigest

from kvtide.bus import BusError, BusTimeout, Node
from kvtide.bus.messages import (
    AnyMessage,
    BadCopy,
    BlockState,
    CommitBlock,
    Failure,
    LeaseRelease,
    Message,
    Owned,
    PutBegin,
    PutBlock,
    PutCommit,
    PutCommitted,
    PutGranted,
    PutSlot,
)
from kvtide.bus.subjects import Hop
from kvtide.kv import Lease, Located, NodeRef, Role, SlotRef, SpaceTags
from kvtide.pool import PoolUnavailable, Put
from kvtide.pool.copies import BadBytes, check_parts, checked_header
from kvtide.pool.ledger import Ledger
from kvtide.pool.put import Commit, PutSpec
from kvtide.sim.engine import LAYOUT, SimRun
from kvtide.sim.kernel import Kernel, Life
from kvtide.sim.memory import SimMemory

LIST_EVERY_S = 1.0
ASK_S = 1.0
COMMIT_S = 2.5


class WatchedPut(Put):
    """A put whose writes are seen by whoever gave the slots."""

    def __init__(
        self,
        spec: PutSpec,
        commit: Commit,
        release: Callable[[Put], Awaitable[None]],
        written: Callable[[SlotRef], None],
    ) -> None:
        """As ``Put``; ``written`` hears of each write's slot."""
        super().__init__(spec, commit, release, lambda _: None)
        self._seen = written

    def write_part(self, i: int, part: int, data: memoryview) -> int:
        """See ``Put.write_part``."""
        xxh3 = super().write_part(i, part, data)
        slot = self.slots[i].slot
        if slot is not None:
            self._seen(slot)
        return xxh3


class SimPool:
    """Drives ``Put``, ``Ledger`` and the checks of copies as ``PoolClient`` does."""

    def __init__(
        self, kernel: Kernel, life: Life, node: Node, memory: SimMemory
    ) -> None:
        """No store yet."""
        self._kernel = kernel
        self._life = life
        self._node = node
        self._memory = memory
        self._ledger = Ledger()
        self._open: set[Put] = set()
        self._numbers = count()
        self._lists = count()
        self.store: NodeRef | None = None

    async def start(self) -> None:
        """Look for the store on this host, and list leases to it."""
        self._node.on_fenced(lambda _: self._forget("fenced"))
        self._kernel.spawn(self._list_leases(), self._life)

    @property
    def open_puts(self) -> int:
        """Puts that were not released."""
        return len(self._open)

    def watch(self) -> NodeRef | None:
        """The live store on this host; what another life of it had is forgotten."""
        found = next(
            (
                member.ref
                for member in self._node.roster.live(Role.STORE)
                if member.beat.host == self._node.host and member.ready
            ),
            None,
        )
        if found != self.store:
            self._forget("its store is gone")
            self.store = found
        return found

    # ---- puts

    async def begin(
        self, lease: Lease, tags: SpaceTags, blocks: Sequence[PutBlock]
    ) -> Put:
        """See ``PoolClient.begin``."""
        store = self.store
        arena = None if store is None else self._memory.arena(store)
        if store is None or arena is None:
            raise PoolUnavailable("no store", code="no_store")
        self._ledger.open(lease)
        message = PutBegin(
            lease=lease,
            put=next(self._numbers),
            tags=tags,
            slot_bytes=LAYOUT.slot_bytes,
            header_bytes=LAYOUT.header_bytes,
            blocks=tuple(blocks),
        )
        try:
            granted = await self._granted(store, lease, message)
        except PoolUnavailable:
            await self._close_lease(lease, store)
            raise
        put = self._make(store, arena, message, granted)
        self._open.add(put)
        return put

    async def _granted(
        self, store: NodeRef, lease: Lease, message: PutBegin
    ) -> PutGranted:
        granted = await self._ask(store, message, ASK_S)
        if not isinstance(granted, PutGranted):
            raise PoolUnavailable("a bad answer", code="bad_answer")
        if self.store != store or lease.owner != self._node.ref:
            raise PoolUnavailable("a life has ended", code="fenced")
        return granted

    def _make(
        self,
        store: NodeRef,
        arena: memoryview,
        message: PutBegin,
        granted: PutGranted,
    ) -> Put:
        slots: list[PutSlot] = []
        existing: list[tuple[int, ...] | None] = []
        for slot in granted.slots:
            sums = self._sums(arena, slot, message.tags)
            spoilt = slot.existing is not None and sums is None
            slots.append(PutSlot(None) if spoilt else slot)
            existing.append(sums)
        spec = PutSpec(
            lease=message.lease,
            tags=message.tags,
            layout=LAYOUT,
            blocks=message.blocks,
            slots=tuple(slots),
            existing=existing,
            arenas=[arena],
        )
        commit = partial(self._commit, store, message.lease)
        return WatchedPut(spec, commit, self._end, self._memory.written)

    def _sums(
        self, arena: memoryview, slot: PutSlot, tags: SpaceTags
    ) -> tuple[int, ...] | None:
        located = slot.existing
        if located is None:
            return None
        start = located.slot.offset
        raw = bytes(arena[start : start + LAYOUT.header_bytes])
        try:
            header = checked_header(raw, located, tags, LAYOUT)
        except BadBytes:
            return None
        return tuple(part.xxh3 for part in header.parts)

    async def _commit(
        self,
        store: NodeRef,
        lease: Lease,
        blocks: tuple[CommitBlock, ...],
        timeout_s: float,
    ) -> Sequence[BlockState]:
        del timeout_s
        message = PutCommit(lease=lease, blocks=blocks)
        reply = await self._ask(store, message, COMMIT_S)
        if not isinstance(reply, PutCommitted):
            raise PoolUnavailable("a bad answer", code="bad_answer")
        return reply.states

    async def _ask(
        self, store: NodeRef, message: Message, timeout_s: float
    ) -> AnyMessage:
        subject = self._node.subjects.inbox(Role.STORE, store.node, Hop.POOL)
        ask = partial(self._node.bus.request, subject, message, timeout_s=timeout_s / 2)
        try:
            try:
                reply = await ask()
            except BusTimeout:
                reply = await ask()
        except BusError as error:
            raise PoolUnavailable(str(error), code="no_answer") from error
        if isinstance(reply, Failure):
            raise PoolUnavailable(reply.reason, code=reply.code)
        return reply

    async def _end(self, put: Put) -> None:
        if put not in self._open:
            return
        self._open.discard(put)
        put.close("it was released")
        await self._close_lease(put.lease, self.store)

    async def _close_lease(self, lease: Lease, store: NodeRef | None) -> None:
        if not self._ledger.close(lease) or store is None:
            return
        subject = self._node.subjects.inbox(Role.STORE, store.node, Hop.POOL)
        await self._node.bus.publish(subject, LeaseRelease(lease=lease))

    async def _list_leases(self) -> None:
        while True:
            await self._kernel.sleep(LIST_EVERY_S, self._life)
            store = self.store
            if store is None:
                continue
            listed = Owned(
                owner=self._node.ref,
                seq=next(self._lists),
                requests=self._ledger.requests(),
            )
            subject = self._node.subjects.inbox(Role.STORE, store.node, Hop.POOL)
            await self._node.bus.publish(subject, listed)

    def _forget(self, reason: str) -> None:
        puts, self._open = self._open, set()
        self._ledger.clear()
        for put in puts:
            put.close(reason)

    # ---- reads

    async def read_block(
        self, located: Located, tags: SpaceTags, run: SimRun, block: int
    ) -> bool:
        """Read a whole block into the run; whether it is there and verified."""
        slot = located.slot
        raw = await self._read(slot, 0, slot.length)
        if raw is None:
            return False
        try:
            header = checked_header(raw[: LAYOUT.header_bytes], located, tags, LAYOUT)
            parts = [
                raw[part.offset : part.offset + part.length] for part in header.parts
            ]
            numbers = range(LAYOUT.parts)
            sums = [self.hash(part) for part in parts]
            check_parts(header, numbers, [LAYOUT.part_bytes] * len(parts), sums)
        except BadBytes as bad:
            subject = self._node.subjects.inbox(Role.STORE, slot.node, Hop.QUERY)
            report = BadCopy(located=located, reason=bad.detail)
            await self._node.bus.publish(subject, report)
            return False
        start = block * LAYOUT.block_tokens
        for number, part in enumerate(parts):
            run.part(number, start, start + LAYOUT.block_tokens)[:] = part
        return True

    async def read_part(
        self, slot: SlotRef, number: int, xxh3: int, into: Callable[[], memoryview]
    ) -> bool:
        """Read one part from a slot; whether it is what it must be."""
        target = into()
        raw = await self._read(slot, LAYOUT.part_offset(number), len(target))
        if raw is None or self.hash(raw) != xxh3:
            return False
        target[:] = raw
        return True

    async def _read(self, slot: SlotRef, offset: int, length: int) -> bytes | None:
        if not self._node.roster.is_live(slot.owner):
            return None
        return await self._memory.read(slot, offset, length, self._life)

    def hash(self, part: bytes) -> int:
        """The checksum of a part; a seam for planted bugs."""
        return xxh3_64_intdigest(part)
