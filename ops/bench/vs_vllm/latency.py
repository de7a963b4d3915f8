"""TTFT and TPOT of kvtide and vLLM in turn, asked by ``vllm bench serve``."""

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
from servers import CLOCK, Server

from kvtide.cli.settings import process_environment

LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Piece:
    """One load: ``prompts`` of ``prompt_tokens``, ``concurrency`` at a time.

    ``bar`` is the most that kvtide's ``figure`` may be of vLLM's.
    """

    name: str
    figure: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    prompts: int
    bar: float


PIECES = (
    Piece("ttft-512", "ttft", 512, 2, 1, 4, 0.8),
    Piece("ttft-2048", "ttft", 2048, 2, 1, 2, 0.5),
    Piece("tpot-1", "tpot", 128, 64, 1, 2, 0.8),
    Piece("tpot-4", "tpot", 128, 64, 4, 8, 0.8),
    Piece("tpot-8", "tpot", 128, 64, 8, 16, 0.8),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One call of ``vllm bench serve``; times in ms.

    ``other_cpu_s`` is what the other server used meanwhile, though nobody asked it;
    ``strangers`` the share of all processor time that neither server nor the load
    generator used: where it is large, the machine was not ours and the run is noise.
    """

    system: str
    round: int
    median_ms: float
    mean_ms: float
    p99_ms: float
    output_per_s: float
    took_s: float
    other_cpu_s: float
    strangers: float
    command: tuple[str, ...]


class NotMeasuredError(Exception):
    """A run failed, or hit a cache that should not have been there."""


@dataclass(frozen=True, slots=True)
class Used:
    """Processor time so far: of each server, of the programs we ran, of all."""

    wall_s: float
    busy_s: float
    programs_s: float
    servers_s: dict[str, float]

    @classmethod
    def now(cls, servers: Sequence[Server]) -> "Used":
        """At this moment."""
        all_ = psutil.cpu_times()
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(
            CLOCK.monotonic(),
            sum(all_) - all_.idle - all_.iowait - all_.guest - all_.guest_nice,
            children.ru_utime + children.ru_stime,
            {each.name: each.cpu_s() for each in servers},
        )

    def since(self, before: "Used") -> "Used":
        """The difference."""
        servers_s = {n: s - before.servers_s[n] for n, s in self.servers_s.items()}
        return Used(
            self.wall_s - before.wall_s,
            self.busy_s - before.busy_s,
            self.programs_s - before.programs_s,
            servers_s,
        )

    @property
    def strangers(self) -> float:
        """The share of all processors' time that none of these used."""
        ours_s = self.programs_s + sum(self.servers_s.values())
        return max(0.0, self.busy_s - ours_s) / (
            self.wall_s * (psutil.cpu_count() or 1)
        )


def warm(server: Server, folder: Path, tokens: int) -> None:
    """One request of ``tokens`` that no load repeats: it pays for what is made once."""
    body = {
        "model": folder.name,
        "prompt": [1000 + 7 * n % 40_000 for n in range(tokens)],
        "max_tokens": 2,
        "temperature": 0,
    }
    url = f"{server.url}/v1/completions"
    httpx.post(url, json=body, timeout=LIMIT_S, trust_env=False).raise_for_status()


def measure(
    piece: Piece,
    servers: Sequence[Server],
    *,
    venv: Path,
    folder: Path,
    rounds: int,
    seed: int,
    work: Path,
) -> list[Run]:
    """Every round asks each server the same prompts, of no other round or piece."""
    for server in servers:
        warm(server, folder, piece.prompt_tokens)
    runs: list[Run] = []
    for number in range(rounds):
        # who comes first changes: the machine's speed drifts
        order = servers if number % 2 == 0 else tuple(reversed(servers))
        for server in order:
            hits, before = _hits(server), Used.now(servers)
            run_seed = 10_000 * (seed + 1) + 100 * PIECES.index(piece) + number
            found, command = _ask(piece, server, venv, folder, run_seed, work)
            if _hits(server) != hits:
                raise NotMeasuredError(f"{server.name} hit its cache: choose a --seed")
            spent = Used.now(servers).since(before)
            runs.append(_run(piece, server, number, found, spent, command))
            last = runs[-1]
            print(
                f"{piece.name} {server.name}: {last.median_ms:.0f} ms, "
                f"{last.strangers:.0%} of the machine was others'",
                flush=True,
            )
    return runs


def _ask(
    piece: Piece, server: Server, venv: Path, folder: Path, seed: int, work: Path
) -> tuple[dict[str, Any], tuple[str, ...]]:
    out = work / "bench.json"
    out.unlink(missing_ok=True)
    command = (
        *(str(venv / "bin" / "vllm"), "bench", "serve", "--backend", "openai"),
        *("--base-url", server.url, "--model", str(folder)),
        *("--served-model-name", folder.name, "--dataset-name", "random"),
        *("--random-input-len", str(piece.prompt_tokens)),
        *("--random-output-len", str(piece.output_tokens)),
        *("--num-prompts", str(piece.prompts)),
        *("--max-concurrency", str(piece.concurrency), "--ignore-eos"),
        *("--temperature", "0", "--seed", str(seed), "--disable-tqdm"),
        *("--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "99"),
        *("--save-result", "--result-dir", str(work), "--result-filename", out.name),
    )
    environment = process_environment({"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    environment.pop("PYTHONPATH", None)  # ours is not the venv's
    with (work / "bench.log").open("ab") as log:
        done = subprocess.run(  # noqa: S603 - the venv that was named
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=LIMIT_S,
            check=False,
        )
    if done.returncode or not out.is_file():
        raise NotMeasuredError(f"vllm bench serve failed: see {work / 'bench.log'}")
    found = json.loads(out.read_text())
    if found["completed"] != piece.prompts:
        raise NotMeasuredError(f"{server.name} answered {found['completed']} alone")
    return found, command


def _run(
    piece: Piece,
    server: Server,
    number: int,
    found: dict[str, Any],
    spent: "Used",
    command: tuple[str, ...],
) -> Run:
    return Run(
        system=server.name.partition("-")[0],
        round=number,
        median_ms=found[f"median_{piece.figure}_ms"],
        mean_ms=found[f"mean_{piece.figure}_ms"],
        p99_ms=found[f"p99_{piece.figure}_ms"],
        output_per_s=found["output_throughput"],
        took_s=found["duration"],
        other_cpu_s=sum(
            s for name, s in spent.servers_s.items() if name != server.name
        ),
        strangers=spent.strangers,
        command=command,
    )


def _hits(server: Server) -> float:
    """Prompt tokens from a cache so far."""
    names = ("kvtide_gateway_cached_tokens_total", "vllm:prefix_cache_hits_total")
    page = httpx.get(f"{server.url}/metrics", timeout=30, trust_env=False)
    lines = page.raise_for_status().text.splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith(names)
    )


def products(piece: Piece, folder: Path, times: int) -> float:
    """The matrix products of a prefill, or of a decode step, alone: median ms."""
    tokens = piece.prompt_tokens if piece.figure == "ttft" else piece.concurrency
    drawn = 1 if piece.figure == "ttft" else piece.concurrency
    script = Path(__file__).with_name("products.py")
    said = subprocess.run(  # noqa: S603 - ours
        (
            *(sys.executable, str(script), str(folder), "--tokens", str(tokens)),
            *("--drawn", str(drawn), "--times", str(times)),
        ),
        env=process_environment({"OMP_WAIT_POLICY": "PASSIVE"}),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    return float(json.loads(said)["ms"])


def summed_up(
    piece: Piece, runs: Sequence[Run], limits_ms: Sequence[float]
) -> dict[str, Any]:
    """Medians over rounds, the ratio, and whether it is below the bar."""
    of = {
        system: median(run.median_ms for run in runs if run.system == system)
        for system in ("kvtide", "vllm")
    }
    ratio = of["kvtide"] / of["vllm"]
    limit_ms = median(limits_ms)
    return {
        "piece": asdict(piece),
        "kvtide_ms": of["kvtide"],
        "vllm_ms": of["vllm"],
        "ratio": ratio,
        "bar": piece.bar,
        "met": ratio <= piece.bar,
        "products_ms": limit_ms,
        "kvtide_to_products": of["kvtide"] / limit_ms,
        "strangers": max(run.strangers for run in runs),
        "runs": [asdict(run) for run in runs],
    }
