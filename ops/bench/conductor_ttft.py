r"""What a conductor predicted against what came: the real system under mixed load.

    .venv/bin/python ops/bench/conductor_ttft.py
    .venv/bin/python ops/bench/conductor_ttft.py --load moderate --out ops/bench/results

Starts ``kvtide up`` with the demo model in a folder of its own. Requests come at random
times (Poisson) and are of four kinds: short questions, long prompts, long prompts that
were asked before, and next turns of earlier conversations; some want one token, some
forty. The first ``--warm-up`` seconds let the costs be fitted and are not counted. Under
``heavy`` load more comes than two cores can serve, so the queue grows all the time; under
``moderate`` load it is short, and most of a first token's time is computing. What
was predicted and what came are read from the catalog afterwards, as ``kvtide explain``
shows them: the error of a request is |predicted / actual - 1|.

Writes conductor_ttft.json, under moderate load conductor_ttft_moderate.json.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import httpx

from kvtide.catalog import Catalog, DecisionRow
from kvtide.kv import RequestId
from kvtide.runtime import SystemClock

CLOCK = SystemClock()
KINDS = ("short", "long", "again", "turn")
SHARES = (0.4, 0.25, 0.15, 0.2)
START_LIMIT_S = 240.0
REQUEST_LIMIT_S = 120.0
REMEMBERED = 8
MAX_TURN_TOKENS = 2500
HEAVY, MODERATE = "heavy", "moderate"
LOADS = {HEAVY: (0.7, 80.0), MODERATE: (0.2, 300.0)}
"""Requests a second, and for how many seconds."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One request: of which kind, by which name, and whether it counts."""

    kind: str
    name: str
    counts: bool


@dataclass(frozen=True, slots=True)
class Pair:
    """What was predicted for a request and what came, in ms; no TBT of one token."""

    kind: str
    ttft_ms: tuple[float, float]
    tbt_ms: tuple[float, float] | None
    queue_ms: float
    transfer_ms: float
    prefill_ms: float


class Load:
    """Chooses prompts as token ids; remembers some to come back to."""

    def __init__(self, seed: int) -> None:
        """The same seed asks for the same."""
        self.random = random.Random(seed)
        self.prompts: list[list[int]] = []

    def next(self) -> tuple[str, list[int], int]:
        """Kind, prompt and how many tokens to make."""
        (kind,) = self.random.choices(KINDS, SHARES)
        output = self.random.choice((1, 8, 8, 20, 40))
        if kind == "short" or (kind != "long" and not self.prompts):
            return "short", self._tokens(self.random.randint(20, 250)), output
        if kind == "long":
            prompt = self._tokens(self.random.randint(500, 1600))
        else:
            prompt = self.random.choice(self.prompts)
            if kind == "turn":
                prompt = prompt + self._tokens(self.random.randint(30, 300))
        if len(prompt) < MAX_TURN_TOKENS:
            self.prompts = [*self.prompts, prompt][-REMEMBERED:]
        return kind, prompt, output

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(1000, 40_000) for _ in range(count)]


async def send(
    client: httpx.AsyncClient, model: str, name: str, prompt: list[int], output: int
) -> bool:
    """Ask, and read the whole stream; whether it came to its end."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    headers = {"x-request-id": name}
    done = False
    try:
        async with client.stream(
            "POST", "/v1/completions", json=body, headers=headers
        ) as response:
            async for line in response.aiter_lines():
                done |= line == "data: [DONE]"
    except httpx.TransportError as error:
        print(f"{name}: {error!r}", file=sys.stderr)
    return done


async def drive(url: str, options: argparse.Namespace) -> list[Sent]:
    """Send the load, open loop; requests that came to their end."""
    load = Load(options.seed)
    sent: list[Sent] = []
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_LIMIT_S) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        began = CLOCK.monotonic()
        end = options.warm_up + options.seconds

        async def one(number: int) -> None:
            kind, prompt, output = load.next()
            counts = CLOCK.monotonic() - began >= options.warm_up
            name = f"bench-{number}"
            if await send(client, model, name, prompt, output):
                sent.append(Sent(kind, name, counts))

        async with asyncio.TaskGroup() as group:
            number = 0
            while CLOCK.monotonic() - began < end:
                number += 1
                group.create_task(one(number))
                await asyncio.sleep(load.random.expovariate(options.rate))
    return sent


@asynccontextmanager
async def system(folder: Path, options: argparse.Namespace) -> AsyncGenerator[str]:
    """``kvtide up``, until it is ready; ended with everything it started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = (
        *(sys.executable, "-m", "kvtide.cli", "up", "--state-dir", str(folder)),
        *("--port", str(port), "--prefill", str(options.prefill)),
        *("--decode", str(options.decode), "--threads", str(options.threads)),
        *("--conductors", str(options.conductors)),
    )
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(START_LIMIT_S), httpx.AsyncClient() as client:
            while True:
                if process.returncode is not None:
                    sys.exit(f"kvtide up ended with {process.returncode}")
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(f"{url}/readyz")).is_success:
                        break
                await asyncio.sleep(0.3)
        yield url
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def pairs(folder: Path, sent: Sequence[Sent]) -> list[Pair]:
    """Predicted and actual times of what counts, from the catalog."""
    found: list[Pair] = []
    async with Catalog.open(f"sqlite:///{folder}/catalog.sqlite3") as catalog:
        for each in sent:
            request = await catalog.find_request(each.name) if each.counts else None
            rows = await catalog.decisions(RequestId(request or ""))
            pair = _pair(each.kind, rows[-1]) if rows else None
            if pair is not None:
                found.append(pair)
    return found


def _pair(kind: str, row: DecisionRow) -> Pair | None:
    outcome = row.outcome
    if outcome is None or not row.candidates or not outcome.ttft_ms:
        return None
    guess = row.candidates[0]
    return Pair(
        kind,
        (guess.ttft_ms, outcome.ttft_ms),
        (guess.tbt_ms, outcome.tbt_ms) if outcome.tbt_ms else None,
        guess.queue_ms,
        guess.transfer_ms,
        guess.prefill_ms,
    )


def errors(both: Sequence[tuple[float, float]]) -> dict[str, float]:
    """How many, the median error, that of nine tenths, and the median bias."""
    if not both:
        return {"requests": 0}
    off = sorted(abs(guess / actual - 1) for guess, actual in both)
    return {
        "requests": len(off),
        "median": round(median(off), 3),
        "p90": round(off[int(len(off) * 0.9)], 3),
        "bias": round(median(guess / actual - 1 for guess, actual in both), 3),
        "actual_median_ms": round(median(actual for _, actual in both), 1),
    }


def queues(found: Sequence[Pair]) -> dict[str, float]:
    """The median queue that was predicted, and that of nine tenths."""
    if not found:
        return {"requests": 0}
    waits_ms = sorted(pair.queue_ms for pair in found)
    return {
        "requests": len(waits_ms),
        "median_ms": round(median(waits_ms), 1),
        "p90_ms": round(waits_ms[int(len(waits_ms) * 0.9)], 1),
    }


def report(found: Sequence[Pair]) -> dict[str, dict[str, float]]:
    """Errors of all, and by kind."""
    table = {
        "ttft": errors([pair.ttft_ms for pair in found]),
        "tbt": errors([pair.tbt_ms for pair in found if pair.tbt_ms]),
        "queue": queues(found),
    }
    for kind in KINDS:
        table[f"ttft {kind}"] = errors([p.ttft_ms for p in found if p.kind == kind])
    return table


async def measure(options: argparse.Namespace) -> None:
    """Run, report, keep."""
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as name:
        folder = Path(name)
        async with system(folder, options) as url:
            sent = await drive(url, options)
        found = await pairs(folder, sent)
    table = report(found)
    for what, figures in table.items():
        print(f"{what:12}", *(f"{key} {value}" for key, value in figures.items()))
    if options.pairs:
        options.pairs.write_text(json.dumps([asdict(pair) for pair in found]))
    if options.out is None:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    kept = {
        "machine": {
            "python": platform.python_version(),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        },
        "load": {
            key: getattr(options, key)
            for key in (
                *("load", "rate", "seconds", "warm_up", "seed"),
                *("prefill", "decode"),
            )
        },
        "errors": table,
    }
    text = json.dumps(kept, indent=2) + "\n"
    suffix = "" if options.load == HEAVY else f"_{options.load}"
    (options.out / f"conductor_ttft{suffix}.json").write_text(text)


async def until_told(options: argparse.Namespace) -> None:
    """Measure; SIGTERM ends it with everything that it started."""
    doing = asyncio.ensure_future(measure(options))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, doing.cancel)
    await doing


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the figures")
    parser.add_argument("--pairs", type=Path, help="file for each request's times")
    parser.add_argument("--load", choices=tuple(LOADS), default=HEAVY)
    parser.add_argument("--rate", type=float, help="requests a second, else the load's")
    parser.add_argument("--seconds", type=float, help="for so long, else as the load")
    parser.add_argument("--warm-up", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--conductors", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    rate, seconds = LOADS[options.load]
    options.rate = options.rate or rate
    options.seconds = options.seconds or seconds
    asyncio.run(until_told(options))


if __name__ == "__main__":
    main()
