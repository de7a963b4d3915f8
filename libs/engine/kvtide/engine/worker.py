"""What every worker process needs to have an engine: settings and the way to load."""

from pathlib import Path

import structlog
import torch

from kvtide.engine.demo import ensure_demo_model
from kvtide.engine.loading import LoadedModel, load_model
from kvtide.engine.progress import ProgressReport
from kvtide.engine.settings import DEMO, WorkerSettings
from kvtide.engine.thread import EngineThread

log = structlog.get_logger("kvtide.engine")


def engine_of(
    settings: WorkerSettings, loaded: LoadedModel | None = None
) -> EngineThread:
    """An engine thread for the model of these settings.

    ``loaded`` is what ``read_model`` made of them earlier in this process; it belongs to
    the engine then. None: the thread loads it.
    """

    def load() -> LoadedModel:
        if loaded is None:
            return read_model(settings)
        if settings.threads:
            # the number of compute threads is each thread's own
            torch.set_num_threads(settings.threads)
        return loaded

    return EngineThread(load, LoadedModel.close)


def read_model(settings: WorkerSettings) -> LoadedModel:
    """Load the model of these settings; blocking.

    Raises:
        EngineError: see ``load_model``.
    """
    report = _Progress()
    cache_dir = settings.cache_dir.expanduser()
    source: str | Path = settings.model
    if settings.model == DEMO:
        source = ensure_demo_model(cache_dir, report)
    return load_model(
        source,
        threads=settings.threads or None,
        cache_dir=cache_dir,
        dtype=settings.dtype,
        device=settings.device,
        progress=report,
    )


class _Progress:
    """Logs each stage of loading once at its begin, and its quarters."""

    def __init__(self) -> None:
        self._said: tuple[str, int] = ("", -1)

    def __call__(self, report: ProgressReport) -> None:
        quarter = 4 * report.done // report.total if report.total else 0
        if (report.stage, quarter) == self._said:
            return
        self._said = (report.stage, quarter)
        log.info(
            "loading model",
            stage=report.stage,
            done=report.done,
            total=report.total,
            unit=report.unit,
            what=report.message,
        )
