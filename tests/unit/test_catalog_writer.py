"""The writer behind serving: bounded, in order, and repaired after a loss."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from kvtide.catalog import (
    BlocksForgotten,
    CatalogError,
    CatalogRejectedError,
    CatalogRevisionError,
    CatalogUnavailableError,
    Change,
    TenantRow,
    Writer,
    WriterLimits,
)
from kvtide.kv import NodeId, TenantId, Tier
from kvtide.runtime import ManualClock

DOWN = CatalogUnavailableError("down")
LIMITS = WriterLimits(capacity=10, batch=4, linger_s=0.1, first_pause_s=1.0)


def row(number: int) -> TenantRow:
    return TenantRow(TenantId(f"t{number}"), "", 0.0)


def rows(count: int) -> list[TenantRow]:
    return [row(number) for number in range(count)]


@dataclass
class ScriptedSink:
    """Fails as ``failure`` says, refuses what is in ``refused``, keeps the rest.

    Waits at the ``gate``, with every batch or with the one that begins with ``wait_at``.
    """

    failure: CatalogError | None = None
    refused: set[Change] = field(default_factory=set[Change])
    batches: list[tuple[Change, ...]] = field(default_factory=list[tuple[Change, ...]])
    migrations: int = 0
    gate: asyncio.Event | None = None
    wait_at: Change | None = None

    @property
    def written(self) -> list[Change]:
        return [change for batch in self.batches for change in batch]

    async def migrate(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.migrations += 1

    async def write(self, changes: Sequence[Change]) -> None:
        if self.gate is not None and self.wait_at in (None, changes[0]):
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        if self.refused & set(changes):
            raise CatalogRejectedError("refused")
        self.batches.append(tuple(changes))


@asynccontextmanager
async def writing(
    sink: ScriptedSink, repairs: list[int] | None = None
) -> AsyncGenerator[tuple[Writer, ManualClock]]:
    clock = ManualClock()
    repaired = repairs if repairs is not None else []
    writer = Writer(
        sink, clock=clock, limits=LIMITS, on_repair=lambda: repaired.append(1)
    )
    writer.start()
    yield writer, clock
    await writer.close(timeout_s=0.01)


async def test_changes_are_written_in_order_in_batches_after_one_migration() -> None:
    sink = ScriptedSink()
    async with writing(sink) as (writer, clock):
        for each in rows(9):
            writer.put(each)
        assert sink.batches == []
        await clock.advance(0.1)
        assert await writer.flushed(timeout_s=30)
        assert sink.written == rows(9)
        assert [len(batch) for batch in sink.batches] == [4, 4, 1]
        writer.put(row(9))
        await clock.advance(0.1)
        assert sink.written == rows(10)
        assert (sink.migrations, writer.written, writer.backlog) == (1, 10, 0)


async def test_while_the_database_is_down_the_newest_changes_are_kept() -> None:
    sink, repairs = ScriptedSink(failure=DOWN), list[int]()
    async with writing(sink, repairs) as (writer, clock):
        for each in rows(25):
            writer.put(each)
            await clock.advance(0.2)
        assert writer.backlog == LIMITS.capacity
        assert (writer.dropped, writer.repair_needed, writer.available) == (
            15,
            True,
            False,
        )
        assert repairs == []
        sink.failure = None
        await clock.advance(60)
        assert sink.written == rows(25)[15:]
        assert repairs == [1]
        assert (writer.repair_needed, writer.available) == (False, True)


async def test_what_the_repair_puts_is_written_too() -> None:
    sink = ScriptedSink(failure=DOWN)
    clock = ManualClock()

    def repair() -> None:
        writer.put(row(99))

    writer = Writer(sink, clock=clock, limits=LIMITS, on_repair=repair)
    writer.start()
    for each in rows(11):
        writer.put(each)
    await clock.advance(5)
    sink.failure = None
    await clock.advance(60)
    assert sink.written == [*rows(11)[1:], row(99)]
    await writer.close()


async def test_a_batch_interrupted_by_a_failure_is_written_once_in_its_place() -> None:
    sink = ScriptedSink()
    async with writing(sink) as (writer, clock):
        writer.put(row(0))
        await clock.advance(0.1)
        sink.failure = DOWN
        for each in rows(6)[1:]:
            writer.put(each)
        await clock.advance(0.2)
        assert writer.backlog == 5
        writer.put(row(6))
        sink.failure = None
        await clock.advance(30)
        assert sink.written == rows(7)


async def test_a_row_that_is_refused_for_ever_takes_no_other_with_it() -> None:
    sink = ScriptedSink(refused={row(1)})
    async with writing(sink) as (writer, clock):
        for each in rows(4):
            writer.put(each)
        await clock.advance(0.1)
        assert sink.written == [row(0), row(2), row(3)]
        assert (writer.rejected, writer.backlog, writer.available) == (1, 0, True)


async def test_a_schema_of_a_newer_version_ends_the_writer() -> None:
    newer = CatalogRevisionError("newer", found="9", known="1")
    sink = ScriptedSink(failure=newer)
    async with writing(sink) as (writer, clock):
        writer.put(row(0))
        await clock.advance(1)
        writer.put(row(1))
        assert (writer.backlog, writer.dropped, writer.available) == (0, 2, False)
        assert await writer.flushed(timeout_s=1)


async def test_put_never_waits_for_a_stuck_database() -> None:
    sink = ScriptedSink(gate=asyncio.Event())
    async with writing(sink) as (writer, clock):
        writer.put(row(0))
        await clock.advance(0.1)
        for each in rows(1000):
            writer.put(each)
        assert writer.backlog <= LIMITS.capacity
        assert writer.dropped == 1001 - LIMITS.capacity
        assert sink.gate is not None
        sink.gate.set()


async def test_close_writes_what_is_queued_without_lingering() -> None:
    sink = ScriptedSink()
    async with writing(sink) as (writer, _):
        await asyncio.sleep(0)  # the writer's task waits for work
        writer.put(row(0))
        await writer.close(timeout_s=30)
        assert sink.written == [row(0)]
        writer.put(row(1))
        assert (writer.dropped, writer.backlog) == (1, 0)


async def test_close_gives_up_on_a_stuck_database() -> None:
    sink = ScriptedSink(gate=asyncio.Event())
    async with writing(sink) as (writer, _):
        writer.put(row(0))
        await writer.close(timeout_s=0.01)
        assert sink.written == []
        assert writer.backlog == 1


async def test_counters_are_shown() -> None:
    registry = CollectorRegistry()
    async with writing(ScriptedSink()) as (writer, clock):
        writer.register(registry, "store")
        writer.put(row(0))
        assert registry.get_sample_value("kvtide_store_catalog_backlog") == 1
        await clock.advance(0.1)
        assert registry.get_sample_value("kvtide_store_catalog_written_changes") == 1
        assert registry.get_sample_value("kvtide_store_catalog_available") == 1


@pytest.mark.parametrize("failing", [True, False])
async def test_an_idle_writer_closes_at_once(failing: bool) -> None:
    sink = ScriptedSink(failure=DOWN if failing else None)
    async with writing(sink) as (writer, _):
        assert await writer.flushed(timeout_s=0.001)


def forget(epoch: int) -> BlocksForgotten:
    return BlocksForgotten(NodeId("s"), Tier.DRAM, epoch)


class Owner:
    """Has ``state``; counts how often it is asked for all of it."""

    def __init__(self, state: list[Change]) -> None:
        self.state = state
        self.asked = 0
        self.taken = 0

    def repair(self) -> Iterator[Change]:
        self.asked += 1
        for change in self.state:
            self.taken += 1
            yield change


async def test_a_repair_may_be_larger_than_the_queue() -> None:
    sink = ScriptedSink(failure=DOWN)
    owner = Owner([forget(1), *rows(30)])
    clock = ManualClock()
    writer = Writer(sink, clock=clock, limits=LIMITS, on_repair=owner.repair)
    writer.start()
    for each in rows(11):
        writer.put(each)
    await clock.advance(5)
    sink.failure = None
    await clock.advance(60)
    assert await writer.flushed(timeout_s=30)
    assert sink.written == [*rows(11)[1:], forget(1), *rows(30)]
    assert (owner.asked, writer.dropped, writer.repair_needed) == (1, 1, False)
    await writer.close()


async def test_what_comes_during_a_repair_is_written_in_its_place() -> None:
    sink = ScriptedSink(failure=DOWN)
    owner = Owner([forget(1), *rows(30)])
    clock = ManualClock()
    writer = Writer(sink, clock=clock, limits=LIMITS, on_repair=owner.repair)
    writer.start()
    for each in rows(11):
        writer.put(each)
    await clock.advance(5)
    sink.failure = None
    sink.wait_at = forget(1)
    sink.gate = asyncio.Event()
    await clock.advance(60)
    # a piece is under way, and no more than that was taken
    assert owner.taken == LIMITS.batch
    writer.put(row(99))
    sink.gate.set()
    await clock.advance(60)
    assert await writer.flushed(timeout_s=30)
    after = sink.written[10:]
    assert after == [forget(1), *rows(3), row(99), *rows(30)[3:]]
    await writer.close()


async def test_a_loss_during_a_repair_begins_it_again() -> None:
    sink = ScriptedSink(failure=DOWN)
    owner = Owner([forget(1), *rows(30)])
    clock = ManualClock()

    def more() -> Iterator[Change]:
        for change in owner.repair():
            yield change
            if owner.asked == 1 and owner.taken == 4:
                sink.failure = DOWN

    writer = Writer(sink, clock=clock, limits=LIMITS, on_repair=more)
    writer.start()
    for each in rows(11):
        writer.put(each)
    await clock.advance(5)
    sink.failure = None
    await clock.advance(30)
    assert (owner.asked, writer.available) == (1, False)
    for each in rows(50)[40:]:
        writer.put(each)
    # the rows that were to be repaired went; what stood before them did not
    assert writer.repair_needed
    sink.failure = None
    await clock.advance(60)
    assert await writer.flushed(timeout_s=30)
    assert owner.asked == 2
    assert sink.written[10] == forget(1)
    assert sink.written[-31:] == [forget(1), *rows(30)]
    await writer.close()
