"""The tracer of a process, as its settings want it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from kvtide.runtime.errors import ConfigError
from kvtide.runtime.settings import RoleSettings
from kvtide.runtime.tracing import NO_TRACES, Tracer


@asynccontextmanager
async def open_tracer(settings: RoleSettings, service: str) -> AsyncGenerator[Tracer]:
    """A tracer as the settings want it; what waits is sent at the end.

    Raises:
        ConfigError: traces are wanted, and OpenTelemetry is not installed.
    """
    if not settings.otlp:
        yield NO_TRACES
        return
    try:
        # hundreds of milliseconds and an extra: only for those who want it
        from kvtide.runtime.otlp import OtlpTracer  # noqa: PLC0415
    except ImportError as error:
        reason = "traces need OpenTelemetry: pip install 'kvtide[otel]'"
        raise ConfigError(reason, key="otlp") from error
    tracer = OtlpTracer(
        settings.otlp,
        service=service,
        node=settings.node,
        cluster=settings.cluster,
        share=settings.trace_share,
    )
    try:
        yield tracer
    finally:
        await tracer.aclose()
