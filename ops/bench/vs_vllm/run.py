"""Kvtide beside vLLM on this machine's CPU: one command, in pieces.

    python ops/bench/vs_vllm/run.py --vllm VENV                      all of it
    python ops/bench/vs_vllm/run.py --vllm VENV --piece ttft-512     a part
    python ops/bench/vs_vllm/run.py --vllm VENV --up                 servers that stay,
        for the ttft and tpot pieces of other calls with the same --work; Ctrl-C ends them

VENV is a virtual environment with vLLM 0.32 for the CPU. Both serve the same folder in
float32. TTFT and TPOT: asked by ``vllm bench serve`` in turn, prefix caching off in
vLLM, and no prompt asked of kvtide twice (checked by its counters); kvtide has one
prefill and one decode worker, vLLM and kvtide the same cores (by itself vLLM would
leave one of them to its API server). trace-vllm and
trace-kvtide: ``kvtide bench serve`` with caching on, see conversation.py for the sizes. Each
piece is kept in OUT/vs_vllm.json as it ends, and OUT/vs_vllm.md made anew from that.
"""

import argparse
import contextlib
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import conversation
import latency
import report
import servers

EVERY_CORE = f"0-{(os.cpu_count() or 1) - 1}"
PIECES = (*(each.name for each in latency.PIECES), "trace-vllm", "trace-kvtide")


def main() -> None:
    """Run the wanted pieces."""
    # so that servers are ended whatever ends us
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    given = _arguments()
    given.work.mkdir(parents=True, exist_ok=True)
    folder = servers.model_folder(given.model)
    if given.up:
        _stay(given, folder)
        return
    wanted = given.piece or PIECES
    kept = report.Kept(given.out)
    about = _about(given, folder)
    latencies = [each for each in latency.PIECES if each.name in wanted]
    if latencies:
        with _both(given, folder) as pair:
            for piece in latencies:
                # beside what was measured with other cores
                name = piece.name
                if given.vllm_cores != EVERY_CORE:
                    name += f", vLLM's cores: {given.vllm_cores}"
                kept.add(name, _latency(piece, pair, given, folder), about)
    sizes = conversation.Sizes()
    if "trace-vllm" in wanted:
        with conversation.vllm_system(given.vllm, folder, given.work, sizes) as found:
            out = given.work / "trace-vllm"
            kept.add("trace-vllm", conversation.measure(*found, sizes, out), about)
    if "trace-kvtide" in wanted:
        with conversation.kvtide_system(folder, given.work, sizes) as found:
            out = given.work / "trace-kvtide"
            kept.add("trace-kvtide", conversation.measure(*found, sizes, out), about)
    print(kept.markdown())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, required=True, metavar="VENV")
    parser.add_argument("--piece", action="append", choices=PIECES)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="other prompts")
    parser.add_argument("--model", type=Path, help="a folder; default: the demo model")
    parser.add_argument(
        "--vllm-cores",
        default=EVERY_CORE,
        help=f"of the latency pieces; auto leaves one out; default: {EVERY_CORE}",
    )
    parser.add_argument("--up", action="store_true")
    parser.add_argument("--work", type=Path, default=Path("build/vs_vllm"))
    results = Path(__file__).parents[1] / "results"
    parser.add_argument("--out", type=Path, default=results)
    return parser.parse_args()


@contextlib.contextmanager
def _both(
    given: argparse.Namespace, folder: Path
) -> Iterator[tuple[servers.Server, servers.Server]]:
    """Kvtide and vLLM: those of ``--up`` if they run, else of our own."""
    there = servers.remembered(given.work / "servers.json")
    if {"kvtide", "vllm-0"} <= set(there):
        yield there["kvtide"], there["vllm-0"]
        return
    with (
        servers.vllm(given.vllm, folder, given.work, cores=given.vllm_cores) as peer,
        servers.kvtide(folder, given.work) as ours,
    ):
        yield ours, peer


def _stay(given: argparse.Namespace, folder: Path) -> None:
    file = given.work / "servers.json"
    file.unlink(missing_ok=True)
    with _both(given, folder) as pair:
        servers.remember(pair, file)
        print(f"both are up: {file}", flush=True)
        try:
            signal.pause()
        finally:
            file.unlink(missing_ok=True)


def _latency(
    piece: latency.Piece,
    pair: tuple[servers.Server, servers.Server],
    given: argparse.Namespace,
    folder: Path,
) -> dict[str, object]:
    times = 3 if piece.figure == "ttft" else 20
    limits_ms = [latency.products(piece, folder, times)]
    runs = latency.measure(
        piece,
        pair,
        venv=given.vllm,
        folder=folder,
        rounds=given.rounds,
        seed=given.seed,
        work=given.work,
    )
    limits_ms.append(latency.products(piece, folder, times))
    return latency.summed_up(piece, runs, limits_ms)


def _about(given: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Machine and versions, for every piece."""
    models = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    show = (
        "import importlib.metadata as m;"
        "print(m.version('vllm'), m.version('torch'), m.version('transformers'))"
    )
    python = given.vllm / "bin" / "python"
    theirs = _said(str(python), show)
    ours = _said(sys.executable, show.replace("'vllm'", "'kvtide'"))
    return {
        "machine": f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores",
        "model": folder.name,
        "vllm": "vLLM {}, torch {}, transformers {}".format(*theirs),
        "kvtide": "kvtide {}, torch {}, transformers {}".format(*ours),
        "command": f"run.py --vllm VENV --rounds {given.rounds} --seed {given.seed}",
    }


def _said(python: str, code: str) -> list[str]:
    said = subprocess.check_output((python, "-c", code), text=True)  # noqa: S603
    return said.split()


if __name__ == "__main__":
    main()
