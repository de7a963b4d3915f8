"""Writes behind: a bounded queue that no serving step waits for.

``put`` never blocks and never fails. A task writes batches; while the database is down,
locked, full or slow the newest ``capacity`` changes are kept and older ones dropped and
counted. When it is back after a loss, ``on_repair`` asks the owner for its whole state
again, for that can't be told from the queue any more. However much that is, it goes
through the queue a piece at a time.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import structlog
from prometheus_client import CollectorRegistry, Gauge

from kvtide.catalog.errors import (
    CatalogError,
    CatalogLostError,
    CatalogRejectedError,
    CatalogRevisionError,
    CatalogUnavailableError,
)
from kvtide.catalog.records import BlocksForgotten, Change
from kvtide.runtime import Clock, TaskScope

_log = structlog.get_logger()


Repair = Callable[[], Iterable[Change] | None]
"""Called when changes were lost and all that was left is written. None: it has ``put``
what is needed itself. Else the changes are taken one after another while the queue
drains, so each must be true at the moment when it is taken, not before."""


class ChangeSink(Protocol):
    """What a writer writes to: a ``Catalog``."""

    async def migrate(self) -> None:
        """Bring the schema up to date; ``CatalogError`` when that fails."""
        ...

    async def write(self, changes: Sequence[Change]) -> None:
        """Write all or none; ``CatalogError`` when that fails."""
        ...


@dataclass(frozen=True, slots=True)
class WriterLimits:
    """``capacity`` and ``batch`` count changes; a batch leaves after ``linger_s``."""

    capacity: int = 20_000
    batch: int = 500
    linger_s: float = 0.1
    attempt_s: float = 15.0
    first_pause_s: float = 0.25
    longest_pause_s: float = 10.0


class Writer:
    """Owns the queue and its task. For one event loop.

    Attributes:
        dropped: changes lost to the limit since the start.
        rejected: changes that the database refused for ever, each logged.
        written: changes that are in the database.
        repair_needed: something was dropped and not yet repaired.
        available: the last attempt succeeded.
    """

    def __init__(
        self,
        sink: ChangeSink,
        *,
        clock: Clock,
        limits: WriterLimits | None = None,
        on_repair: Repair | None = None,
    ) -> None:
        """Nothing runs before ``start``; ``put`` already queues."""
        self.dropped = 0
        self.rejected = 0
        self.written = 0
        self.repair_needed = False
        self.available = True
        self._sink = sink
        self._clock = clock
        self._limits = limits or WriterLimits()
        self._on_repair = on_repair
        self._queue: deque[Change] = deque()
        self._repair: Iterator[Change] | None = None
        self._in_flight: tuple[Change, ...] = ()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._migrated = False
        self._tasks = TaskScope()

    @property
    def backlog(self) -> int:
        """Changes that wait, those on their way to the database included."""
        return len(self._queue) + len(self._in_flight)

    def put(self, change: Change) -> None:
        """Queue a change; the oldest one goes if there is no room."""
        if self._closing:
            self.dropped += 1
            return
        if self.backlog >= self._limits.capacity:
            self._drop_oldest()
        self._queue.append(change)
        self._idle.clear()
        self._wake.set()

    def start(self) -> None:
        """Begin to write."""
        self._tasks.spawn(self._run(), name="catalog writer")

    async def flushed(self, *, timeout_s: float) -> bool:
        """Wait until nothing is queued, at most ``timeout_s``; says whether it is so."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self, *, timeout_s: float = 3.0) -> None:
        """Write what is queued if that takes no longer than ``timeout_s``, then end."""
        self._closing = True
        if len(self._tasks) and not await self.flushed(timeout_s=timeout_s):
            _log.warning("catalog_backlog_lost", changes=self.backlog)
        await self._tasks.close(timeout_s=self._limits.attempt_s)

    def register(self, registry: CollectorRegistry, role: str) -> None:
        """Show the counters as ``kvtide_<role>_catalog_…``."""
        counts: tuple[tuple[str, str, Callable[[], float]], ...] = (
            ("backlog", "changes that wait for the database", lambda: self.backlog),
            ("available", "1 when the last write succeeded", lambda: self.available),
            ("dropped_changes", "lost to the limit", lambda: self.dropped),
            ("rejected_changes", "refused by the database", lambda: self.rejected),
            ("written_changes", "in the database", lambda: self.written),
        )
        for name, help_text, read in counts:
            full_name = f"kvtide_{role}_catalog_{name}"
            Gauge(full_name, help_text, registry=registry).set_function(read)

    def _drop_oldest(self) -> None:
        """Make room, and have all repaired from the start.

        The batch in flight can't be taken back. What clears the way for the rows behind
        it stays before them.
        """
        for place, change in enumerate(self._queue):
            if not isinstance(change, BlocksForgotten):
                del self._queue[place]
                break
        else:
            if self._queue:
                self._queue.popleft()
        self.dropped += 1
        self.repair_needed = True
        self._repair = None

    async def _run(self) -> None:
        pause_s = self._limits.first_pause_s
        while True:
            await self._wake.wait()
            if not self._closing:
                await self._clock.sleep(self._limits.linger_s)
            try:
                await self._write_queued()
            except CatalogRevisionError as error:
                self._give_up(error)
                return
            except (CatalogUnavailableError, TimeoutError) as error:
                if isinstance(error, CatalogLostError):
                    # whoever removed it wants an empty one, and it can be filled again
                    self._migrated, self.repair_needed = False, True
                    self._repair = None
                self._now_unavailable(error)
                await self._clock.sleep(pause_s)
                pause_s = min(pause_s * 2, self._limits.longest_pause_s)
            else:
                pause_s = self._limits.first_pause_s
                self._now_empty()

    async def _write_queued(self) -> None:
        """Write until nothing is left. An interrupted batch goes back to the front."""
        if not self._migrated:
            async with asyncio.timeout(self._limits.attempt_s * 4):
                await self._sink.migrate()
            self._migrated = True
        while self._queue or self._refill():
            size = min(self._limits.batch, len(self._queue))
            self._in_flight = tuple(self._queue.popleft() for _ in range(size))
            try:
                await self._write_batch(self._in_flight)
            except BaseException:
                self._queue.extendleft(reversed(self._in_flight))
                raise
            finally:
                self._in_flight = ()
            self.available = True

    def _refill(self) -> bool:
        """Queue the next piece of a repair; false: there is none left.

        It leaves room for what is put meanwhile.
        """
        if self._repair is None:
            return False
        size = max(1, min(self._limits.batch, self._limits.capacity // 2))
        self._queue.extend(islice(self._repair, size))
        if not self._queue:
            self._repair = None
        return self._repair is not None

    async def _write_batch(self, batch: tuple[Change, ...]) -> None:
        try:
            await self._attempt(batch)
        except CatalogRejectedError:
            # one bad row must not take the others with it
            for change in batch:
                await self._write_alone(change)

    async def _write_alone(self, change: Change) -> None:
        try:
            await self._attempt((change,))
        except CatalogRejectedError as error:
            self.rejected += 1
            _log.error("catalog_row_refused", row=type(change).__name__, why=str(error))

    async def _attempt(self, batch: tuple[Change, ...]) -> None:
        async with asyncio.timeout(self._limits.attempt_s):
            await self._sink.write(batch)
        self.written += len(batch)

    def _now_unavailable(self, error: BaseException) -> None:
        if self.available:
            _log.warning("catalog_unavailable", why=str(error), backlog=self.backlog)
        self.available = False

    def _now_empty(self) -> None:
        if self.repair_needed:
            self.repair_needed = False
            _log.warning("catalog_repairing", dropped=self.dropped)
            changes = self._on_repair() if self._on_repair is not None else None
            self._repair = iter(changes) if changes is not None else None
        if not self._queue and self._repair is None:
            self._wake.clear()
            self._idle.set()

    def _give_up(self, error: CatalogError) -> None:
        _log.error("catalog_refused", why=str(error))
        self.available = False
        self.dropped += len(self._queue)
        self._queue.clear()
        self._repair = None
        self._closing = True
        self._idle.set()
