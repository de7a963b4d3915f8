"""The engine thread: turns, errors, cancellation, ends."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import cast

import pytest

from kvtide.engine.errors import ModelUnavailable
from kvtide.engine.loading import LoadedModel
from kvtide.engine.thread import EngineStopped, EngineThread

LIMIT_S = 10.0


@pytest.fixture
async def engine() -> AsyncGenerator[EngineThread]:
    engine = EngineThread(lambda: cast("LoadedModel", "model"))
    engine.start()
    yield engine
    await engine.close()


class Gate:
    """Work that says that it runs, and ends when it is told to."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        assert self.open.wait(LIMIT_S)
        return threading.current_thread().name


async def entered(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.wait, LIMIT_S)


async def test_model_and_work_come_from_one_thread(engine: EngineThread) -> None:
    assert await engine.model() == "model"
    names = {
        await engine.run(lane, lambda: threading.current_thread().name)
        for lane in ("a", "b")
    }
    assert names == {"engine"}


async def test_lanes_take_turns_and_keep_their_order(engine: EngineThread) -> None:
    gate, done = Gate(), list[str]()
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run("prefill", gate))
        await entered(gate)
        for name in ("p1", "p2", "p3"):
            group.create_task(
                engine.run("prefill", lambda name=name: done.append(name))
            )
        for name in ("d1", "d2"):
            group.create_task(engine.run("decode", lambda name=name: done.append(name)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gate.open.set()
    assert done in (["d1", "p1", "d2", "p2", "p3"], ["p1", "d1", "p2", "d2", "p3"])


async def test_contended_while_another_lane_has_work(engine: EngineThread) -> None:
    gate = Gate()
    async with asyncio.TaskGroup() as group:
        assert not engine.contended("prefill")
        group.create_task(engine.run("decode", gate))
        await entered(gate)
        assert engine.contended("prefill")
        assert not engine.contended("decode")
        gate.open.set()
    engine.claim("decode", wanted=True)
    assert engine.contended("prefill")
    engine.claim("decode", wanted=False)


async def test_errors_go_to_the_caller_and_the_thread_goes_on(
    engine: EngineThread,
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await engine.run("a", fail)
    assert await engine.run("a", lambda: 7) == 7


async def test_cancelled_before_its_turn_it_never_runs(engine: EngineThread) -> None:
    gate, ran = Gate(), list[int]()
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run("a", gate))
        await entered(gate)
        waiting = group.create_task(engine.run("a", lambda: ran.append(1)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        gate.open.set()
    await engine.run("a", lambda: None)
    assert ran == []


async def test_close_refuses_what_waits_and_lets_end_what_runs() -> None:
    engine = EngineThread(lambda: cast("LoadedModel", "model"))
    engine.start()
    gate = Gate()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.run("a", gate))
        await entered(gate)
        waiting = group.create_task(_refused(engine))
        await asyncio.sleep(0)
        closing = group.create_task(engine.close())
        await waiting
        gate.open.set()
        await closing
    assert running.result() == "engine"
    with pytest.raises(EngineStopped):
        await engine.run("a", lambda: None)


async def _refused(engine: EngineThread) -> None:
    with pytest.raises(EngineStopped):
        await engine.run("a", lambda: None)


async def test_a_model_that_cannot_be_loaded_ends_the_wait_at_once() -> None:
    def load() -> LoadedModel:
        raise ModelUnavailable("/nowhere", "there is no such folder")

    engine = EngineThread(load)
    engine.start()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(ModelUnavailable):
            await engine.failed_or(asyncio.Event())
    await engine.close()


async def test_a_stop_while_the_model_loads_is_heard_at_once() -> None:
    gate = Gate()

    def load() -> LoadedModel:
        gate()
        return cast("LoadedModel", "model")

    engine = EngineThread(load)
    engine.start()
    stop = asyncio.Event()
    stop.set()
    async with asyncio.timeout(LIMIT_S):
        await engine.failed_or(stop)
    gate.open.set()
    await engine.close()
