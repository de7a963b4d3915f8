"""``kvtide bench serve`` against a small HTTP server that answers, or fails, for real."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.integration.openai_server import Server, prompt_of, serving

from kvtide.cli.commands.bench_serve import bench_serve
from kvtide.cli.exits import CLEAN, FAILED
from kvtide.cli.serve_bench.dialogue import Api, Style
from kvtide.cli.serve_bench.errors import LoadError, NoServerError
from kvtide.cli.serve_bench.load import Load, Manner, client_of, model_of
from kvtide.cli.serve_bench.outcomes import Exchange, Outcome
from kvtide.cli.serve_bench.wanted import Flags
from kvtide.cli.serve_bench.workload import Conversation, Mix, of_mix, poisson
from kvtide.runtime import ConfigError, SystemClock

STYLE = Style("m")
LIMIT_S = 40


@pytest.fixture
async def server() -> AsyncGenerator[Server]:
    async with serving() as made:
        yield made


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110 - of another task's making
            await asyncio.sleep(0.01)


def manner(api: Api = Api.COMPLETIONS, **changes: Any) -> Manner:
    return Manner(api, STYLE, 0, changes.pop("timeout_s", LIMIT_S), **changes)


async def sent(
    server: Server, how: Manner, load: tuple[Conversation, ...]
) -> tuple[Exchange, ...]:
    async with asyncio.timeout(LIMIT_S), client_of(server.url, {}) as client:
        assert await model_of(client) == "m"
        return await Load(client, how, SystemClock()).run(load)


@pytest.mark.parametrize("api", Api)
async def test_turns_carry_their_history(server: Server, api: Api) -> None:
    load = of_mix(Mix(2, 8, 3, turns=3, prefix_tokens=5), 0)
    found = await sent(server, manner(api, concurrency=1), load)
    assert [each.outcome for each in found] == [Outcome.COMPLETED] * 6
    words = [len(prompt_of(body).split()) for body in server.asked]
    assert words == [13, 24, 35] * 2
    assert [each.usage.prompt_tokens for each in found] == words
    for before, after in ((0, 1), (1, 2), (3, 4), (4, 5)):
        assert prompt_of(server.asked[after]).startswith(
            prompt_of(server.asked[before])
        )
    assert (
        prompt_of(server.asked[0]).split()[:5] == prompt_of(server.asked[3]).split()[:5]
    )
    if api is Api.CHAT:
        roles = [each["role"] for each in server.asked[2]["messages"]]
        assert roles == ["user", "assistant", "user", "assistant", "user"]


async def test_concurrency_is_kept_and_never_passed(server: Server) -> None:
    server.hold = asyncio.Event()
    load = of_mix(Mix(30, 4, 3), 0)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(sent(server, manner(concurrency=4), load))
        await until(lambda: len(server.open) == 4)
        server.hold.set()
    found = asking.result()
    assert Counter(each.outcome for each in found) == {Outcome.COMPLETED: 30}
    assert server.most_open == 4
    assert all(len(each.arrivals_s) == 3 for each in found)


async def test_every_fault_has_its_outcome(server: Server) -> None:
    server.faults = {
        0: "429", 1: "500", 2: "break", 3: "cut", 4: "error", 5: "hang", 7: "503",
    }  # fmt: skip
    load = of_mix(Mix(8, 4, 3, turns=2), 0)
    found = await sent(server, manner(concurrency=1, timeout_s=0.5), load)
    assert [each.outcome for each in found[::2]] == [
        Outcome.REFUSED,
        Outcome.HTTP_ERROR,
        Outcome.UNREACHABLE,
        Outcome.CUT,
        Outcome.ERROR_EVENT,
        Outcome.TIMED_OUT,
        Outcome.COMPLETED,
        Outcome.COMPLETED,
    ]
    seconds = [each.outcome for each in found[1::2]]
    assert seconds[:6] == [Outcome.SKIPPED] * 6
    assert seconds[6:] == [Outcome.REFUSED, Outcome.COMPLETED]
    assert found[5 * 2].detail == "no whole answer in 0.5 s"


async def test_what_waits_for_room_is_late_not_lost(server: Server) -> None:
    server.hold = asyncio.Event()
    load = poisson(of_mix(Mix(5, 4, 2), 0), 1000.0, 0)

    async with asyncio.TaskGroup() as group:
        asking = group.create_task(sent(server, manner(most_open=2), load))
        await until(lambda: len(server.open) == 2)
        await asyncio.sleep(0.1)  # how late the others become at least
        server.hold.set()
    found = asking.result()
    assert server.most_open == 2
    assert {each.outcome for each in found} == {Outcome.COMPLETED}
    late = [(each.sent_s or 0) - (each.due_s or 0) for each in found]
    assert max(late) > 0.05
    assert min(late) >= 0


async def test_an_interrupted_load_tells_all_outcomes(server: Server) -> None:
    server.faults = {2: "hang"}
    load = of_mix(Mix(5, 4, 2), 0)
    running = asyncio.ensure_future(sent(server, manner(concurrency=1), load))
    await until(lambda: len(server.asked) == 3)
    running.cancel()
    found = await running
    ends = [each.outcome for each in found]
    assert ends == [Outcome.COMPLETED] * 2 + [Outcome.INTERRUPTED] * 3


async def test_a_warm_up_is_not_counted_and_must_be_answered(server: Server) -> None:
    server.faults = {3: "500"}
    async with client_of(server.url, {}) as client:
        load = Load(client, manner(concurrency=1, warmup=2), SystemClock())
        await load.warm_up()
        assert len(await load.run(of_mix(Mix(1, 4, 2), 0))) == 1
        with pytest.raises(LoadError, match=r"warm-up.*http_error: 500"):
            await load.warm_up()


FLAGS = Flags(
    url="", concurrency=2, rate=None, trace=None, speed=1.0, length_scale=1.0, sample=1.0, skip=0,
    requests=6, span_s=None, prompt_tokens=8, output_tokens=3, spread=0.0, prefixes=1,
    prefix_tokens=0, zipf=1.0, turns=1, think_s=0.0, max_tokens=100,
    max_output_tokens=50, api="completions", model="", api_key="secret-key",
    ignore_eos=True, timeout_s=10.0, max_open=64, warmup=1, ttft_ms=5000.0, tbt_ms=None,
    tell_targets=True, metrics=None, state_dir=None, seed=0, out=None, json=False,
)  # fmt: skip


async def run(flags: Flags, console: Console) -> int:
    return await asyncio.to_thread(bench_serve, flags, console)


async def test_the_command_prints_and_keeps(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = [f"{server.url}/metrics", "http://127.0.0.1:9/metrics"]
    flags = replace(
        FLAGS, url=f"{server.url}/v1/", out=tmp_path / "found", metrics=metrics
    )
    assert await run(flags, Console(width=120)) == CLEAN
    shown = capsys.readouterr().out
    assert "time between tokens" in shown
    assert "18 (" in shown  # 3 cached tokens of each of 6
    kept = json.loads((tmp_path / "found" / "serve.json").read_text())
    assert kept["summary"]["outcomes"] == {"completed": 6}
    assert kept["summary"]["goodput"] == 1.0
    assert kept["counters"] == {"blocks staged from SSD": 6.0}
    assert len(kept["requests"]) == 6
    assert kept["load"]["--concurrency"] == "2"
    assert "secret-key" not in json.dumps(kept)
    assert "Bearer secret-key" in server.headers[0]
    assert "x-kvtide-ttft-ms: 5000" in server.headers[0]
    assert "x-kvtide-tbt-ms" not in server.headers[0]
    assert (tmp_path / "found" / "serve.md").read_text().startswith("| ms |")
    assert (tmp_path / "found" / "serve.svg").read_text().startswith("<svg")
    server.faults = {len(server.asked) + 1: "503"}
    assert await run(replace(flags, json=True), Console(width=120)) == FAILED
    assert json.loads(capsys.readouterr().out)["summary"]["outcomes"]["refused"] == 1


async def test_what_is_wrong_is_said(server: Server) -> None:
    console = Console()
    with pytest.raises(ConfigError, match="http"):
        await run(replace(FLAGS, url="ftp://x"), console)
    with pytest.raises(ConfigError, match="--concurrency"):
        await run(replace(FLAGS, url=server.url, concurrency=None), console)
    with pytest.raises(ConfigError, match="--speed"):
        await run(replace(FLAGS, url=server.url, trace=Path("x"), rate=1.0), console)
    with pytest.raises(ConfigError, match="completions, chat"):
        await run(replace(FLAGS, url=server.url, api="x"), console)
    with pytest.raises(ConfigError, match="visible ASCII"):
        await run(replace(FLAGS, url=server.url, api_key="a\nb"), console)
    with pytest.raises(NoServerError, match="does not answer"):
        await run(replace(FLAGS, url="http://127.0.0.1:9"), console)
