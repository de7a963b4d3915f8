"""``python -m kvtide.sim``: simulate, and judge.

Prints a line for each seed and what is wrong with it; ends with 1 if anything is. The
seed and the number of questions alone decide what happens: the line under a failure
replays it exactly.
"""

import argparse
import logging
import random
import sys
from collections.abc import Iterator

import structlog

from kvtide.gateway.life import Finish
from kvtide.runtime import SystemClock
from kvtide.sim.scenario import QUESTIONS, Report, Scenario
from kvtide.sim.troubles import TROUBLES, drawn

_DRAWN = "drawn"
_LARGEST_SEED = 2**31


def line_of(name: str, report: Report) -> str:
    """One simulation in one line."""
    ends = [end for answer in report.answers for end in answer.ends]
    finished = sum(isinstance(end, Finish) for end in ends)
    verdict = "WRONG" if report.violations else "ok"
    return (
        f"{name} seed {report.seed}: {verdict}, {finished} finished, "
        f"{len(ends) - finished} failed, {report.messages} messages"
    )


def replay_of(name: str, seed: int, questions: int = QUESTIONS) -> str:
    """The command that simulates this again."""
    asked = "" if questions == QUESTIONS else f" --questions {questions}"
    return f"python -m kvtide.sim --trouble {name} --seeds {seed}{asked}"


def scenario(name: str, seed: int, questions: int = QUESTIONS) -> Scenario:
    """The simulation of that name and seed; ``drawn`` is a mixture of everything."""
    if name == _DRAWN:
        return drawn(seed, questions=questions)
    return Scenario(seed, TROUBLES[name], questions=questions)


def _seeds(text: str) -> range:
    first, _, last = text.partition(":")
    try:
        return range(int(first), int(last or first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: 7, or 7:9 for 7, 8 and 9") from None


def _soak_seeds(seconds: float) -> Iterator[int]:
    clock, draw = SystemClock(), random.SystemRandom()
    end_s = clock.monotonic() + seconds
    while clock.monotonic() < end_s:
        yield draw.randrange(_LARGEST_SEED)


def main(arguments: list[str]) -> int:
    """Run; the number is the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvtide.sim", description=__doc__)
    names = [_DRAWN, *sorted(TROUBLES)]
    parser.add_argument("--trouble", choices=names, action="append")
    parser.add_argument(
        "--seeds", type=_seeds, default="1:10", help="FIRST:LAST, both included"
    )
    parser.add_argument(
        "--soak", type=float, metavar="SECONDS", help="mixtures of random seeds"
    )
    parser.add_argument(
        "--questions", type=int, default=QUESTIONS, help="requests in each simulation"
    )
    options = parser.parse_args(arguments)
    quiet = structlog.make_filtering_bound_logger(logging.CRITICAL)
    structlog.configure(wrapper_class=quiet)
    if options.soak is not None:
        return _run([_DRAWN], _soak_seeds(options.soak), options.questions)
    return _run(options.trouble or names[1:], options.seeds, options.questions)


def _run(names: list[str], seeds: range | Iterator[int], questions: int) -> int:
    runs = wrong = 0
    for seed in seeds:
        for name in names:
            report = scenario(name, seed, questions).run()
            sys.stdout.write(f"{line_of(name, report)}\n")
            if report.violations:
                wrong += 1
                again = replay_of(name, seed, questions)
                sys.stdout.write(f"{report.summary()}\nto see it again: {again}\n")
            sys.stdout.flush()
            runs += 1
    sys.stdout.write(f"{runs} simulations, {wrong} wrong\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
