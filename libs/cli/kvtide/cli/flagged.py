"""The commands whose flags are the settings of what they run."""

from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from kvtide.cli.exits import leave
from kvtide.cli.options import Run, with_flags
from kvtide.cli.roles import ROLES, UP, schemas
from kvtide.cli.settings import UpSettings
from kvtide.runtime.settings import load_settings

WORKER = "worker"


def flagged(name: str) -> Callable[[], None]:
    """The command ``name``: ``up``, ``worker`` or a role."""
    if name == UP:
        return with_flags(UpSettings.model_fields, _run_up)
    if name == WORKER:
        from kvtide.cli.commands.worker import run_worker, worker_fields  # noqa: PLC0415

        return with_flags(worker_fields(), run_worker)
    return with_flags(ROLES[name].settings_class().model_fields, _role_command(name))


def _run_up(config: Path | None, flags: Mapping[str, object]) -> None:
    from kvtide.cli.commands.up import up  # noqa: PLC0415

    def work(console: Console) -> int:
        settings, _ = load_settings(
            UpSettings, UP, flags=flags, toml_path=config, schemas=schemas()
        )
        return up(settings, config, console)

    leave(work)


def _role_command(name: str) -> Run:
    def run(config: Path | None, flags: Mapping[str, object]) -> None:
        from kvtide.cli.running import run_role  # noqa: PLC0415

        leave(lambda _console: run_role(name, config, flags))

    return run
