"""A round of a fault: under load, judged afterwards, written down."""

import functools
import json
import os
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tests.chaos.load import Allowed, Ledger, judge
from tests.chaos.site import ChaosSite
from tests.chaos.truth import wait_true
from tests.e2e.fault_rounds import Question
from tests.e2e.oracle.reference import Oracle

RESULTS = "CHAOS_RESULTS"
WARM = 8
"""Answers before a fault, and after it is over."""
WHY = 300
"""Characters of what a red round's line says of its error."""


@functools.cache
def oracle_of(model: Path) -> Oracle:
    return Oracle(model)


@dataclass
class Deed:
    """What is being done, and what was seen; filled in as it goes."""

    row: str
    done: str
    times: int = 0
    seen: list[str] = field(default_factory=list[str])

    def did(self, times: int = 1) -> None:
        """The fault was brought about once more."""
        self.times += times

    def saw(self, what: str) -> None:
        self.seen.append(what)


@dataclass
class Round(Deed):
    """One under load."""

    load: Ledger = field(kw_only=True)


@contextmanager
def noted(row: str, done: str) -> Generator[Deed]:
    """A deed of which a line is kept, green or red, however the block ends."""
    with _noted(Deed(row, done), list[str]) as one:
        yield one


@contextmanager
def _noted(one: Deed, more: Callable[[], list[str]]) -> Generator[Deed]:
    """``more`` is said of it if it is red."""
    began_s = time.monotonic()
    try:
        yield one
    except KeyboardInterrupt:  # says nothing of the round
        raise
    except BaseException as error:
        why = [repr(error)[:WHY], *more()]
        note(one, why, time.monotonic() - began_s, "red")
        raise
    note(one, one.seen, time.monotonic() - began_s, "green")


@contextmanager
def disturbed(
    site: ChaosSite,
    asked: Sequence[Question],
    row: str,
    done: str,
    allowed: Allowed | None = None,
    threads: int = 3,
) -> Generator[Round]:
    """Load before, during and after what the block does; then all must be well.

    Every request ended once and right (or as ``allowed``), every process is ready,
    nothing is held for any request anywhere, and all conductors know what the stores
    have.
    """
    load = Ledger(site, asked, threads)
    one = Round(row, done, load=load)
    with _noted(one, lambda: [load.seen()]):
        try:
            with load:
                load.answered(WARM)
                yield one
                load.answered(WARM)
            oracle = functools.partial(oracle_of, site.model_folder)
            wrong = judge(load.entries, allowed or Allowed(), oracle)
            assert not wrong, wrong
            site.wait_whole()
            wait_true(site)
            one.saw(load.seen())
        except BaseException:
            site.undo()
            raise


def note(one: Deed, seen: Sequence[str], took_s: float, colour: str) -> None:
    """Append a line to the file of results, if there is one."""
    path = os.environ.get(RESULTS)
    if not path:
        return
    line = {
        "row": one.row,
        "done": one.done,
        "times": one.times,
        "seen": "; ".join(seen),
        "took_s": round(took_s, 1),
        "result": colour,
        "commit": commit(),
        "on": datetime.now(UTC).date().isoformat(),
    }
    with Path(path).open("a") as file:
        file.write(json.dumps(line) + "\n")


@functools.cache
def commit() -> str:
    """The commit that is tested; a plus says that files were changed since."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always"]
    told = subprocess.run(
        [*words, "--dirty=+", "--abbrev=9"], capture_output=True, text=True, check=False
    )
    return told.stdout.strip() or "unknown"
