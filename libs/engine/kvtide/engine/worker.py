"""What every worker process needs to have an engine: settings and the way to load."""

from pathlib import Path

import structlog

from kvtide.engine.demo import ensure_demo_model
from kvtide.engine.loading import LoadedModel, load_model
from kvtide.engine.progress import ProgressReport
from kvtide.engine.settings import DEMO, WorkerSettings
from kvtide.engine.thread import EngineThread

log = structlog.get_logger("kvtide.engine")


def engine_of(settings: WorkerSettings) -> EngineThread:
    """An engine thread that will load the model of these settings."""

    def load() -> LoadedModel:
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

    return EngineThread(load, LoadedModel.close)


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
