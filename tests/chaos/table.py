"""``python -m tests.chaos.table``: the table of faults in docs/reliability.md.

Made from ``ops/bench/results/chaos.jsonl``, which `make chaos` appends a line to for each
round. Rounds of one kind are one line of the table: how often it was done, in how many
rounds, what the last one saw, and at which commits.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "ops" / "bench" / "results" / "chaos.jsonl"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN = "<!-- made by python -m tests.chaos.table -->"
END = "<!-- end of what is made -->"


@dataclass(frozen=True, slots=True)
class Kind:
    """Rounds of one kind, the oldest first."""

    row: str
    done: str
    rounds: Sequence[dict[str, Any]]

    @property
    def green_in_a_row(self) -> int:
        count = 0
        for each in reversed(self.rounds):
            if each["result"] != "green":
                break
            count += 1
        return count

    @property
    def line(self) -> str:
        green = [each for each in self.rounds if each["result"] == "green"]
        reds = len(self.rounds) - len(green)
        last = (green or self.rounds)[-1]
        times = sum(each["times"] for each in green)
        seen = last["seen"].replace("|", "/") if green else "not yet green"
        rounds = f"{self.green_in_a_row} in a row"
        if reds:
            rounds += (
                f" ({reds} red before)" if self.green_in_a_row else f" ({reds} red)"
            )
        cells = (self.row, self.done, str(times), rounds, seen, last["commit"])
        return f"| {' | '.join(cells)} |"


def kinds(lines: Iterable[str]) -> Iterator[Kind]:
    """In the order of the rows."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for line in lines:
        one: dict[str, Any] = json.loads(line)
        if not one["times"] and one["result"] == "green":  # nothing came about
            continue
        found.setdefault((int(one["row"][1:]), one["done"]), []).append(one)
    for (number, done), rounds in sorted(found.items(), key=lambda item: item[0]):
        yield Kind(f"F{number}", done, rounds)


def table(lines: Iterable[str]) -> str:
    """The lines of the table, as Markdown."""
    head = "| row | what was done | how often | green rounds | what was seen | commit |"
    return "\n".join(
        (head, "|---|---|---|---|---|---|", *(k.line for k in kinds(lines)))
    )


def written(page: str, made: str) -> str:
    """The page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def main() -> None:
    made = table(RESULTS.read_text().splitlines())
    PAGE.write_text(written(PAGE.read_text(), made))
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}: {len(made.splitlines()) - 2} lines\n")


if __name__ == "__main__":
    main()
