"""``kvtide doctor``: looks at this machine and says what to do about each finding."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtide.cli.doctor import devices, machine, services
from kvtide.cli.doctor.findings import Finding, Level
from kvtide.runtime.settings import RoleSettings

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}

Check = Callable[[], Finding | list[Finding]]


def examine(settings: RoleSettings, *, as_json: bool, console: Console) -> int:
    """Run all checks and print them; 1 if one failed."""
    findings = look(checks(settings))
    if as_json:
        console.print_json(json.dumps([_plain(finding) for finding in findings]))
    else:
        console.print(_table(findings))
    return int(any(finding.level is Level.FAIL for finding in findings))


def checks(settings: RoleSettings) -> dict[str, Check]:
    """Every check, by what it looks at."""
    return {
        "NATS": lambda: services.nats(settings),
        "nats-server": machine.nats_binary,
        "catalog": lambda: services.database(settings),
        "shared memory": lambda: machine.shared_memory(settings.shm_dir),
        "disk": lambda: machine.disk(settings.state_dir),
        "memory": machine.memory,
        "processors": machine.processors,
        "open files": machine.open_files,
        "locked memory": lambda: machine.locked_memory(
            wanted=bool(devices.rdma_devices())
        ),
        "RDMA": devices.rdma,
        "topology": devices.topology,
        "GPU": devices.gpu,
    }


def look(todo: dict[str, Check]) -> list[Finding]:
    """All findings; a check that breaks is a finding, not the end."""
    findings: list[Finding] = []
    for subject, check in todo.items():
        try:
            found = check()
        except Exception as error:  # noqa: BLE001 - the other checks still help
            text = f"the check broke: {type(error).__name__}: {error}"
            found = Finding(subject, Level.WARN, text, "report this")
        findings += found if isinstance(found, list) else [found]
    return findings


def _plain(finding: Finding) -> dict[str, object]:
    shown = asdict(finding)
    if finding.matrix is None:
        del shown["matrix"]
    return shown


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, show_header=False)
    table.add_column()
    table.add_column()
    table.add_column(overflow="fold")
    for finding in findings:
        style = _STYLES[finding.level]
        table.add_row(
            f"[{style}]{finding.level.value}[/]",
            finding.subject,
            escape(finding.text),
        )
        if finding.advice:
            table.add_row("", "", f"→ {escape(finding.advice)}", style="bold")
    return table
