"""Steps that roles share: together where they can, each with its own end."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest
from torch import Tensor

from kvtide.engine.errors import StepCancelled
from kvtide.engine.memory import KvRun
from kvtide.engine.runner import Chunk, Runner
from kvtide.engine.thread import EngineStopped, EngineThread
from kvtide.runtime import SystemClock
from kvtide.worker.mixing import StepMixer, StepPart
from kvtide.worker.steps import NO_STEP, Running, StepShape

LAYERS = 3


@dataclass
class Layers:
    """A runner that only goes through its layers."""

    steps: list[list[int]] = field(default_factory=list[list[int]])
    gate: asyncio.Event | None = None

    def step(
        self,
        chunks: Sequence[Chunk],
        on_layer: Callable[[int], None],
        cancelled: Callable[[], bool],
    ) -> list[Tensor | None]:
        self.steps.append([len(chunk.tokens) for chunk in chunks])
        for layer in range(LAYERS):
            if cancelled():
                raise StepCancelled("cancelled")
            on_layer(layer)
        return [None for _ in chunks]


@pytest.fixture
async def engine() -> AsyncGenerator[EngineThread]:
    thread = EngineThread(lambda: cast("object", None))  # type: ignore[arg-type, return-value]
    thread.start()
    await thread.model()
    yield thread
    await thread.close()


def part(
    tokens: int,
    *,
    on_layer: Callable[[int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    alone: bool = False,
) -> StepPart[int]:
    chunk = Chunk(cast("KvRun", None), list(range(tokens)), 0)
    return StepPart(
        lambda: [chunk], lambda results: 10 * len(results), on_layer, cancelled, alone
    )


async def both(
    mixer: StepMixer, runner: Layers, first: StepPart[int], second: StepPart[int]
) -> tuple[object, object]:
    """What came of a part of each role, asked for in the same turn."""
    one = cast("Runner", runner)
    return await asyncio.gather(
        mixer.step("prefill", one, first),
        mixer.step("decode", one, second),
        return_exceptions=True,
    )


async def test_a_role_sees_what_the_others_have_in_each_step(
    engine: EngineThread,
) -> None:
    mixer = StepMixer(engine, SystemClock())
    assert mixer.beside("prefill") == Running(NO_STEP, 0.0)
    mixer.runs("decode", Running(StepShape.of([(9, 10)]), 80.0))
    mixer.runs("prefill", Running(StepShape.of([(0, 64)]), 0.0))
    assert mixer.beside("prefill") == Running(StepShape(1, 1, 10.0), 80.0)
    mixer.runs("decode", None)
    assert mixer.beside("prefill") == Running(NO_STEP, 0.0)


async def test_parts_that_wait_together_share_a_step(engine: EngineThread) -> None:
    mixer, runner = StepMixer(engine, SystemClock()), Layers()
    first, second = await both(mixer, runner, part(5), part(1))
    assert runner.steps == [[5, 1]]
    for stepped in (first, second):
        assert stepped.result == 10  # type: ignore[attr-defined]
        assert stepped.whole.new == 6  # type: ignore[attr-defined]


async def test_who_asks_for_the_next_step_as_soon_as_told_shares_again(
    engine: EngineThread,
) -> None:
    mixer, runner = StepMixer(engine, SystemClock()), Layers()

    async def role(name: str, tokens: int) -> None:
        for _ in range(5):
            await mixer.step(name, cast("Runner", runner), part(tokens))

    async with asyncio.TaskGroup() as group:
        group.create_task(role("prefill", 5))
        group.create_task(role("decode", 1))
    assert [sorted(step) for step in runner.steps] == [[1, 5]] * 5


@pytest.mark.parametrize("layer", [0, 2])
async def test_a_part_that_raises_ends_alone(engine: EngineThread, layer: int) -> None:
    mixer, runner = StepMixer(engine, SystemClock()), Layers()

    def broken(at: int) -> None:
        if at == layer:
            raise ValueError("the slots are gone")

    first, second = await both(mixer, runner, part(5, on_layer=broken), part(1))
    assert isinstance(first, ValueError)
    assert second.result == 10  # type: ignore[attr-defined]


async def test_a_part_that_is_cancelled_leaves_the_other(engine: EngineThread) -> None:
    mixer, runner = StepMixer(engine, SystemClock()), Layers()
    cancelled = part(5, cancelled=lambda: True)
    first, second = await both(mixer, runner, cancelled, part(1))
    assert isinstance(first, StepCancelled)
    assert second.result == 10  # type: ignore[attr-defined]
    first, second = await both(mixer, runner, cancelled, cancelled)
    assert isinstance(first, StepCancelled)
    assert isinstance(second, StepCancelled)


async def test_a_part_that_may_wait_is_alone_and_has_its_turn(
    engine: EngineThread,
) -> None:
    mixer, runner = StepMixer(engine, SystemClock()), Layers()
    await both(mixer, runner, part(5, alone=True), part(1))
    assert runner.steps == [[1], [5]]


async def test_when_the_one_that_leads_is_cancelled_the_other_ends(
    engine: EngineThread,
) -> None:
    mixer, runner = StepMixer(engine, SystemClock()), cast("Runner", Layers())
    started, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold(_: int) -> None:
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(20)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        leads = group.create_task(mixer.step("prefill", runner, part(5, on_layer=hold)))
        follows = group.create_task(_ended(mixer, runner))
        await started.wait()
        leads.cancel()
        assert isinstance(await follows, EngineStopped)
        go_on.set()
    again = await mixer.step("decode", runner, part(2))
    assert again.result == 10


async def _ended(mixer: StepMixer, runner: Runner) -> BaseException | None:
    try:
        await mixer.step("decode", runner, part(1))
    except EngineStopped as error:
        return error
    return None


async def test_an_engine_that_has_ended_is_said_so() -> None:
    thread = EngineThread(lambda: cast("object", None))  # type: ignore[arg-type, return-value]
    thread.start()
    await thread.close()
    mixer = StepMixer(thread, SystemClock())
    with pytest.raises(EngineStopped):
        await mixer.step("decode", cast("Runner", Layers()), part(1))
