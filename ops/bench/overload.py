"""What is left of goodput when ten times more is asked than can be served.

    python ops/bench/overload.py --out ops/bench/results/overload.json

Starts a system of its own. First what it can do: requests a second with eight open, and
the time to first token and between tokens of one alone. The targets are multiples of the
latter, told with each request. Then open loads (Poisson) from half of that rate to ten
times of it: goodput is what was answered whole within both targets, a second; what is
refused is refused at arrival. The best of all loads is what goodput at ten times is held
against. At ten times nothing may fail or be late, and private memory may be a tenth more
than at the load before.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.chaos.rounds import commit
from tests.e2e.system import System

FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 10.0)
PROMPT_TOKENS, OUTPUT_TOKENS = 256, 24
OPEN = 8
"""Open at once while it is measured what can be served."""
TTFT_TIMES, TBT_TIMES = 8.0, 5.0
"""Targets, of what one request alone takes."""
BUSY_REQUESTS, ALONE_REQUESTS = 40, 12
WITHIN = 0.1


@dataclass(frozen=True)
class Targets:
    """In milliseconds."""

    ttft_ms: float
    tbt_ms: float


@dataclass(frozen=True)
class Load:
    """What came of one rate. ``goodput`` is requests a second within both targets.

    ``late`` were answered whole, but not within both; the times are of all that were
    answered whole, and TBT is the mean of an answer's longest tenth of gaps.
    """

    of_capacity: float
    asked_per_s: float
    asked: int
    refused: int
    failed: int
    late: int
    goodput_per_s: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    tbt_p50_ms: float
    tbt_p90_ms: float
    private_mib: float
    resident_mib: float


def serve(system: System, *words: str) -> dict[str, Any]:
    """The summary of a load that ``kvtide bench serve`` sent."""
    with tempfile.TemporaryDirectory() as out:
        command = [
            *(sys.executable, "-m", "kvtide.cli", "bench", "serve", system.url),
            *("--prompt-tokens", str(PROMPT_TOKENS)),
            *("--output-tokens", str(OUTPUT_TOKENS), "--out", out, *words),
        ]
        # 1: some requests were refused; they are counted
        subprocess.run(  # noqa: S603 - ours
            command, check=False, timeout=900, stdout=subprocess.DEVNULL
        )
        return json.loads((Path(out) / "serve.json").read_text())["summary"]


def alone(found: dict[str, Any]) -> Targets:
    """Targets, from requests that had the machine for themselves."""
    return Targets(
        TTFT_TIMES * found["ttft_ms"]["p50"], TBT_TIMES * found["tbt_ms"]["p50"]
    )


def loaded(
    system: System, factor: float, rate: float, targets: Targets, span_s: float
) -> Load:
    """One open load, and what came of it."""
    found = serve(
        system,
        *("--rate", f"{rate:.4f}", "--span-s", str(span_s)),
        *("--requests", str(int(2 * rate * span_s) + 20)),
        *("--seed", str(int(factor * 100)), "--tell-targets"),
        *("--ttft-ms", str(targets.ttft_ms), "--tbt-ms", str(targets.tbt_ms)),
    )
    done = found["outcomes"].get("completed", 0)
    refused = found["outcomes"].get("refused", 0)
    return Load(
        of_capacity=factor,
        asked_per_s=round(rate, 3),
        asked=found["requests"],
        refused=refused,
        failed=found["requests"] - done - refused,
        late=done - found["good"],
        goodput_per_s=round(found["good_per_s"], 3),
        **times(found),
        private_mib=round(memory_mib(system, "uss"), 1),
        resident_mib=round(memory_mib(system, "rss"), 1),
    )


def times(found: dict[str, Any]) -> dict[str, float]:
    """Of the answers that came whole; 0 if none did."""
    return {
        f"{name}_{share}_ms": round(found[f"{name}_ms"][share] or 0.0, 1)
        for name in ("ttft", "tbt")
        for share in ("p50", "p90")
    }


def memory_mib(system: System, kind: str) -> float:
    """The sum over all processes: ``uss`` is what each has for itself alone.

    ``rss`` has shared memory once for each process that looks at it, as it fills.
    """
    everyone = [psutil.Process(pid) for pid in system.processes().values()]
    return sum(getattr(each.memory_full_info(), kind) for each in everyone) / (1 << 20)


def wrongs(loads: Sequence[Load]) -> list[str]:
    """What of the highest load is not as it must be."""
    last = loads[-1]
    best = max(load.goodput_per_s for load in loads)
    wrong: list[str] = []
    if last.goodput_per_s < (1 - WITHIN) * best:
        wrong.append(f"goodput {last.goodput_per_s}, the best was {best}")
    if last.failed or last.late:
        wrong.append(f"{last.failed} failed, {last.late} were late")
    if len(loads) > 1 and last.private_mib > (1 + WITHIN) * loads[-2].private_mib:
        wrong.append(f"private memory {last.private_mib} MiB")
    return wrong


def ended(signum: int, _: object) -> None:
    """Unwind, as after an error."""
    raise SystemExit(128 + signum)


def main() -> int:
    """Run; 1 if the highest load is not served as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--span-s", type=float, default=60.0)
    parser.add_argument("--factors", type=float, nargs="+", default=FACTORS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    # who ends this ends the system, too
    signal.signal(signal.SIGTERM, ended)
    with tempfile.TemporaryDirectory() as folder, System(Path(folder) / "s") as system:
        one = ("--concurrency", "1", "--requests", str(ALONE_REQUESTS))
        targets = alone(serve(system, *one, "--seed", "1"))
        many = ("--concurrency", str(OPEN), "--requests", str(BUSY_REQUESTS))
        rate = serve(system, *many, "--seed", "2")["requests_per_s"]
        loads: list[Load] = []
        for factor in given.factors:
            load = loaded(system, factor, factor * rate, targets, given.span_s)
            print(load, file=sys.stderr, flush=True)
            loads.append(load)
    best = max(load.goodput_per_s for load in loads)
    share = loads[-1].goodput_per_s / best if best else 0.0
    found = {
        "commit": commit(),
        "command": "python ops/bench/overload.py --span-s " + str(given.span_s),
        "capacity_per_s": round(rate, 3),
        "targets": asdict(targets),
        "loads": [asdict(load) for load in loads],
        "goodput_at_the_highest_of_the_best": round(share, 3),
        "wrong": (wrong := wrongs(loads)),
    }
    print(json.dumps(found, indent=1))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
