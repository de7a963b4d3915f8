"""What each process of a site takes, sampled while it runs; whether any of it leaks."""

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Self

from tests.chaos.site import ChaosSite
from tests.integration.cluster import RoleProcess

FIGURES = ("rss_mib", "descriptors", "threads", "tasks")
SETTLED_S = 60.0
"""A life shorter than this, or its beginning, says nothing of leaks."""
MOST_MORE = {"rss_mib": 96.0, "descriptors": 24.0, "threads": 24.0, "tasks": 24.0}
"""How much the last quarter of a life may lie above its first, at the medians, beside a
tenth of it: caches fill, pools of threads and connections grow to their bounds."""
LEAST = 8
"""Samples of a life below which it is not judged."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one life of a process took at a moment of the run."""

    at_s: float
    name: str
    pid: int
    rss_mib: float
    descriptors: int
    threads: int
    tasks: int | None


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def sampled(process: RoleProcess, at_s: float) -> Sample | None:
    """None: it is not there."""
    if not process.alive:
        return None
    pid = process.pid
    try:
        rss_mib = round(resident_mib(pid), 1)
        threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
        files = descriptors(pid)
    except OSError:
        return None
    try:
        tasks = process.metrics().get("kvtide_tasks")
    except (OSError, HTTPException):  # stopped, not there yet, or killed meanwhile
        tasks = None
    told = None if tasks is None else int(tasks)
    return Sample(round(at_s, 1), process.name, pid, rss_mib, files, threads, told)


class Watch:
    """Samples every process every few seconds until the block ends."""

    def __init__(self, site: ChaosSite, every_s: float) -> None:
        self.samples: list[Sample] = []
        self._site = site
        self._every_s = every_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._began_s = time.monotonic()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join(120)

    def _run(self) -> None:
        while not self._end.wait(self._every_s):
            for process in list(self._site.cluster.processes.values()):
                sample = sampled(process, time.monotonic() - self._began_s)
                if sample is not None:
                    self.samples.append(sample)


def lives(samples: Sequence[Sample]) -> dict[tuple[str, int], list[Sample]]:
    """Samples by process and its life."""
    found: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.name, sample.pid), []).append(sample)
    return found


def leaks(samples: Sequence[Sample]) -> Iterator[str]:
    """Lives that end with clearly more than they had when they had settled."""
    for (name, pid), life in lives(samples).items():
        settled = [each for each in life if each.at_s >= life[0].at_s + SETTLED_S]
        quarter = len(settled) // 4
        if len(settled) < LEAST:
            continue
        for figure in FIGURES:
            first, last = (
                _median(part, lambda each, f=figure: getattr(each, f))
                for part in (settled[:quarter], settled[-quarter:])
            )
            if first is None or last is None:
                continue
            if last > 1.1 * first + MOST_MORE[figure]:
                yield f"{name} ({pid}): {figure} from {first:.0f} to {last:.0f}"


def _median(
    samples: Sequence[Sample], figure: Callable[[Sample], float | None]
) -> float | None:
    told = [value for each in samples if (value := figure(each)) is not None]
    return statistics.median(told) if told else None
