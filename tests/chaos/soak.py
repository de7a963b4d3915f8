"""``make soak``: mixed load and random faults on the real system for a given time.

At the end: each request ended once and right, nothing is held, no process kept more
memory, descriptors, threads or tasks than it had when it had settled. Writes
``ops/bench/results/soak.json`` and ``soak.svg``; ends with 1 if anything is wrong.
"""

import argparse
import functools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tests.chaos.link import CLEAR, SILENT, Link, Weather
from tests.chaos.load import Allowed, Ledger, judge, questions
from tests.chaos.rounds import commit, oracle_of
from tests.chaos.site import ROLES, ChaosSite
from tests.chaos.watch import FIGURES, Sample, Watch, leaks, lives
from tests.e2e.system import wait_for

from kvtide.sim.plots import Line, stacked

RESULTS = Path(__file__).parents[2] / "ops" / "bench" / "results"
EVERY_S = 5.0
PEACE_S = (5.0, 20.0)
FAULT_S = (2.0, 12.0)
READY_LIMIT_S = 180.0
QUESTIONS = 12
THREADS = 3
ALLOWED = Allowed(errors=("500", "502", "503"), broken=True)
MOST_FAILED = 0.2
"""Of the requests that reached a gateway; while nobody of a role is left, they may."""


@dataclass
class Faults:
    """Does random things to the site, one at a time, and undoes them."""

    site: ChaosSite
    chance: random.Random
    done: Counter[str] = field(default_factory=Counter[str])

    def one(self) -> None:
        """A fault from its beginning to its end; every process is ready after it."""
        kinds: Sequence[Callable[[], str]] = (
            self._kill,
            self._kill,
            self._stop,
            self._end,
            self._cut_off,
            self._transfers,
            self._corrupt,
            self._nats,
            self._database,
        )
        self.done[self.chance.choice(kinds)()] += 1
        wait_for(self.site.ready, READY_LIMIT_S, "every process is ready again")

    def rest(self, span_s: tuple[float, float]) -> None:
        time.sleep(self.chance.uniform(*span_s))

    def _name(self) -> str:
        return f"{self.chance.choice(ROLES)}-{self.chance.randrange(2)}"

    def _kill(self) -> str:
        name = self._name()
        self.site.kill(name)
        self.rest((0.5, 5.0))
        self.site.restart(name)
        return f"kill -9 of a {name[:-2]}"

    def _stop(self) -> str:
        name = self._name()
        self.site.stop(name)
        self.rest(FAULT_S)
        self.site.go_on(name)
        return f"stop of a {name[:-2]}"

    def _end(self) -> str:
        name = self._name()
        self.site.cluster[name].send(signal.SIGTERM)
        self.site.cluster[name].wait(60)
        self.site.restart(name)
        return f"orderly restart of a {name[:-2]}"

    def _under(self, links: Sequence[Link], weather: Weather) -> None:
        for link in links:
            link.set(weather)
        self.rest(FAULT_S)
        for link in links:
            link.set(CLEAR)

    def _cut_off(self) -> str:
        host = self.chance.randrange(2)
        ends = [n for n in self.site.cluster.to_nats if n.endswith(f"-{host}")]
        self._under([self.site.cluster.to_nats[name] for name in ends], SILENT)
        return "a host cut off from NATS"

    def _transfers(self) -> str:
        self._under(list(self.site.cluster.to_transfer.values()), SILENT)
        return "transfers between hosts silent"

    def _corrupt(self) -> str:
        weather = Weather(corrupt=0.2)
        self._under(list(self.site.cluster.to_transfer.values()), weather)
        return "bits flipped in transfers"

    def _nats(self) -> str:
        self.site.cluster.nats.kill()
        self.rest((0.5, 5.0))
        self.site.cluster.nats.start()
        return "kill -9 of nats-server"

    def _database(self) -> str:
        self._under([self.site.to_postgres], SILENT)
        return "PostgreSQL silent"


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
