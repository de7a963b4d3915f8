"""Logs are events with fields. Only a process's ``main`` configures them.

Everywhere else: ``structlog.get_logger()`` and ``log.info("placed", request=…)``.
Prompts are never logged: a field that could hold one is replaced by its length. What
other libraries log through ``logging`` comes out in the same form. Passwords in URLs are
hidden in whole lines, tracebacks and other libraries' messages included.
"""

import contextlib
import logging
import sys
from collections.abc import Generator, MutableMapping, Sized
from typing import Any, TextIO, cast

import structlog

from kvtide.runtime.settings import HIDDEN, hide_passwords, is_secret_name

_PROMPT_FIELDS = frozenset(
    {"prompt", "messages", "content", "text", "tokens", "ids", "body", "completion"}
)
_CHATTY = ("nats", "uvicorn.access", "httpx", "asyncio", "aiosqlite")

Event = MutableMapping[str, Any]


def configure_logging(
    *,
    level: str = "info",
    log_format: str = "console",
    node: str = "",
    stream: TextIO | None = None,
) -> None:
    """Send every log event of this process to ``stream`` (stderr) from ``level`` on.

    ``log_format`` is ``console`` (for people) or ``json`` (an object a line). ``node``
    goes with every event.
    """
    output: TextIO = sys.stderr if stream is None else stream
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _with_node(node),
        _redact,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    renderer: list[structlog.typing.Processor] = (
        [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ]
        if log_format == "json"
        else [
            structlog.dev.ConsoleRenderer(
                colors=output.isatty(),
                pad_event_to=0,
                # the default shows local variables: prompts and secrets among them, and
                # it takes so long that a busy node misses its beats
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *renderer,
                _hide_in_line,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))


@contextlib.contextmanager
def request_context(request: str) -> Generator[None]:
    """Every event logged within carries ``request``."""
    with structlog.contextvars.bound_contextvars(request=request):
        yield


def _with_node(node: str) -> structlog.typing.Processor:
    def add(_logger: Any, _method: str, event: Event) -> Event:
        if node:
            event.setdefault("node", node)
        return event

    return add


def _redact(_logger: Any, _method: str, event: Event) -> Event:
    for key, value in event.items():
        if key == "event":
            continue
        if is_secret_name(key):
            event[key] = HIDDEN
        elif key in _PROMPT_FIELDS and isinstance(value, (str, bytes, list, tuple)):
            event[key] = f"<{len(cast('Sized', value))}>"
    return event


def _hide_in_line(_logger: Any, _method: str, line: Any) -> Any:
    """The last step: a URL may be in a message, a traceback or within a field's value."""
    return hide_passwords(line) if "://" in line else line
