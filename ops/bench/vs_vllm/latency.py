"""TTFT and TPOT of kvtide and vLLM in turn, asked by ``vllm bench serve``."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from servers import Server

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

    ``other_cpu_s`` is what the other server used meanwhile, though nobody asked it.
    """

    system: str
    round: int
    median_ms: float
    mean_ms: float
    p99_ms: float
    output_per_s: float
    took_s: float
    other_cpu_s: float
    command: tuple[str, ...]


class NotMeasuredError(Exception):
    """A run failed, or hit a cache that should not have been there."""


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
            other = [each for each in servers if each is not server]
            used_s = sum(each.cpu_s() for each in other)
            hits = _hits(server)
            run_seed = 10_000 * (seed + 1) + 100 * PIECES.index(piece) + number
            found, command = _ask(piece, server, venv, folder, run_seed, work)
            if _hits(server) != hits:
                raise NotMeasuredError(f"{server.name} hit its cache: choose a --seed")
            used_s = sum(each.cpu_s() for each in other) - used_s
            runs.append(_run(piece, server, number, found, used_s, command))
            last = runs[-1]
            print(f"{piece.name} {server.name}: {last.median_ms:.0f} ms", flush=True)
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
    used_s: float,
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
        other_cpu_s=used_s,
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
        "runs": [asdict(run) for run in runs],
    }
