"""``python -m kvtide.sim [--trouble NAME] [--seeds FIRST:LAST]``: simulate, and judge.

Prints a line for each seed and what is wrong with it; ends with 1 if anything is. The
same seed fails the same way with the same ``PYTHONHASHSEED``.
"""

import argparse
import logging
import sys

import structlog

from kvtide.gateway.life import Finish
from kvtide.sim.scenario import Report, Scenario
from kvtide.sim.troubles import TROUBLES


def line_of(name: str, report: Report) -> str:
    """One simulation in one line."""
    ends = [end for answer in report.answers for end in answer.ends]
    finished = sum(isinstance(end, Finish) for end in ends)
    verdict = "WRONG" if report.violations else "ok"
    return (
        f"{name} seed {report.seed}: {verdict}, {finished} finished, "
        f"{len(ends) - finished} failed, {report.messages} messages"
    )


def main(arguments: list[str]) -> int:
    """Run; the number is the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvtide.sim", description=__doc__)
    parser.add_argument("--trouble", choices=sorted(TROUBLES), action="append")
    parser.add_argument("--seeds", default="1:10", help="FIRST:LAST, both included")
    options = parser.parse_args(arguments)
    first, _, last = options.seeds.partition(":")
    quiet = structlog.make_filtering_bound_logger(logging.CRITICAL)
    structlog.configure(wrapper_class=quiet)
    wrong = 0
    for name in options.trouble or sorted(TROUBLES):
        for seed in range(int(first), int(last or first) + 1):
            report = Scenario(seed, TROUBLES[name]).run()
            sys.stdout.write(f"{line_of(name, report)}\n")
            if report.violations:
                wrong += 1
                sys.stdout.write(f"{report.summary()}\n")
            sys.stdout.flush()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
