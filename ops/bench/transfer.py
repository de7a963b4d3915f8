r"""Transfers against this machine's limits, and against what others use.

    .venv/bin/python ops/bench/transfer.py                        # ours and the limits
    .venv/bin/python ops/bench/transfer.py --gloo \\
        --mooncake PYTHON --out ops/bench/results                 # and others

PYTHON is that of a virtual environment with mooncake-transfer-engine-non-cuda and
numpy. Everything is measured in rounds, each of which runs all candidates, so that a
ratio is taken within one run; a figure is the median of its rounds. Verification is
on: every byte of ours is hashed at both ends. Leave the machine alone meanwhile.

Writes transfer.json (figures, machine, versions), transfer.md and transfer.svg.
"""

import argparse
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from kvtide.transfer import bench
from kvtide.transfer.bench_figures import Figure, size_text, table
from kvtide.transfer.bench_report import as_json, plot, this_machine

HERE = Path(__file__).parent
LONGEST_ROUND_S = 300


@dataclass(frozen=True, slots=True)
class Other:
    """A library beside ours: its python and the script that measures it."""

    name: str
    python: str
    script: Path
    distribution: str

    def version(self) -> str:
        """Of what is measured, as its python has it installed."""
        ask = f"from importlib.metadata import version as v; print(v({self.distribution!r}))"
        done = subprocess.run(  # noqa: S603
            [self.python, "-c", ask],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout.strip() or "not installed"

    def measure(self, sizes: list[int], seconds: float) -> list[Figure]:
        """One round; a line of the script's is: =, operation, bytes, GB/s."""
        command = [self.python, str(self.script), str(seconds), *map(str, sizes)]
        try:
            done = subprocess.run(  # noqa: S603
                command,
                capture_output=True,
                text=True,
                timeout=LONGEST_ROUND_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(f"{self.name} took over {LONGEST_ROUND_S} s", file=sys.stderr)
            return []
        found = [line.split() for line in done.stdout.splitlines() if line[:1] == "="]
        if done.returncode or not found:
            print(f"{self.name} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return [
            Figure(
                f"{self.name} {operation} {size_text(int(size))}",
                self.name,
                operation,
                int(size),
                float(rate),
                "GB/s",
            )
            for _, operation, size, rate in found
        ]


def medians(rounds: list[list[Figure]]) -> list[Figure]:
    """One figure for each name, its ratio taken anew from the medians."""
    by_name: dict[str, list[Figure]] = {}
    for each in rounds:
        for figure in each:
            by_name.setdefault(figure.name, []).append(figure)
    values = {
        name: statistics.median(figure.value for figure in found)
        for name, found in by_name.items()
    }
    return [
        replace(
            found[0],
            value=values[name],
            ratio=values[name] / values[found[0].limit]
            if found[0].limit in values
            else None,
        )
        for name, found in by_name.items()
    ]


def against(figures: list[Figure], others: list[Other]) -> list[str]:
    """Our reads and writes as multiples of the others'."""
    values = {figure.name: figure.value for figure in figures}
    lines: list[str] = []
    for other in others:
        for figure in figures:
            if figure.transport != other.name:
                continue
            end = f"{figure.operation} {size_text(figure.nbytes)}"
            ours = values.get(f"tcp {end}")
            if ours is not None and figure.value:
                ratio = ours / figure.value
                lines.append(f"tcp {end} is {ratio:.2f} of {other.name}'s")
    return lines


def commit() -> str:
    """What was measured; with "+" where the tree had changes."""
    words = ["git", "-C", str(HERE), "describe", "--always", "--dirty=+"]
    done = subprocess.run(  # noqa: S603
        words, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(".")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=0.4, help="a candidate, a round"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=list(bench.SIZES))
    parser.add_argument(
        "--gloo", action="store_true", help="torch.distributed's gloo too"
    )
    parser.add_argument("--mooncake", metavar="PYTHON", help="Mooncake's engine too")
    parser.add_argument("--out", type=Path, help="folder for the results")
    options = parser.parse_args()
    others: list[Other] = []
    if options.mooncake:
        script = HERE / "transfer_mooncake.py"
        name = "mooncake-transfer-engine-non-cuda"
        others.append(Other("mooncake", options.mooncake, script, name))
    if options.gloo:
        script = HERE / "transfer_gloo.py"
        others.append(Other("gloo", sys.executable, script, "torch"))
    rounds: list[list[Figure]] = []
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        ours = bench.run(sizes=options.sizes, rounds=1, seconds=options.seconds)
        for other in others:
            ours += other.measure(options.sizes, options.seconds)
        rounds.append(ours)
    figures = medians(rounds)
    text = table(figures)
    if lines := against(figures, others):
        text += "\n\n" + "\n".join(f"- {line}" for line in lines)
    here = this_machine()
    versions = {each.distribution: each.version() for each in others}
    versions["kvtide, commit"] = commit()
    text += f"\n\n{here}\n\n"
    text += ", ".join(f"{name} {version}" for name, version in versions.items())
    text += f"\n\nmedians of {options.rounds} rounds of {options.seconds:g} s each"
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "transfer.json").write_text(
            as_json(figures, here, versions) + "\n"
        )
        (options.out / "transfer.md").write_text(text + "\n")
        (options.out / "transfer.svg").write_text(plot(figures) + "\n")


if __name__ == "__main__":
    main()
