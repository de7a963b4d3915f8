"""Exit codes: what a service manager, or the supervisor, may conclude from an end."""

from collections.abc import Callable

import typer
from rich.console import Console

from kvtide.runtime import ConfigError, KvtideError

CLEAN = 0
FAILED = 1
BAD_SETTINGS = 2
"""Trying again without a change is pointless."""

TEMPORARY = 75
"""Something outside was not there; trying again may help."""

INTERRUPTED = 130


def exit_code(work: Callable[[], int], console: Console) -> int:
    """Run ``work``; foreseen errors become one clear line on ``console`` and a code."""
    try:
        return work()
    except ConfigError as error:
        _say(console, str(error))
        return BAD_SETTINGS
    except (KvtideError, OSError) as error:
        _say(console, str(error) or type(error).__name__)
        return TEMPORARY
    except KeyboardInterrupt:
        _say(console, "interrupted")
        return INTERRUPTED


def _say(console: Console, text: str) -> None:
    console.print(f"error: {text}", markup=False, highlight=False, soft_wrap=True)


def leave(work: Callable[[Console], int | None]) -> None:
    """Run a command's work and end the process with its code.

    Raises:
        typer.Exit: always; it carries the code.
    """
    from kvtide.runtime.logs import configure_logging  # noqa: PLC0415

    # what libraries log is for roles, which set this up anew; here it is noise
    configure_logging(level="error")
    code = exit_code(lambda: work(Console()) or CLEAN, Console(stderr=True))
    raise typer.Exit(code)
