"""``make soak``: mixed load and random faults on the real system for a given time.

At the end: each request ended once and right, nothing is held, no process kept more
memory, descriptors, threads or tasks than it had when it had settled. Writes
``ops/bench/results/soak.json`` and ``soak.svg``; ends with 1 if anything is wrong.
"""

import argparse
import functools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from tests.chaos.load import Allowed, Ledger, judge, questions
from tests.chaos.rounds import commit, oracle_of
from tests.chaos.site import ROLES, ChaosSite
from tests.chaos.soak_faults import PEACE_S, Faults
from tests.chaos.watch import FIGURES, Sample, Watch, leaks, lives
from tests.e2e.fault_rounds import Question

from kvtide.sim.plots import Line, stacked

RESULTS = Path(__file__).parents[2] / "ops" / "bench" / "results"
EVERY_S = 5.0
QUESTIONS = 12
THREADS = 3
ALLOWED = Allowed(errors=("500", "502", "503"), broken=True)
MOST_FAILED = 0.2
"""Of the requests that reached a gateway; while nobody of a role is left, they may."""


@dataclass
class Soak:
    """What a run saw; ``wrong`` is empty when all was well."""

    seconds: float
    seed: int
    commit: str
    on: str
    requests: str = ""
    faults: dict[str, int] = field(default_factory=dict[str, int])
    wrong: list[str] = field(default_factory=list[str])
    samples: list[Sample] = field(default_factory=list[Sample])


def soak(seconds: float, seed: int, folder: Path) -> Soak:
    """Run; raises only if the site can't be started."""
    today = datetime.now(UTC).date().isoformat()
    found = Soak(seconds, seed, commit(), today)
    with ChaosSite(folder / "site") as site:
        faults = Faults(site, random.Random(seed))  # noqa: S311 - to do it again
        asked = questions(site, QUESTIONS)
        asked += [salted(one) for one in asked[::2]]
        end_s = time.monotonic() + seconds
        with Watch(site, EVERY_S) as watch:
            load = Ledger(site, asked, THREADS, patient=True)
            try:
                with load:
                    while time.monotonic() < end_s:
                        faults.rest(PEACE_S)
                        faults.one()
                        say(seconds - (end_s - time.monotonic()), load, faults)
                    load.answered(2)
                site.wait_whole()
            except (AssertionError, OSError, subprocess.SubprocessError) as error:
                found.wrong.append(str(error))
                site.undo()
        found.requests = load.seen()
        found.faults = dict(sorted(faults.done.items()))
        found.samples = watch.samples
        found.wrong += judged(site, load, watch.samples)
    return found


def salted(question: Question) -> Question:
    """The same for somebody who shares no block with the others."""
    return replace(question, sampling={**question.sampling, "cache_salt": "other"})


def judged(site: ChaosSite, load: Ledger, samples: Sequence[Sample]) -> list[str]:
    """What is wrong with the ledger, and what leaked."""
    oracle = functools.partial(oracle_of, site.model_folder)
    wrong = judge(load.entries, ALLOWED, oracle)
    failed = sum(not (e.finished or e.left or e.unreached) for e in load.entries)
    if failed > MOST_FAILED * len(load.entries):
        wrong.append(f"{failed} of {len(load.entries)} requests failed")
    return [*wrong, *leaks(samples)]


def say(at_s: float, load: Ledger, faults: Faults) -> None:
    sys.stdout.write(f"{at_s:.0f} s: {faults.done.total()} faults; {load.seen()}\n")
    sys.stdout.flush()


def plot(samples: Sequence[Sample]) -> str:
    """One plot for each figure: the sum over the processes of each role."""
    titles = ("resident memory, MiB", "open descriptors", "threads", "tasks")
    return stacked(
        [
            (f"{title}, by role (sum)", list(_lines(samples, figure)))
            for title, figure in zip(titles, FIGURES, strict=True)
        ]
    )


def _lines(samples: Sequence[Sample], figure: str) -> list[Line]:
    lines: list[Line] = []
    for role in ROLES:
        moments: dict[int, dict[str, float]] = {}
        for sample in samples:
            value = getattr(sample, figure)
            if sample.name.startswith(role) and value is not None:
                moment = round(sample.at_s / (3 * EVERY_S))
                moments.setdefault(moment, {})[sample.name] = value
        points = [
            (moment * 3 * EVERY_S / 60, sum(values.values()))
            for moment, values in sorted(moments.items())
        ]
        if points:
            lines.append(Line(role, tuple(points)))
    return lines


def main(arguments: Sequence[str]) -> int:
    """Run; the number is the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0, help="0: drawn")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    seed = options.seed or random.SystemRandom().randrange(1, 1 << 31)
    with tempfile.TemporaryDirectory(prefix="kvtide-soak-") as folder:
        found = soak(options.seconds, seed, Path(folder))
    (options.out / "soak.svg").write_text(plot(found.samples))
    page = asdict(found)
    page["samples"] = [list(asdict(sample).values()) for sample in found.samples]
    page["figures"] = list(Sample.__slots__)
    (options.out / "soak.json").write_text(json.dumps(page) + "\n")
    sys.stdout.write(
        f"seed {seed}, {len(lives(found.samples))} lives of processes, {found.faults}\n"
        f"{found.requests}\n" + "\n".join(found.wrong or ["nothing wrong"]) + "\n"
    )
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
