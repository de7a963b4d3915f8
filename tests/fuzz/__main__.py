"""``make fuzz``: parsers of bytes from outside, fed by what their code does with the bytes.

atheris (libFuzzer) keeps the inputs that reach new code and changes those. Each target has
a process of its own for its share of the time; what it finds (an error that is not the
target's own, an input that takes longer than ten seconds or more than a gigabyte) is
written to ``build/fuzz``, and the command ends with 1. What was learnt stays in
``build/fuzz/NAME`` for the next time.

    python -m tests.fuzz --seconds 600 --only bus
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what is imported before atheris watches is not seen
    from tests.unit.fuzzing import Target

KEPT = Path(__file__).parents[2] / "build" / "fuzz"
ROOM_S = 120
"""Beyond its time, for a target to start and to end."""
LIMITS = ("-timeout=10", "-rss_limit_mb=3072", "-malloc_limit_mb=1024", "-max_len=8192")


def say(line: str) -> None:
    """To whoever waits for it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def all_targets(folder: Path, atheris: Any = None) -> "dict[str, Target]":
    """By name; with atheris, it sees which branches of ours run."""
    watched = atheris.instrument_imports(include=["kvtide"]) if atheris else None
    with watched or nullcontext():
        return import_module("tests.fuzz.targets").all_targets(folder)


def feed_one(name: str, seconds: int) -> None:
    """Feed one target; ends this process."""
    atheris: Any = import_module("atheris")  # `make fuzz` installs it
    corpus = KEPT / name.replace(" ", "_")
    corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        target = all_targets(Path(folder), atheris)[name]
        for number, good in enumerate(target.good):
            target.read(good)
            (corpus / f"good-{number}").write_bytes(good)

        def feed(data: bytes) -> None:
            with suppress(*target.errors):
                target.read(data)

        flags = [*LIMITS, f"-max_total_time={seconds}", "-print_final_stats=1"]
        atheris.Setup(
            [sys.argv[0], *flags, f"-artifact_prefix={corpus}-found-", str(corpus)],
            feed,
        )
        atheris.Fuzz()


def feed_apart(name: str, seconds: int) -> bool:
    """Feed one target in a process of its own; true if nothing was found."""
    command = [sys.executable, "-m", "tests.fuzz", "--one", name]
    command += ["--seconds", str(seconds)]
    try:
        ended = subprocess.run(  # noqa: S603 - ourselves
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=seconds + ROOM_S,
        )
    except subprocess.TimeoutExpired:
        say(f"{name}: hung")
        return False
    said = ended.stdout + ended.stderr
    runs = [line.split()[-1] for line in said.splitlines() if "executed_units" in line]
    say(f"{name}: {runs[0] if runs else 'no'} inputs")
    if ended.returncode:
        say(said[-4000:])
    return not ended.returncode and bool(runs)


def main(arguments: Sequence[str]) -> int:
    """Feed all targets in turn, or one; 0 if nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600, help="of all targets")
    parser.add_argument("--only", help="one target")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        feed_one(given.one, given.seconds)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        names = list(all_targets(Path(folder)))
    if given.only:
        if given.only not in names:
            say(f"no target {given.only}: {', '.join(names)}")
            return 2
        names = [given.only]
    share = max(1, given.seconds // len(names))
    found = [name for name in names if not feed_apart(name, share)]
    say(f"{len(names)} targets, {share} s each; found something: {found or 'nothing'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
