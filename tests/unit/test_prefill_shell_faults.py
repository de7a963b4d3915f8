"""Whatever an operation of a prefill worker raises: the prompt ends, nothing is held."""

import pytest
from tests.unit.shell_world import Model, Pool, World, prefill_work, until, world_of

from kvtide.bus import Hop
from kvtide.bus.messages import Ack, HandoverTaken, PrefillDone, PrefillFailed
from kvtide.engine.memory import KvRun
from kvtide.kv import RequestId, Role


async def nothing_held(world: World, *names: str) -> None:
    """Decode wants no more of ``names``; then all is given back."""
    for name in names:
        taken = HandoverTaken(request=RequestId(name), attempt=1)
        assert isinstance(await world.send(Hop.CONTROL, taken), Ack)
    await until(lambda: world.pool.released == world.pool.begun, "the leases end")
    await until(lambda: all(run.closed for run in world.model.runs), "the runs end")


async def test_without_faults_a_prompt_is_computed() -> None:
    async with world_of(Role.PREFILL, Pool(), Model()) as world:
        await world.ask(prefill_work("a", 40))
        done = await world.told("a")
        assert isinstance(done, PrefillDone)
        assert done.computed_tokens == 39
        await nothing_held(world, "a")


@pytest.mark.parametrize("operation", ["read_headers", "commit"])
async def test_a_raising_load_or_commit_is_a_miss(operation: str) -> None:
    pool = Pool({operation})
    async with world_of(Role.PREFILL, pool, Model()) as world:
        await world.ask(prefill_work("a", 40, reuse=2))
        done = await world.told("a")
        assert isinstance(done, PrefillDone)
        assert (done.reused_tokens, done.computed_tokens) == (0, 39)
        assert pool.failed == [operation]
        name = {"read_headers": "load", "commit": "commit"}[operation]
        assert world.failures(name) == 1
        await nothing_held(world, "a")


@pytest.mark.parametrize("operation", ["begin", "write"])
async def test_a_raising_begin_or_step_fails_the_prompt_and_the_next_goes_on(
    operation: str,
) -> None:
    pool = Pool({operation})
    async with world_of(Role.PREFILL, pool, Model()) as world:
        await world.ask(prefill_work("a", 40))
        failed = await world.told("a", failed=True)
        assert isinstance(failed, PrefillFailed)
        assert failed.code == {"begin": "no_slots", "write": "engine"}[operation]
        await nothing_held(world, "a")
        pool.failing.clear()
        await world.ask(prefill_work("b", 40))
        assert isinstance(await world.told("b"), PrefillDone)
        await nothing_held(world, "b")


async def test_a_raising_release_is_counted_and_holds_nobody_up() -> None:
    pool = Pool({"release"})
    async with world_of(Role.PREFILL, pool, Model()) as world:
        for name in ("a", "b"):
            await world.ask(prefill_work(name, 40))
            await world.told(name)
            await nothing_held(world, name)
        assert world.failures("release") == 2


async def test_a_run_that_cannot_be_made_fails_its_prompt_alone() -> None:
    async with world_of(Role.PREFILL, Pool(), Model(broken_runs=2)) as world:
        await world.ask(prefill_work("a", 40))
        await world.ask(prefill_work("b", 40, reuse=2))
        await world.ask(prefill_work("c", 40))
        for name in ("a", "b"):
            failed = await world.told(name, failed=True)
            assert isinstance(failed, PrefillFailed)
            assert failed.code == "no_memory"
            assert "Cannot allocate memory" in failed.reason
        assert isinstance(await world.told("c"), PrefillDone)
        assert len(world.of(PrefillFailed)) == 2
        assert world.failures("open") == 2
        await nothing_held(world, "a", "b", "c")
        assert world.pool.begun == 1


async def test_a_failed_command_does_not_take_those_after_it_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world_of(Role.PREFILL, Pool(), Model()) as world:
        close, broken = KvRun.close, list[KvRun]()

        def close_badly(run: KvRun) -> None:
            close(run)
            if not broken:
                broken.append(run)
                raise OSError("it broke")

        monkeypatch.setattr(KvRun, "close", close_badly)
        for name in ("a", "b"):
            await world.ask(prefill_work(name, 40))
            assert isinstance(await world.told(name), PrefillDone)
        await nothing_held(world, "a", "b")
        assert world.failures("free") == 1
