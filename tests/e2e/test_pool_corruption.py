"""Blocks of the real system that are not what they seem, and disks that fail under it.

Whatever lies in the pool, a client gets the right answer: a bad copy is a miss, is
counted and goes, and serving needs no disk.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.oracle.reference import Oracle
from tests.e2e.system import Answer, System, wait_for

from kvtide.engine.demo import default_cache_dir, ensure_demo_model
from kvtide.kv.header import MAGIC

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(300)]

BLOCK = 64
BLOCKS = 4
FRESH = 40_000
DISK = "ssd"
"""Where in the state folder the SSD tiers are."""


@dataclass(frozen=True, slots=True)
class Image:
    """A keyed block's bytes as they lie in a file."""

    file: Path
    start: int
    length: int
    key: bytes


def images(files: Iterator[Path]) -> list[Image]:
    """All keyed blocks in these files, by their headers."""
    found: list[Image] = []
    for file in files:
        content = file.read_bytes()
        at = content.find(MAGIC)
        while at >= 0:
            key = content[at + 24 : at + 40]
            length = int.from_bytes(content[at + 88 : at + 96], "little")
            if any(key) and 0 < length <= len(content) - at:
                found.append(Image(file, at, length, key))
            at = content.find(MAGIC, at + 1)
    return found


def swap(one: Image, other: Image) -> None:
    """Exchange their bytes, headers and all."""
    assert one.length == other.length
    held: list[bytes] = []
    for image in (one, other):
        with image.file.open("r+b") as file, mmap(file.fileno(), 0) as memory:
            held.append(memory[image.start : image.start + image.length])
    for image, content in ((one, held[1]), (other, held[0])):
        with image.file.open("r+b") as file, mmap(file.fileno(), 0) as memory:
            memory[image.start : image.start + image.length] = content
            memory.flush()


def swap_all(found: list[Image]) -> int:
    """Each with its neighbour; how many were moved."""
    ordered = sorted(found, key=lambda image: image.key)
    pairs = list(zip(ordered[::2], ordered[1::2], strict=False))
    for one, other in pairs:
        swap(one, other)
    return 2 * len(pairs)


def loads(system: System) -> dict[str, Any]:
    """What the store last said of itself."""
    found = [
        load
        for node in system.status()["nodes"]
        for load in node["beat"]["load"]
        if load["t"] == "store"
    ]
    return found[0] if found else {}


def counted(system: System, start: str, *words: str) -> float:
    """The sum of a metric over all nodes, of the lines with these words."""
    total = 0.0
    for beat in system.beats().values():
        for line in system.fetch(f"{beat['http']}/metrics").splitlines():
            if line.startswith(start) and all(word in line for word in words):
                total += float(line.rpartition(" ")[2])
    return total


def corrupt_gone(system: System) -> int:
    """Copies that the catalog says went because their bytes were wrong."""
    removals = system.http.get("/admin/ui/cache").json()["removals"]
    return sum(each["blocks"] for each in removals if each["reason"] == "corrupt")


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(ensure_demo_model(default_cache_dir()))


def prompts_of(system: System, first: int) -> list[list[int]]:
    return [
        text_tokens(system.tokenize, BLOCKS * BLOCK + 5, first + 900 * number)
        for number in range(2)
    ]


def ask(system: System, oracle: Oracle, prompt: list[int]) -> Answer:
    """An answer that is right."""
    answer = system.complete(prompt, 8, ignore_eos=True)
    verdict = oracle.check(prompt, list(answer.ids))
    assert verdict.right, verdict.mismatch
    return answer


def test_two_blocks_swapped_in_dram_are_misses(tmp_path: Path, oracle: Oracle) -> None:
    with System(tmp_path / "state", "--dram", "256MiB", "--ssd", "0") as system:
        prompts = prompts_of(system, 500)
        for prompt in prompts:
            assert ask(system, oracle, prompt).cached_tokens == 0
        warm = ask(system, oracle, prompts[0])
        assert warm.cached_tokens == BLOCKS * BLOCK
        system.wait_idle("store-0")
        found = images(p for p in system.shm_dir.rglob("*") if p.is_file())
        assert len({image.key for image in found}) >= 2 * BLOCKS
        assert swap_all(found) >= 2 * BLOCKS
        for prompt in prompts:
            assert ask(system, oracle, prompt).cached_tokens < BLOCKS * BLOCK
        missed = counted(system, "kvtide_pool_reads_total") - counted(
            system, "kvtide_pool_reads_total", 'outcome="ok"'
        )
        assert missed > 0
        # what was recomputed took the place of what was wrong
        for prompt in prompts:
            wait_for(
                lambda prompt=prompt: (
                    ask(system, oracle, prompt).cached_tokens == BLOCKS * BLOCK
                ),
                60,
                "the prefix is cached again",
            )


def test_two_blocks_swapped_on_the_ssd_are_misses(
    tmp_path: Path, oracle: Oracle
) -> None:
    with System(tmp_path / "state", "--dram", "256MiB", "--ssd", "256MiB") as system:
        prompts = prompts_of(system, 500)
        for prompt in prompts:
            ask(system, oracle, prompt)
        wait_for(lambda: loads(system)["ssd_blocks"] >= 2 * BLOCKS, 60, "on the SSD")
        (pid,) = system.pids("store")
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: system.pids("store") not in ([], [pid]), 60, "a new store")
        wait_for(
            lambda: loads(system).get("ssd_blocks", 0) >= 2 * BLOCKS,
            60,
            "its blocks are back",
        )
        wait_for(system.ready, 60, "every role is ready")
        found = images(segments(system))
        assert swap_all(found) >= 2 * BLOCKS
        for prompt in prompts:
            assert ask(system, oracle, prompt).cached_tokens == 0
        assert counted(system, "kvtide_store_ssd_corrupt_total") >= 2
        wait_for(lambda: corrupt_gone(system) >= 2, 60, "the catalog says what went")
        for prompt in prompts:
            wait_for(
                lambda prompt=prompt: (
                    ask(system, oracle, prompt).cached_tokens == BLOCKS * BLOCK
                ),
                60,
                "the prefix is cached again",
            )


def segments(system: System) -> Iterator[Path]:
    return system.state.rglob("*.seg")


def run(*command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, check=False)


@contextmanager
def small_disk(path: Path, megabytes: int) -> Generator[Callable[[str], None]]:
    """A file system of its own at ``path``; call it to mount it anew with options."""
    path.mkdir(parents=True)
    size = f"size={megabytes}m"
    if run("mount", "-t", "tmpfs", "-o", size, "tmpfs", str(path)).returncode:
        pytest.skip("this system does not let us mount")

    def remount(options: str) -> None:
        run("mount", "-o", f"remount,{options}", str(path)).check_returncode()

    try:
        yield remount
    finally:
        run("umount", "-l", str(path))


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None,
    reason="mounting needs root and mount",
)
@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_serving_goes_on_without_the_disk(
    tmp_path: Path, oracle: Oracle, trouble: str
) -> None:
    state = tmp_path / "state"
    with (
        small_disk(state / DISK, 256) as remount,
        System(state, "--dram", "64MiB", "--ssd", "256MiB") as system,
    ):
        prompts = prompts_of(system, 500)
        for prompt in prompts:
            ask(system, oracle, prompt)
        wait_for(lambda: loads(system)["ssd_blocks"] >= BLOCKS, 60, "on SSD")
        if trouble == "read-only":
            remount("ro")
        else:
            fill(state / DISK / "filler")

        def out() -> bool:
            number = loads(system)["seq"]
            prompt = text_tokens(system.tokenize, 6 * BLOCK + 1, FRESH + number * 7)
            system.complete(prompt, 1)
            return loads(system)["ssd_state"] in ("read_only", "out")

        wait_for(out, 120, f"the tier says that its disk is {trouble}")
        assert loads(system)["ssd_reason"]
        for prompt in prompts:
            ask(system, oracle, prompt)
        assert ask(system, oracle, prompts[0]).cached_tokens == BLOCKS * BLOCK
        wait_for(lambda: faults(system), 30, "the dashboard tells of it")
        assert system.ready()


def fill(path: Path) -> None:
    """Until there is no room."""
    with path.open("wb") as file:
        free = shutil.disk_usage(path.parent).free
        os.posix_fallocate(file.fileno(), 0, free)


def faults(system: System) -> bool:
    with system.http.stream("GET", "/admin/ui/news") as news:
        first = next(line for line in news.iter_lines() if line.startswith("data:"))
    return "ssd_fault" in first
