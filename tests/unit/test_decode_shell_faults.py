"""Whatever an operation of a decode worker raises: the answer ends, nothing is held."""

import pytest
from tests.unit.shell_world import (
    OTHER,
    Model,
    Pool,
    World,
    decode_work,
    slot,
    until,
    world_of,
)

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
    TokenAck,
)
from kvtide.kv import NodeRef, RequestId, Role
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
