"""Whole systems work, and no secret of theirs is anywhere but in its own file."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from sqlalchemy import make_url
from tests.e2e.system import RequestError, System, wait_for
from tests.integration.postgres import PostgresServer, postgres_server

from kvtide.cli.certificates import Authority, write_private

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

PROMPT = "Once upon a time"
LOG_LIMIT_S = 60.0


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        if server.process is None:
            pytest.skip("a server of our own is killed here")
        yield server


def key_of(pem: Path) -> bytes:
    """A line of a key in PEM that no other key has."""
    return pem.read_bytes().splitlines()[2]


def secured_by(folder: Path) -> dict[str, str]:
    """Certificates and keys that a cluster has, and the variables that name them."""
    authority = Authority.make()
    certificate, key = authority.issue("host", ("127.0.0.1",))
    write_private(folder / "ca.pem", authority.certificate)
    write_private(folder / "host.pem", certificate)
    write_private(folder / "host.key", key)
    write_private(folder / "ssd.key", secrets.token_hex(32).encode())
    return {
        "KVTIDE_TRANSFER_CA_FILE": str(folder / "ca.pem"),
        "KVTIDE_TRANSFER_CERT_FILE": str(folder / "host.pem"),
        "KVTIDE_TRANSFER_KEY_FILE": str(folder / "host.key"),
        "KVTIDE_STORE_SSD_KEY_FILE": str(folder / "ssd.key"),
    }


def kvtide(system: System, *words: str) -> subprocess.CompletedProcess[bytes]:
    """A command of an operator, which is told the catalog by the environment."""
    command = [sys.executable, "-m", "kvtide.cli", *words, *system.address]
    return subprocess.run(command, capture_output=True, timeout=60, check=False)


def made_key(system: System, *words: str) -> bytes:
    done = kvtide(system, "keys", "make", "--json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["key"].encode()


def command_lines() -> list[bytes]:
    """Of all that this test started: what anybody on the machine can see."""
    started = psutil.Process().children(recursive=True)
    return [" ".join(process.cmdline()).encode() for process in started]


def holders(folder: Path, secret: bytes) -> list[Path]:
    """The files there, of any kind and depth, with the secret in them."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if secret in path.read_bytes()]


def logged(state: Path, word: bytes) -> bool:
    return any(word in path.read_bytes() for path in (state / "logs").glob("*.log"))


def test_secrets_are_in_their_own_files_only(
    tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, password = tmp_path / "state", secrets.token_urlsafe(24)
    for name, value in secured_by(tmp_path / "given").items():
        monkeypatch.setenv(name, value)
    url = make_url(asyncio.run(postgres.create_database())).set(password=password)
    catalog = url.render_as_string(hide_password=False)
    assert password in catalog
    monkeypatch.setenv("KVTIDE_CATALOG", catalog)
    said: list[bytes] = []
    with System(state, "--secure", "--no-spare", "--log-level", "debug") as system:
        one, other = (system.complete(PROMPT, 8) for _ in range(2))
        assert one.text == other.text
        assert kvtide(system, "tenants", "add", "acme").returncode == 0
        client = made_key(system, "acme")
        admin = made_key(system, "--admin")
        for key in (client, admin):
            system.http.headers["authorization"] = f"Bearer {key.decode()}"
            asked(system, refused=key == admin)
        postgres.kill()
        system.http.headers["authorization"] = f"Bearer {client.decode()}"
        asked(system, refused=False)
        away = kvtide(system, "keys", "list")
        assert away.returncode != 0
        assert b"catalog is not available" in away.stderr
        wait_for(lambda: logged(state, b"not available"), LOG_LIMIT_S, "it is told")
        said += [away.stdout, away.stderr, *command_lines()]
    files = {
        path: path.read_bytes().strip()
        for path in (state / "secret", *(state / "nats" / "keys").glob("*.seed"))
    }
    pems = (state / "nats" / "keys" / "server.key", tmp_path / "given" / "host.key")
    files |= {pem: key_of(pem) for pem in pems}
    ssd = tmp_path / "given" / "ssd.key"
    files[ssd] = ssd.read_bytes()
    assert len(files) > 8
    assert holders(tmp_path, b"NATS refuses") == []
    for file, secret in files.items():
        assert file.stat().st_mode & 0o077 == 0
        assert holders(tmp_path, secret) == [file]
    for secret in (
        password.encode(),
        client,
        admin,
        bytes.fromhex(files[ssd].decode()),
    ):
        assert holders(tmp_path, secret) == []
    for secret in (password.encode(), client, admin, *files.values()):
        assert not [line for line in said if secret in line]


def asked(system: System, *, refused: bool) -> None:
    if not refused:
        system.complete(PROMPT, 8)
        return
    with pytest.raises(RequestError) as caught:
        system.complete(PROMPT, 8)
    assert caught.value.status == 403


def test_the_token_of_an_unsecured_start_is_in_its_own_files_only(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    with System(state, "--no-spare", "--log-level", "debug") as system:
        system.complete(PROMPT, 8)
        address = state / "run" / "nats.url"
        token = make_url(address.read_text().strip()).username
        assert token
        assert len(token) > 30
        os.kill(system.processes()["nats"], 9)
        wait_for(
            lambda: logged(state, b"NATS connection lost"), LOG_LIMIT_S, "it is told"
        )
        wait_for(system.ready, LOG_LIMIT_S, "it is back")
        system.complete(PROMPT, 8)
        own = {address, state / "nats" / "nats.conf"}
        assert {file.stat().st_mode & 0o077 for file in own} == {0}
        assert set(holders(tmp_path, token.encode())) == own
        assert not [line for line in command_lines() if token.encode() in line]
    assert holders(tmp_path, token.encode()) == [state / "nats" / "nats.conf"]
