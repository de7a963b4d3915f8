"""A whole secured system: it works, and no secret of it is anywhere but in its own file."""

from pathlib import Path

import psutil
import pytest
from tests.e2e.system import System

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


def secrets_of(state: Path) -> dict[Path, bytes]:
    """Each file that is a secret, and what is secret in it."""
    files = [state / "secret", *(state / "nats" / "keys").glob("*.seed")]
    found = {path: path.read_bytes().strip() for path in files}
    key = (state / "nats" / "keys" / "server.key").read_bytes().splitlines()[1]
    return found | {state / "nats" / "keys" / "server.key": key}


def test_secrets_are_in_their_own_files_only(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with System(state, "--secure", "--no-spare") as system:
        one, other = (system.complete("Once upon a time", 8) for _ in range(2))
        assert one.text == other.text
        secrets = secrets_of(state)
        assert len(secrets) > 6
        own = [psutil.Process(pid) for pid in system.processes().values()]
        said = [" ".join(process.cmdline()).encode() for process in own]
        written = {path: path.read_bytes() for path in files_of(state)}
    written |= {path: path.read_bytes() for path in files_of(state)}
    assert not [path for path, text in written.items() if b"NATS refuses" in text]
    for file, secret in secrets.items():
        assert file.stat().st_mode & 0o077 == 0
        assert not [line for line in said if secret in line]
        assert [path for path, text in written.items() if secret in text] == [file]


def files_of(state: Path) -> list[Path]:
    """What is written there, blocks apart."""
    return [path for path in state.rglob("*") if path.is_file()]
