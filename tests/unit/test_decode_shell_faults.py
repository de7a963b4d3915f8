"""Whatever an operation of a decode worker raises: the answer ends, nothing is held."""

import asyncio
from typing import cast

import pytest
from tests.unit.shell_world import (
    FACTS,
    OTHER,
    Model,
    Pool,
    Runner,
    World,
    decode_work,
    slot,
    until,
    world_of,
)
from torch import Tensor

from kvtide.bus import Hop
from kvtide.bus.messages import (
    AnyMessage,
    DecodeFailed,
    HandoverPlan,
    HandoverSlot,
    Message,
    PartsReady,
    PartSums,
    PrefillFailed,
    SamplingSpec,
    TokenAck,
)
from kvtide.decode.compute import RowWork, compute_step
from kvtide.decode.draws import Drawer
from kvtide.decode.events import Row
from kvtide.engine.memory import KvRun
from kvtide.engine.runner import Chunk, Runner as EngineRunner
from kvtide.kv import NodeRef, RequestId, RequestRef, Role
from kvtide.runtime import LimitError

ANSWER = [7] * 4


async def nothing_held(world: World) -> None:
    await until(lambda: all(run.closed for run in world.model.runs), "the runs end")
    await until(lambda: world.pool.released == world.pool.begun, "the leases end")


async def publish(world: World, hop: Hop, message: Message) -> None:
    inbox = world.node.subjects.inbox(Role.DECODE, world.node.ref.node, hop)
    await world.gateway.bus.publish(inbox, message)


async def acknowledge(world: World, name: str) -> None:
    ack = TokenAck(request=RequestId(name), attempt=1, choice=0, index=4, finished=True)
    await publish(world, Hop.CONTROL, ack)


@pytest.mark.parametrize("operation", ["none", "begin", "write", "commit", "release"])
async def test_a_raising_put_changes_no_answer(operation: str) -> None:
    pool = Pool({operation})
    async with world_of(Role.DECODE, pool, Model()) as world:
        for name in ("a", "b"):
            await world.ask(decode_work(name, 40))
            await world.told(name)
            assert world.text(name) == ANSWER
            await acknowledge(world, name)
            await nothing_held(world)
        expected = 0 if operation == "none" else 2
        assert world.failures("putblocks") == len(pool.failed) == expected


async def test_a_raising_read_of_blocks_is_a_miss() -> None:
    pool = Pool({"read_blocks"})
    async with world_of(Role.DECODE, pool, Model()) as world:
        await world.ask(decode_work("a", 40, reuse=2))
        await world.told("a")
        assert world.text("a") == ANSWER
        assert world.failures("readcopies") == 1
        await nothing_held(world)


async def test_a_raising_read_of_parts_is_a_miss() -> None:
    pool = Pool({"read_parts"})
    async with world_of(Role.DECODE, pool, Model()) as world:
        await world.ask(decode_work("a", 33, prefill=OTHER))
        name, prefill = RequestId("a"), OTHER
        plan = HandoverPlan(
            request=name,
            attempt=1,
            prefill=prefill,
            first_block=0,
            slots=(HandoverSlot(0, 16, slot(1)), HandoverSlot(1, 16, slot(2))),
        )
        sums = tuple(PartSums(block, 0, 1, 2) for block in range(2))
        ready = PartsReady(request=name, attempt=1, prefill=prefill, seq=0, parts=sums)
        failed = PrefillFailed(
            request=name, attempt=1, prefill=prefill, code="engine", reason="it broke"
        )
        for message in (plan, ready, failed):
            await publish(world, Hop.HANDOVER, message)
        await world.told("a")
        assert world.text("a") == ANSWER
        assert world.failures("readparts") == 1
        await nothing_held(world)


@pytest.mark.parametrize("foreseen", [True, False])
async def test_a_raising_bus_is_a_silent_prefill(
    monkeypatch: pytest.MonkeyPatch, *, foreseen: bool
) -> None:
    async with world_of(Role.DECODE, Pool(), Model()) as world:

        async def request(*_: object, **__: object) -> AnyMessage:
            if foreseen:
                raise LimitError("too many requests", limit="requests")
            raise RuntimeError("the bus broke")

        monkeypatch.setattr(world.node.bus, "request", request)
        await world.ask(decode_work("a", 33, prefill=OTHER))
        await world.told("a")  # after its questions ran out
        assert world.text("a") == ANSWER
        assert (world.failures("askhandover") == 0) == foreseen
        assert (world.failures("telltaken") == 0) == foreseen
        await nothing_held(world)


@pytest.mark.parametrize("reuse", [0, 2])
@pytest.mark.parametrize("prefill", [None, OTHER])
async def test_a_run_that_cannot_be_made_fails_its_request_alone(
    reuse: int, prefill: NodeRef | None
) -> None:
    async with world_of(Role.DECODE, Pool(), Model()) as world:
        await world.ask(decode_work("a", 40))
        await world.told("a")
        world.model.broken_runs = 2
        for name in ("b", "c", "d"):
            await world.ask(decode_work(name, 40, reuse=reuse, prefill=prefill))
        for name in ("b", "c"):
            failed = await world.told(name, failed=True)
            assert isinstance(failed, DecodeFailed)
            assert failed.code == "no_memory"
            assert "Cannot allocate memory" in failed.reason
        await world.told("d")
        assert world.text("d") == ANSWER
        assert len(world.of(DecodeFailed)) == 2
        assert world.failures("open") == 2
        for name in ("a", "b", "c", "d"):
            await acknowledge(world, name)
        await nothing_held(world)


class BrokenRow(Runner):
    """Gives no numbers for the row that ends with token ``spoilt``."""

    spoilt = 29

    def logits(self, chunk: Chunk) -> Tensor:
        logits = super().logits(chunk)
        if chunk.tokens[-1] == self.spoilt:
            logits[3] = float("nan")
        return logits


async def test_a_row_without_numbers_fails_alone() -> None:
    model = Model(runner=BrokenRow())
    async with world_of(Role.DECODE, Pool(), model) as world:
        async with asyncio.TaskGroup() as group:
            for name, tokens in (("a", 20), ("b", 30), ("c", 21), ("d", 30)):
                group.create_task(world.ask(decode_work(name, tokens)))
        for name in ("b", "d"):
            failed = await world.told(name, failed=True)
            assert isinstance(failed, DecodeFailed)
            assert (failed.code, "NaN" in failed.reason) == ("engine", True)
        for name in ("a", "c"):
            await world.told(name)
            assert world.text(name) == ANSWER
        assert len(world.of(DecodeFailed)) == 2
        await nothing_held(world)


def test_rows_of_one_step_fail_alone_and_the_others_keep_their_tokens() -> None:
    rows = [
        RowWork(
            Row(
                RequestRef(RequestId(name), 1),
                0,
                (1, last),
                SamplingSpec(temperature=0),
            ),
            KvRun(FACTS, 16),
        )
        for name, last in (("a", 3), ("b", 29), ("c", 29), ("d", 4))
    ]
    runner = cast("EngineRunner", BrokenRow())
    sampled, failed = compute_step(runner, Drawer(), rows)
    assert [(one.ref.request, one.token) for one in sampled] == [("a", 7), ("d", 7)]
    assert [one.ref.request for one in failed] == ["b", "c"]
    for work in rows:
        work.run.close()
