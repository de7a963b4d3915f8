"""What a person sees: a small live table in a terminal, plain lines elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvtide.cli.supervisor.machine import Phase

_COLOURS = {
    Phase.READY: "green",
    Phase.STARTING: "yellow",
    Phase.BACKOFF: "red",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One process in the status."""

    name: str
    phase: Phase
    state: str
    pid: int | None
    address: str
    restarts: int
    uptime_s: float


class Screen(Protocol):
    """Where the supervisor speaks."""

    def say(self, text: str, *, bad: bool = False) -> None:
        """A line that stays."""
        ...

    def quote(self, lines: Sequence[str]) -> None:
        """Lines of a log, shown as such."""
        ...

    def show(self, rows: Sequence[Row], cluster: str) -> None:
        """The status now; called often. ``cluster`` is a line on load and cache."""
        ...


class PlainScreen:
    """Lines only, for pipes and service managers: no table, only what changes."""

    def __init__(self, console: Console) -> None:
        """Write to ``console``."""
        self._console = console
        self._told: set[str] = set()

    def say(self, text: str, *, bad: bool = False) -> None:
        """See ``Screen.say``."""
        style = "red" if bad else None
        self._console.print(
            text, style=style, markup=False, highlight=False, soft_wrap=True
        )

    def quote(self, lines: Sequence[str]) -> None:
        """See ``Screen.quote``."""
        for line in lines:
            self.say(f"  | {line}")

    def show(self, rows: Sequence[Row], cluster: str) -> None:  # noqa: ARG002
        """Tell of each process when it gets ready for the first time."""
        for row in rows:
            if row.phase is Phase.READY and row.name not in self._told:
                self._told.add(row.name)
                self.say(f"{row.name} is ready at {row.address}")

    def __enter__(self) -> Self:
        """Nothing to set up."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing to put back."""


class LiveScreen(PlainScreen):
    """Lines that scroll, and below them a table that stays and moves."""

    def __init__(self, console: Console) -> None:
        """The table appears with the first ``show``."""
        super().__init__(console)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._shown: tuple[tuple[str, ...], ...] = ()

    def show(self, rows: Sequence[Row], cluster: str) -> None:
        """Draw the table anew, if a person would see a difference."""
        cells = (*map(_cells, rows), (cluster,))
        if cells != self._shown:
            self._shown = cells
            self._live.update(Group(_table(rows), Text(cluster)), refresh=True)

    def __enter__(self) -> Self:
        """Take the last lines of the terminal."""
        self._live.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the terminal back as it was."""
        self._live.stop()


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("process", "state", "pid", "address", "restarts", "up"):
        table.add_column(title, justify="left", no_wrap=True)
    for row in rows:
        name, state, *others = map(escape, _cells(row))
        colour = _COLOURS.get(row.phase, "dim")
        table.add_row(name, f"[{colour}]{state}[/]", *others)
    return table


def _cells(row: Row) -> tuple[str, ...]:
    state = row.phase.value
    if row.state and row.phase is Phase.STARTING:
        state += f": {row.state}"
    return (
        row.name,
        state,
        str(row.pid or ""),
        row.address,
        str(row.restarts or ""),
        _duration(row.uptime_s) if row.pid else "",
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def open_screen(console: Console) -> PlainScreen:
    """The live one in a terminal, the plain one elsewhere."""
    return LiveScreen(console) if console.is_terminal else PlainScreen(console)
