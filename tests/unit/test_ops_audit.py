"""What the dependency audit makes of what pip-audit found."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOUND: dict[str, object] = {"name": "httpx", "version": "0.28.1", "vulns": []}
SKIPPED: dict[str, object] = {
    "name": "torch",
    "skip_reason": "Dependency not found on PyPI",
}
BAD: dict[str, object] = {
    "name": "jinja2",
    "version": "3.0",
    "vulns": [{"id": "CVE-2024-1", "fix_versions": ["3.1"], "aliases": []}],
}


@pytest.mark.parametrize(
    ("found", "status", "said"),
    [
        ([SOUND], 0, "1 of 1 pins looked up, 0 known vulnerabilities"),
        ([SOUND, SKIPPED], 3, "torch was not looked up: Dependency not found"),
        ([SKIPPED, BAD], 1, "jinja2 3.0: CVE-2024-1, mended in 3.1"),
        ([SOUND, BAD], 1, "jinja2 3.0: CVE-2024-1, mended in 3.1"),
        ([SKIPPED], 3, "could not be asked"),
        (None, 3, "could not be asked"),
    ],
)
def test_a_vulnerability_fails_and_silence_is_told(
    tmp_path: Path, found: list[object] | None, status: int, said: str
) -> None:
    (tmp_path / "ops").mkdir()
    shutil.copy(ROOT / "ops" / "audit.sh", tmp_path / "ops")
    answers = tmp_path / "answers.json"
    answers.write_text("" if found is None else json.dumps({"dependencies": found}))
    tool = tmp_path / ".venv-audit" / "bin" / "pip-audit"
    tool.parent.mkdir(parents=True)
    # as pip-audit: the last argument names the report
    tool.write_text(
        f'#!/bin/sh\nfor last; do :; done\ncp "{answers}" "$last"\nexit 1\n'
    )
    tool.chmod(0o755)
    done = subprocess.run(  # noqa: S603 - our own script
        [tmp_path / "ops" / "audit.sh", "dependencies"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, said in done.stdout) == (status, True), done
