"""A role that waits for NATS still ends when it is told to."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.cluster import wait_for


@pytest.mark.parametrize("role", ["store", "conductor", "decode"])
def test_a_role_that_waits_for_nats_stops_cleanly(role: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own arguments
            [
                *(sys.executable, "-m", "kvtide.cli", role),
                *("--nats", "nats://127.0.0.1:1", "--state-dir", str(tmp_path)),
            ],
            stdout=output,
            stderr=output,
        )
    try:
        wait_for(lambda: "waiting for NATS" in log.read_text(), f"{role} waits", 50)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
