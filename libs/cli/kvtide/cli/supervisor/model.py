"""Makes the model ready before any process starts, with a progress bar."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
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
from kvtide.engine.hub import fetch_from_hub
from kvtide.engine.progress import ProgressReport
from kvtide.engine.settings import DEMO
from kvtide.runtime import ConfigError

_BYTES = ("B", "bytes", "byte")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that is on this machine.

    Workers load ``source``; the gateway reads ``folder`` and tells clients ``name``,
    which is what workers call it, too.
    """

    source: str
    folder: Path
    name: str


def prepare_model(settings: UpSettings, console: Console) -> PreparedModel:
    """Have the model's files here: the demo's are made, a hub id's are fetched.

    Whether it can be served is for the workers to say.

    Raises:
        ConfigError: neither a folder nor a hub id.
        EngineError: it can't be downloaded, verified or written.
    """
    if settings.model == DEMO:
        with _bar(console) as bar:
            folder = ensure_demo_model(settings.cache_dir, bar.show)
        return PreparedModel(str(folder), folder, folder.name)
    folder = Path(settings.model).expanduser()
    if folder.suffix == ".gguf" and folder.is_file():
        # its libraries take seconds to import
        from kvtide.engine.gguf_folder import ensure_gguf_folder  # noqa: PLC0415

        with console.status(f"model: reading {folder.name}"):
            made = ensure_gguf_folder(folder, settings.cache_dir)
        return PreparedModel(str(folder.resolve()), made, folder.stem)
    if folder.is_dir():
        # processes start elsewhere
        folder = folder.resolve()
        return PreparedModel(str(folder), folder, folder.name)
    if not _HUB_ID.fullmatch(settings.model):
        message = (
            f"model {settings.model!r}: no such folder, and no hub id (OWNER/NAME)"
        )
        raise ConfigError(message, key="model")
    with console.status(f"model: fetching {settings.model} from the hub"):
        folder = fetch_from_hub(settings.model, settings.cache_dir)
    return PreparedModel(settings.model, folder, settings.model)


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
