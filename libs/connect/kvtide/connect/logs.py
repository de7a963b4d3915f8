"""Where a connector's log events go inside an engine's process."""

import structlog


def log_beside_the_engine(level: str) -> None:
    """Send events to ``logging``, which the engine has set up; once in a process.

    A process that has configured structlog keeps its own way.
    """
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
