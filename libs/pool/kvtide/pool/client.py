"""The client: puts into the store on this host, verified reads from any store."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import count
from types import TracebackType
from typing import Self

import structlog
from prometheus_client import CollectorRegistry

from kvtide.bus import BusError, BusTimeout, Node
from kvtide.bus.messages import (
    AnyMessage,
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
from kvtide.kv import BlockHeader, Layout, Lease, Located, NodeRef, Role, SpaceTags
from kvtide.pool.blocks import BlockReader
from kvtide.pool.copies import BadBytes, checked_header
from kvtide.pool.errors import PoolUnavailable
from kvtide.pool.ledger import Ledger
from kvtide.pool.limits import PoolLimits
from kvtide.pool.link import LocalStore, StoreLink
from kvtide.pool.metrics import PoolMetrics
from kvtide.pool.outcomes import PartRead, PartSink, ReadOutcome
from kvtide.pool.put import Put, PutSpec
from kvtide.pool.reports import BadCopyReports
from kvtide.pool.staging import Stager
from kvtide.runtime import LimitError, TaskScope

log = structlog.get_logger("kvtide.pool")


class PoolClient:
    """One process's way to the pool; shared by the roles in it. For one event loop.

    Use as an async context manager, inside the node's. It follows the roster for the
    store on this host, tells it each second which leases this process holds, and
    drops everything when the node is fenced.
    """

    def __init__(
        self,
        node: Node,
        *,
        registry: CollectorRegistry,
        limits: PoolLimits | None = None,
    ) -> None:
        """Nothing runs before ``start``."""
        self._node = node
        self._limits = limits or PoolLimits()
        self._metrics = PoolMetrics(registry)
        self._tasks = TaskScope(on_error=_task_failed)
        self._ledger = Ledger()
        self._open: set[Put] = set()
        self._numbers = count()
        self._lists = count()
        self._releasing: dict[Lease, asyncio.Event] = {}
        self._link = StoreLink(node, self._limits, self._store_lost)
        reports = BadCopyReports(node, self._tasks, self._limits, self._metrics)
        self._reports = reports
        stager = Stager(node, self._ledger, self._tasks, self._limits)
        self._stager = stager
        self._reader = BlockReader(node, reports, self._limits, self._metrics, stager)
        self._metrics.ready.set_function(lambda: self.ready)
        self._metrics.open_puts.set_function(lambda: len(self._open))

    # ---- life

    async def start(self) -> None:
        """Begin to look for the store on this host."""
        self._node.on_fenced(self._fenced)
        self._link.start(self._tasks)
        self._tasks.spawn(self._list_leases(), name="pool leases")

    async def close(self) -> None:
        """End all puts, tell the store so, and end the tasks. Idempotent."""
        for put in list(self._open):
            await self._end(put)
        await self._tasks.close()

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        await self.close()

    @property
    def ready(self) -> bool:
        """Whether a store on this host takes blocks now."""
        return self._link.local is not None

    @property
    def store(self) -> NodeRef | None:
        """That store."""
        return None if self._link.local is None else self._link.local.ref

    # ---- puts

    async def begin(
        self,
        lease: Lease,
        tags: SpaceTags,
        layout: Layout,
        blocks: Sequence[PutBlock],
        *,
        timeout_s: float = 2.0,
    ) -> Put:
        """Slots to write ``blocks`` into; held until the put is released.

        Raises:
            PoolUnavailable: no store on this host, no answer in time, or a refusal:
                go on without pooling. Nothing is held then.
        """
        local = self._link.local
        if local is None:
            raise self._unavailable("no_store", "no store on this host takes blocks")
        if self._ledger.puts >= self._limits.open_puts:
            raise self._unavailable("too_many_puts", "too many puts are open here")
        if lease in self._releasing:
            await self._releasing[lease].wait()
        self._ledger.open(lease)
        try:
            message = PutBegin(
                lease=lease,
                put=next(self._numbers),
                tags=tags,
                slot_bytes=layout.slot_bytes,
                header_bytes=layout.header_bytes,
                blocks=tuple(blocks),
            )
            granted = await self._granted(local, message, timeout_s)
            self._still_linked(local, lease)
            put = self._make_put(local, message, granted, layout)
        except BaseException:
            await self._close_lease(lease, local.ref)
            raise
        self._open.add(put)
        return put

    async def release(self, lease: Lease) -> None:
        """End all puts of the lease in this process. Idempotent, no error."""
        for put in [put for put in self._open if put.lease == lease]:
            await self._end(put)

    # ---- reads

    def staged(
        self, located: Sequence[Located], *, timeout_s: float
    ) -> AbstractAsyncContextManager[Sequence[Located | None]]:
        """Where each copy can be read inside the context; None: it can't be had.

        For those who read headers and parts themselves: a copy on SSD can be read only
        after its store has staged it. Copies in DRAM are where they were.
        """
        return self._stager.staged(located, timeout_s=timeout_s)

    async def read_headers(
        self,
        located: Sequence[Located],
        tags: SpaceTags,
        layout: Layout,
        *,
        timeout_s: float,
        purpose: str = "reuse",
    ) -> list[BlockHeader | None]:
        """The verified header of each copy in DRAM; None: a miss, or on SSD.

        With ``header.parts[i].xxh3`` in a ``PartRead`` a block can be read layer by
        layer, each layer verified alone.
        """
        return await self._reader.headers(
            located, tags, layout, timeout_s=timeout_s, purpose=purpose
        )

    async def read_blocks(
        self,
        located: Sequence[Located],
        tags: SpaceTags,
        layout: Layout,
        sinks: Sequence[PartSink],
        *,
        timeout_s: float,
        purpose: str = "reuse",
        parts: range | None = None,
    ) -> list[ReadOutcome]:
        """Copy each block's parts (all, or those in ``parts``) where its sink says.

        The bytes are verified in the caller's memory, which must be private: header
        against descriptor, each part against the header. A bad copy or a dead store
        is a miss and its target's content undefined; a bad copy is reported. A block
        on SSD is staged by its store first. When
        this returns or raises, no target is touched any more.
        """
        return await self._reader.blocks(
            located,
            tags,
            layout,
            sinks,
            timeout_s=timeout_s,
            purpose=purpose,
            parts=parts,
        )

    async def read_parts(
        self,
        reads: Sequence[PartRead],
        layout: Layout,
        *,
        timeout_s: float,
        purpose: str = "handover",
    ) -> list[ReadOutcome]:
        """Copy parts of any slots and compare each with the checksum it must have.

        Else as ``read_blocks``. Parts of one slot travel together and, when the way
        to the store fails, fail together.
        """
        return await self._reader.parts(
            reads, layout, timeout_s=timeout_s, purpose=purpose
        )

    # ---- talking to the store

    async def _ask(
        self, store: NodeRef, message: Message, timeout_s: float
    ) -> AnyMessage:
        """Ask, and once more after half the time: all of these are idempotent."""
        subject = self._node.subjects.inbox(Role.STORE, store.node, Hop.POOL)
        try:
            try:
                reply = await self._node.bus.request(
                    subject, message, timeout_s=timeout_s / 2
                )
            except BusTimeout:
                reply = await self._node.bus.request(
                    subject, message, timeout_s=timeout_s / 2
                )
        except (BusError, LimitError) as error:
            raise self._unavailable("no_answer", str(error)) from error
        if isinstance(reply, Failure):
            raise self._unavailable(reply.code, reply.reason)
        return reply

    async def _granted(
        self, local: LocalStore, message: PutBegin, timeout_s: float
    ) -> PutGranted:
        reply = await self._ask(local.ref, message, timeout_s)
        if not isinstance(reply, PutGranted) or len(reply.slots) != len(message.blocks):
            raise self._unavailable("bad_answer", f"unexpected {type(reply).__name__}")
        return reply

    def _still_linked(self, local: LocalStore, lease: Lease) -> None:
        if self._link.local is not local or lease.owner != self._node.ref:
            raise self._unavailable("fenced", "the store's or our own life ended")

    async def _commit(
        self,
        store: NodeRef,
        lease: Lease,
        blocks: tuple[CommitBlock, ...],
        timeout_s: float,
    ) -> Sequence[BlockState]:
        message = PutCommit(lease=lease, blocks=blocks)
        reply = await self._ask(store, message, timeout_s)
        if not isinstance(reply, PutCommitted) or len(reply.states) != len(blocks):
            raise self._unavailable("bad_answer", f"unexpected {type(reply).__name__}")
        for state in reply.states:
            self._metrics.commits.labels(state.value).inc()
        return reply.states

    def _make_put(
        self, local: LocalStore, message: PutBegin, granted: PutGranted, layout: Layout
    ) -> Put:
        slots: list[PutSlot] = []
        existing: list[tuple[int, ...] | None] = []
        for wanted, slot in zip(message.blocks, granted.slots, strict=True):
            sums = self._existing_sums(local, wanted, slot, message.tags, layout)
            spoilt = slot.existing is not None and sums is None
            slots.append(PutSlot(None) if spoilt else slot)
            existing.append(sums)
        spec = PutSpec(
            lease=message.lease,
            tags=message.tags,
            layout=layout,
            blocks=message.blocks,
            slots=tuple(slots),
            existing=existing,
            arenas=local.arenas,
        )
        commit = partial(self._commit, local.ref, message.lease)
        return Put(spec, commit, self._end, self._metrics.written_bytes.inc)

    def _existing_sums(
        self,
        local: LocalStore,
        wanted: PutBlock,
        slot: PutSlot,
        tags: SpaceTags,
        layout: Layout,
    ) -> tuple[int, ...] | None:
        """The part checksums of a copy that is here, from its verified header.

        A copy with another key than the wanted block's is none.
        """
        located = slot.existing
        if located is None or located.key != wanted.key:
            return None
        start = located.slot.offset
        arena = local.arenas[located.slot.arena]
        raw = bytes(arena[start : start + layout.header_bytes])
        try:
            header = checked_header(raw, located, tags, layout)
        except BadBytes as bad:
            self._reports.report(located, bad.reason, bad.detail)
            return None
        return tuple(part.xxh3 for part in header.parts)

    # ---- ends

    async def _end(self, put: Put) -> None:
        """A put is over: no write is under way any more when the store hears of it."""
        if put not in self._open:
            return
        self._open.discard(put)
        put.close("it was released")
        if put.writing:
            await asyncio.to_thread(put.wait_quiet, self._limits.settle_timeout_s)
        local = self._link.local
        await self._close_lease(put.lease, None if local is None else local.ref)

    async def _close_lease(self, lease: Lease, store: NodeRef | None) -> None:
        if not self._ledger.close(lease) or store is None:
            return
        # a new put of this lease must not be overtaken by the release
        sent = self._releasing[lease] = asyncio.Event()
        subject = self._node.subjects.inbox(Role.STORE, store.node, Hop.POOL)
        try:
            async with asyncio.timeout(self._limits.settle_timeout_s):
                await self._node.bus.publish(subject, LeaseRelease(lease=lease))
        except (BusError, LimitError, TimeoutError) as error:
            # the list of leases says it again
            log.debug("release_not_sent", request=lease.request, error=str(error))
        finally:
            self._releasing.pop(lease, None)
            sent.set()

    async def _list_leases(self) -> None:
        while True:
            await self._node.clock.sleep(self._limits.list_every_s)
            store = self.store
            if store is None:
                continue
            listed = Owned(
                owner=self._node.ref,
                seq=next(self._lists),
                requests=self._ledger.requests(),
            )
            subject = self._node.subjects.inbox(Role.STORE, store.node, Hop.POOL)
            try:
                await self._node.bus.publish(subject, listed)
            except (BusError, LimitError) as error:
                log.debug("leases_not_listed", error=str(error))

    def _fenced(self, _ref: NodeRef) -> None:
        self._forget("this process was paused and fenced")

    def _store_lost(self, _store: NodeRef) -> None:
        self._forget("its store is gone")

    def _forget(self, reason: str) -> None:
        puts, self._open = self._open, set()
        self._ledger.clear()
        for put in puts:
            put.close(reason)

    def _unavailable(self, code: str, reason: str) -> PoolUnavailable:
        self._metrics.unavailable.labels(code).inc()
        return PoolUnavailable(f"{code}: {reason}", code=code)


def _task_failed(error: BaseException) -> None:
    log.error("pool_task_failed", exc_info=error)
