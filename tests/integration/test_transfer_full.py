"""Shared memory that is full: who reaches for what is not there hears of it and lives."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path(__file__).with_name("transfer_full.py")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None,
    reason="mounting needs root and mount",
)
def test_nobody_is_killed_for_want_of_memory(tmp_path: Path) -> None:
    options = ("-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path))
    mounted = subprocess.run(  # noqa: S603 - the test's own words
        ["mount", *options],  # noqa: S607
        check=False,
    )
    if mounted.returncode:
        pytest.skip("this system does not let us mount")
    try:
        done = subprocess.run(  # noqa: S603 - the test's own words
            [sys.executable, str(FULL), str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=False)  # noqa: S603, S607
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.endswith(" done")] == [
        "shm done",
        "tcp done",
    ]
    assert sum(line.endswith(" slice 0") for line in lines) == len(lines) - 2, lines
