"""Makes the model ready before any process starts, with a progress bar."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from kvtide.cli.settings import UpSettings
from kvtide.cli.sizes import size
from kvtide.engine.demo import ensure_demo_model
from kvtide.engine.progress import ProgressReport
from kvtide.engine.settings import DEMO

_BYTES = ("B", "bytes", "byte")


def prepare_model(settings: UpSettings, console: Console) -> str:
    """What workers load: the folder of the demo model, made if it is not there yet.

    A folder or hub id is passed on as it is: workers check it and say what is wrong.

    Raises:
        DemoModelError: it can't be downloaded, verified or written.
    """
    if settings.model != DEMO:
        return _spelt_out(settings.model)
    with _bar(console) as bar:
        return str(ensure_demo_model(settings.cache_dir, bar.show))


def _spelt_out(model: str) -> str:
    """An existing folder as an absolute path, for processes that start elsewhere."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


class _Bar:
    """One bar for each stage, shown when the first report comes."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._console = console
        self._tasks: dict[str, TaskID] = {}

    def show(self, report: ProgressReport) -> None:
        total = report.total or None
        if report.stage not in self._tasks:
            self._tasks[report.stage] = self._progress.add_task(
                report.stage, total=total, words=""
            )
            if not self._console.is_terminal:
                self._console.print(f"model: {report.message}", markup=False)
        words = report.message
        if total is not None:
            words = f"{_amount(report.done, report.unit)}/{_amount(total, report.unit)}"
        self._progress.update(
            self._tasks[report.stage], completed=report.done, total=total, words=words
        )


def _amount(count: int, unit: str) -> str:
    return size(count) if unit in _BYTES else f"{count} {unit}"


@contextmanager
def _bar(console: Console) -> Generator[_Bar]:
    columns = (
        TextColumn("model: {task.description}"),
        BarColumn(),
        TextColumn("{task.fields[words]}"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        yield _Bar(progress, console)
