"""Metrics of one process: a registry that is passed in, and how it is written out."""

import asyncio
import platform
from collections.abc import Iterable
from importlib import metadata

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
    0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""Buckets that suit both a message and a long prompt."""


def version() -> str:
    """The installed version of kvtide."""
    try:
        return metadata.version("kvtide")
    except metadata.PackageNotFoundError:
        return "unknown"


class TaskCollector(Collector):
    """``kvtide_tasks``: coroutines of an event loop; scraped from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    @override
    def collect(self) -> Iterable[Metric]:
        tasks = len(asyncio.all_tasks(self._loop))
        yield GaugeMetricFamily(
            "kvtide_tasks", "coroutines that run or wait", value=tasks
        )


def new_registry(
    *, role: str, node: str, loop: asyncio.AbstractEventLoop | None = None
) -> CollectorRegistry:
    """A registry with the process's own figures and ``kvtide_build_info``.

    With a loop, its tasks are counted too.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    if loop is not None:
        registry.register(TaskCollector(loop))
    build = Gauge(
        "kvtide_build_info",
        "Always 1; the labels say what runs here.",
        ("version", "python", "role", "node"),
        registry=registry,
    )
    build.labels(version(), platform.python_version(), role, node).set(1)
    return registry


def exposition(registry: CollectorRegistry) -> tuple[str, bytes]:
    """The content type and body of a scrape."""
    return CONTENT_TYPE_LATEST, generate_latest(registry)
