r"""What the gateway costs: the time over the engine's own, with an engine that is fake.

    .venv/bin/python ops/bench/overhead.py
    .venv/bin/python ops/bench/overhead.py --litellm /tmp/litellm-venv --out ops/bench/results

A real NATS server, a real conductor and a real gateway, each a process of its own, before
a fake worker (``overhead_engine.py``) that answers on a fixed schedule: the first token
``--first-ms`` after the work came, one more each ``--step-ms``. Requests (chat
completions, about 256 tokens in, 16 out, streams) come at random times, ``--rate`` a
second for ``--seconds``. The overhead of a request is when its last token came, from when
it was due, less the schedule: the client's own lag and the engine's count against us.
With ``--litellm VENV`` LiteLLM's proxy, installed there, is measured likewise before a
server of OpenAI's API (the same file, the same schedule).

Then ``--idle`` streams are opened that get one token and then nothing, and the gateway's
memory is compared; and the fake worker takes one request after the other, so that ten
times as many come as it can take: how long a refusal takes, and what is refused.

Writes overhead.json and overhead.md.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import httpx
import msgspec
import psutil
import uvloop
from overhead_engine import HOLD_TOKENS, Plan
from overhead_load import CLOCK, Client, Result, load
from tokenizers import Tokenizer

from kvtide.cli.supervisor.nats_server import find_nats_server
from kvtide.engine.demo import default_cache_dir, ensure_demo_model

HERE = Path(__file__).parent
START_LIMIT_S = 90.0
STOP_LIMIT_S = 15.0
PROMPT_TOKENS, OUTPUT_TOKENS = 256, 16
WARM_UP_S = 3.0
TTFT_TARGET_MS = 500
AT_ONCE = 50
REFUSED = (429, 503)
WORDS = ("the", "a", "one", "sea", "wind", "moon", "ship", "far", "near", "slow")
_OK = 200


class NotReadyError(Exception):
    """A server did not answer in time; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """In ms over the engine's schedule."""

    requests: int
    failed: int
    first_p50_ms: float
    first_p99_ms: float
    whole_p50_ms: float
    whole_p99_ms: float
    cpu_share: float
    cpu_ms: dict[str, float]
    """Of each process, for each request."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Memory of the gateway, as the kernel counts its own pages."""

    streams: int
    before_bytes: int
    after_bytes: int


@dataclass(frozen=True, slots=True)
class Refusals:
    """``served`` were answered, ``broken`` had neither an answer nor a refusal."""

    offered_per_s: float
    capacity_per_s: float
    served: int
    refused: int
    broken: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Report:
    """All of a run."""

    machine: str
    prompt_tokens: float
    rate: float
    seconds: float
    kvtide: Overhead
    litellm: Overhead | None
    idle: Idle
    refusals: Refusals


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--first-ms", type=float, default=20.0)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--capacity", type=float, default=10.0, help="when overloaded")
    parser.add_argument("--litellm", type=Path, help="a virtual environment")
    parser.add_argument("--out", type=Path, help="folder for the results")
    given = parser.parse_args()
    report = uvloop.run(measure(given))
    print(told(report))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(report), indent=2)
        (given.out / "overhead.json").write_text(text + "\n")
        (given.out / "overhead.md").write_text(told(report))


async def measure(given: argparse.Namespace) -> Report:
    """Each part in processes of its own, one after the other."""
    model = ensure_demo_model(default_cache_dir())
    with tempfile.TemporaryDirectory(prefix="kvtide-overhead-") as name:
        folder = Path(name)
        plan = Plan(first_ms=given.first_ms, step_ms=given.step_ms)
        async with gateway(folder / "a", model, plan) as (client, pid):
            texts, tokens = prompts(model)
            said("the gateway, under load")
            ours = await overhead(client, pid, texts, given, plan)
            said("the gateway, with idle streams")
            idle = await idle_memory(client, pid, given.idle)
        theirs = None
        if given.litellm is not None:
            try:
                async with litellm(folder / "l", given.litellm, plan) as (client, pid):
                    said("LiteLLM, under load")
                    theirs = await overhead(client, pid, texts, given, plan)
            except NotReadyError as error:
                said(f"LiteLLM is left out: {error}")
        slow = Plan(first_ms=1000 / given.capacity, step_ms=1.0, serial=True)
        async with gateway(folder / "b", model, slow) as (client, _):
            said("the gateway, overloaded")
            refusals = await refused(client, texts, given)
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    return Report(
        machine=machine,
        prompt_tokens=tokens,
        rate=given.rate,
        seconds=given.seconds,
        kvtide=ours,
        litellm=theirs,
        idle=idle,
        refusals=refusals,
    )


def said(what: str) -> None:
    """What is measured now."""
    print(what, file=sys.stderr, flush=True)


def prompts(model: Path) -> tuple[list[str], float]:
    """Texts of about ``PROMPT_TOKENS``, no two alike, and their mean length."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    chance = random.Random(1)
    texts = [" ".join(chance.choices(WORDS, k=PROMPT_TOKENS - 12)) for _ in range(512)]
    lengths = [len(tokenizer.encode(text).ids) for text in texts[:32]]
    return texts, fmean(lengths)


async def overhead(
    client: Client,
    pid: int,
    texts: Sequence[str],
    given: argparse.Namespace,
    plan: Plan,
) -> Overhead:
    """The load, after a shorter one that is not counted."""
    rate = given.rate
    await load(client, texts, rate=rate, seconds=WARM_UP_S, tokens=OUTPUT_TOKENS)
    began_s, before_s = CLOCK.monotonic(), cpu_s()
    found = await load(
        client, texts, rate=rate, seconds=given.seconds, tokens=OUTPUT_TOKENS
    )
    took_s = CLOCK.monotonic() - began_s
    spent_s = {one: now_s - before_s.get(one, 0.0) for one, now_s in cpu_s().items()}
    good = [one for one in found if one is not None and is_whole(one)]
    client.close()
    schedule_ms = plan.first_ms + (OUTPUT_TOKENS - 1) * plan.step_ms
    firsts = [one.first_ms - plan.first_ms for one in good]
    wholes = [one.last_ms - schedule_ms for one in good]
    return Overhead(
        requests=len(found),
        failed=len(found) - len(good),
        first_p50_ms=quantile(firsts, 0.5),
        first_p99_ms=quantile(firsts, 0.99),
        whole_p50_ms=quantile(wholes, 0.5),
        whole_p99_ms=quantile(wholes, 0.99),
        cpu_share=round(spent_s[pid] / took_s, 3),
        cpu_ms={
            name_of(one): round(1000 * spent / len(found), 2)
            for one, spent in spent_s.items()
        },
    )


def cpu_s() -> dict[int, float]:
    """What this process and each that it has started have spent, by pid."""
    me = psutil.Process()
    return {one.pid: sum(one.cpu_times()[:2]) for one in (me, *me.children())}


def name_of(pid: int) -> str:
    """What a process of the bench is: the word that tells it from the others."""
    if pid == os.getpid():
        return "load"
    words = psutil.Process(pid).cmdline()
    known = ("nats-server", "overhead_engine.py", "conductor", "gateway", "litellm")
    return next((name for name in known if any(name in w for w in words)), "?")


def is_whole(result: Result) -> bool:
    """All of the answer came. Tokens of one turn of a loop may share an event."""
    return result.status == _OK and result.tokens > 0


async def idle_memory(client: Client, pid: int, count: int) -> Idle:
    """What streams cost that are open and silent; a first one warms up."""
    process = psutil.Process(pid)
    _, writer = await client.begin("warm", HOLD_TOKENS)
    writer.close()
    await asyncio.sleep(1)
    before = process.memory_full_info().uss
    opened: list[asyncio.StreamWriter] = [writer]
    for start in range(0, count, AT_ONCE):
        size = min(AT_ONCE, count - start)
        some = (client.begin(f"hold {start + i}", HOLD_TOKENS) for i in range(size))
        opened += [writer for _, writer in await asyncio.gather(*some)]
    await asyncio.sleep(5)
    after = process.memory_full_info().uss
    for each in opened:
        each.close()
    return Idle(count, before, after)


async def refused(
    client: Client, texts: Sequence[str], given: argparse.Namespace
) -> Refusals:
    """Ten times what the worker can take, by clients that want their first token soon."""
    client.headers = {"x-kvtide-ttft-ms": str(TTFT_TARGET_MS)}
    rate = 10 * given.capacity
    found = await load(client, texts, rate=rate, seconds=given.seconds, tokens=2)
    client.close()
    told = [one for one in found if one is not None]
    times = [one.last_ms for one in told if one.status in REFUSED]
    served = [one for one in told if one.status == _OK]
    return Refusals(
        offered_per_s=rate,
        capacity_per_s=given.capacity,
        served=len(served),
        refused=len(times),
        broken=len(found) - len(times) - len(served),
        p50_ms=quantile(times, 0.5),
        p99_ms=quantile(times, 0.99),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Of what was measured; 0 if nothing was."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


@asynccontextmanager
async def gateway(
    folder: Path, model: Path, plan: Plan
) -> AsyncGenerator[tuple[Client, int]]:
    """NATS, conductor, fake worker and gateway; a client, and the gateway's pid."""
    folder.mkdir(parents=True)  # noqa: ASYNC240 - nobody waits
    nats_port, port = free_port(), free_port()
    nats = f"nats://127.0.0.1:{nats_port}"
    server = [str(find_nats_server()), "--addr", "127.0.0.1", "--port", str(nats_port)]
    common = ["--nats", nats, "--state-dir", str(folder), "--shm-dir", str(folder)]
    common += ["--log-format", "json"]  # as where nobody reads along
    cli = [sys.executable, "-m", "kvtide.cli"]
    sizes = json.loads((model / "config.json").read_text())
    fake = msgspec.structs.replace(
        plan, nats=nats, folder=str(folder), vocab_size=sizes["vocab_size"]
    )
    engine = [sys.executable, str(HERE / "overhead_engine.py"), "kvtide"]
    door = ["--model", str(model), "--model-name", "fake", "--http-port", str(port)]
    async with AsyncExitStack() as stack:

        async def run(name: str, *words: str) -> int:
            return await stack.enter_async_context(process(folder / name, *words))

        await run("nats", *server)
        await run("engine", *engine, msgspec.json.encode(fake).decode())
        await run("conductor", *cli, "conductor", *common, "--node", "conductor-0")
        pid = await run("gateway", *cli, "gateway", *common, "--node", "gw-0", *door)
        await until_answers(f"http://127.0.0.1:{port}/readyz", folder / "gateway")
        yield Client("127.0.0.1", port, "fake"), pid


@asynccontextmanager
async def litellm(
    folder: Path, venv: Path, plan: Plan
) -> AsyncGenerator[tuple[Client, int]]:
    """LiteLLM's proxy, one worker, before the fake server; a client, and its pid."""
    folder.mkdir(parents=True)  # noqa: ASYNC240 - nobody waits
    behind, port = free_port(), free_port()
    fake = msgspec.structs.replace(plan, port=behind)
    engine = [sys.executable, str(HERE / "overhead_engine.py"), "openai"]
    server = f"http://127.0.0.1:{behind}/v1"
    parameters = {"model": "openai/fake", "api_base": server, "api_key": "none"}
    key = f"sk-{secrets.token_hex(32)}"  # it does not start without one
    config = {
        "model_list": [{"model_name": "fake", "litellm_params": parameters}],
        "general_settings": {"master_key": key},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    words = [str(venv / "bin" / "litellm"), "--config", str(folder / "config.yaml")]
    words += ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    async with (
        process(folder / "engine", *engine, msgspec.json.encode(fake).decode()),
        process(folder / "litellm", *words) as pid,
    ):
        url = f"http://127.0.0.1:{port}/health/liveliness"
        await until_answers(url, folder / "litellm")
        yield Client("127.0.0.1", port, "fake", {"authorization": f"Bearer {key}"}), pid


@asynccontextmanager
async def process(log: Path, *words: str) -> AsyncGenerator[int]:
    """A process with a log, killed at the end if it does not end itself."""
    with log.open("wb") as out:
        one = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            # LiteLLM asks the network for prices otherwise, and waits
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # noqa: TID251
        )
    try:
        yield one.pid
    finally:
        with suppress(ProcessLookupError):
            one.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await one.wait()
        except TimeoutError:
            one.kill()
            await one.wait()


async def until_answers(url: str, log: Path) -> None:
    """Wait for a 200."""
    deadline_s = CLOCK.monotonic() + START_LIMIT_S
    async with httpx.AsyncClient(trust_env=False) as http:
        while CLOCK.monotonic() < deadline_s:
            with suppress(httpx.TransportError):
                if (await http.get(url, timeout=5)).status_code == _OK:
                    return
            await asyncio.sleep(0.2)
    end = log.read_text(errors="replace")[-2000:]  # noqa: ASYNC240 - it is over
    raise NotReadyError(f"{url} does not answer; the end of its log:\n{end}")


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def told(report: Report) -> str:
    """For people."""
    rows = [("kvtide gateway", report.kvtide)]
    if report.litellm is not None:
        rows.append(("LiteLLM proxy", report.litellm))
    lines = [
        "# What the gateway costs",
        "",
        (
            f"{report.machine}. {report.rate:g} requests a second for {report.seconds:g} s, "
            f"{report.prompt_tokens:.0f} tokens in, {OUTPUT_TOKENS} out, streams, one process. "
            "Milliseconds over the fake engine's schedule; client, engine, NATS and conductor "
            "share the machine. By `ops/bench/overhead.py`."
        ),
        "",
        "| | requests | failed | first p50 | first p99 | whole p50 | whole p99 | CPU |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {one.requests} | {one.failed} | {one.first_p50_ms:.1f} "
            f"| {one.first_p99_ms:.1f} | {one.whole_p50_ms:.1f} "
            f"| {one.whole_p99_ms:.1f} | {one.cpu_share:.0%} |"
            for name, one in rows
        ),
        "",
        *(
            f"{name}, ms of CPU for each request: "
            + ", ".join(f"{who} {spent:.2f}" for who, spent in one.cpu_ms.items())
            + "."
            for name, one in rows
        ),
        "",
    ]
    idle, refusals = report.idle, report.refusals
    more = (idle.after_bytes - idle.before_bytes) / 1e6
    lines += [
        (
            f"{idle.streams} idle streams: {more:.0f} MB more ({idle.before_bytes / 1e6:.0f} "
            f"MB before)."
        ),
        "",
        (
            f"{refusals.offered_per_s:g} requests a second where {refusals.capacity_per_s:g} "
            f"can be taken: {refusals.served} served, {refusals.refused} refused "
            f"({refusals.p50_ms:.1f} ms at p50, {refusals.p99_ms:.1f} ms at p99), "
            f"{refusals.broken} broken."
        ),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
