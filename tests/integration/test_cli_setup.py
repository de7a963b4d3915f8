"""``ops/setup.sh``: says what is missing, and does nothing when all is there."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FAKE = """#!/bin/sh
case "$*" in
  *sys.exit*version_info*) exit {old} ;;
  *ensurepip*) exit {no_venv} ;;
  *version_info*) echo 3.11 ;;
  -V) echo "Python 3.11.99" ;;
  *) echo "called: $*"; exit 9 ;;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "ops").mkdir()
    for name in ("ops/setup.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def fake_python(folder: Path, *, old: int = 0, no_venv: int = 0) -> str:
    path = folder / "fake-python"
    path.write_text(FAKE.format(old=old, no_venv=no_venv))
    path.chmod(0o755)
    return str(path)


def set_up(project: Path, python: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "ops/setup.sh"],  # noqa: S607 - whichever bash there is
        cwd=project,
        env={"PATH": "/usr/bin:/bin", "PYTHON": python},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.parametrize(
    ("fake", "said"),
    [
        ({"old": 1}, "is Python 3.11.99; 3.11 or later is needed"),
        ({"no_venv": 1}, "apt-get install python3.11-venv"),
    ],
)
def test_what_is_missing_is_named(
    project: Path, fake: dict[str, int], said: str
) -> None:
    done = set_up(project, fake_python(project, **fake))
    assert done.returncode == 1
    assert said in done.stderr
    assert not (project / ".venv").exists()


def test_a_python_that_is_not_there_is_named(project: Path) -> None:
    done = set_up(project, "/nonexistent/python")
    assert done.returncode == 1
    assert "PYTHON=/nonexistent/python is not there" in done.stderr


def test_an_environment_of_another_folder_is_made_anew(project: Path) -> None:
    venv = project / ".venv"
    venv.mkdir()
    (venv / ".made-for").write_text("/elsewhere 3.11")
    done = set_up(project, fake_python(project))
    assert "removing .venv, which is not usable here" in done.stderr
    assert "1/4 making .venv" in done.stderr
    # the fake can't make one: the next run starts from the same point
    assert done.returncode != 0
    assert not (venv / ".stamp").exists()


def test_nothing_is_done_when_nothing_changed(project: Path) -> None:
    python = fake_python(project)
    script = (project / "ops" / "setup.sh").read_text()
    (line,) = [part for part in script.splitlines() if part.startswith("wanted=")]
    expected = subprocess.run(  # noqa: S603 - our own line
        ["bash", "-c", f'PYTHON={python}; {line}; printf %s "$wanted"'],  # noqa: S607
        cwd=project,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    kvtide = project / ".venv" / "bin" / "kvtide"
    kvtide.parent.mkdir(parents=True)
    kvtide.write_text("")
    kvtide.chmod(0o755)
    (project / ".venv" / ".stamp").write_text(expected)
    done = set_up(project, python)
    assert (done.returncode, done.stderr) == (0, "")
    with (project / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert set_up(project, python).returncode != 0
