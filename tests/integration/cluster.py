"""A small real cluster in one test: nats-server and each role a real process.

    with Cluster(folder, prefill=2, decode=2) as cluster:
        cluster.wait_ready()
        cluster.kill("prefill-0")

Names are ``ROLE-NUMBER``; a ``worker`` is prefill and decode in one process. Each process logs into ``folder``; when a test fails, look
there. Everything ends with the context, also after a failure.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.integration.halting import halt
from tests.integration.nats_server import NatsServer

READY_LIMIT_S = 120.0
STOP_LIMIT_S = 20.0
ROLES = ("store", "conductor", "prefill", "decode", "worker", "gateway")

_SCRIPT = Path(__file__).with_name("cluster_process.py")


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
    """Wait until it holds.

    Raises:
        TimeoutError: it does not within ``limit_s``; the message says what.
    """
    deadline_s = time.monotonic() + limit_s  # noqa: TID251 - real processes
    while not condition():
        if time.monotonic() > deadline_s:  # noqa: TID251 - real processes
            raise TimeoutError(f"not within {limit_s} s: {what}")
        time.sleep(0.02)


@dataclass(slots=True)
class RoleProcess:
    """One process of the cluster."""

    name: str
    role: str
    settings: dict[str, object]
    log: Path
    http_url: str = ""
    prefix: tuple[str, ...] = ()
    script: Path = _SCRIPT
    popen: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    @property
    def alive(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    @property
    def command(self) -> list[str]:
        """A worker with both roles is the command line's; others are ``serve``.

        ``prefix`` is a command that becomes the process, such as ``ip netns exec NAME``;
        ``script`` runs the role.
        """
        if self.role != "worker":
            given = (self.role, json.dumps(self.settings))
            return [*self.prefix, sys.executable, str(self.script), *given]
        flags = (
            f"--{key.replace('_', '-')}={value}" for key, value in self.settings.items()
        )
        return [*self.prefix, sys.executable, "-m", "kvtide.cli", "worker", *flags]

    def start(self, environment: Mapping[str, str]) -> None:
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(  # noqa: S603 - our own arguments
                self.command,
                stdout=log,
                stderr=log,
                env=dict(environment),
                start_new_session=True,
            )

    def send(self, number: signal.Signals) -> None:
        assert self.popen is not None
        os.kill(self.popen.pid, number)

    def wait(self, limit_s: float = STOP_LIMIT_S) -> int:
        assert self.popen is not None
        return self.popen.wait(limit_s)

    def metrics(self) -> dict[str, float]:
        """The samples of its /metrics, by name with labels."""
        with urllib.request.urlopen(f"{self.http_url}/metrics", timeout=5) as answer:  # noqa: S310 - our own address
            text: str = answer.read().decode()
        lines = (line for line in text.splitlines() if line and line[0] != "#")
        return {
            name: float(value)
            for name, _, value in (one.rpartition(" ") for one in lines)
        }

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.http_url}/readyz", timeout=5) as answer:  # noqa: S310 - our own address
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False


class Cluster:
    """Counts of each role, and settings by role (``{"prefill": {"threads": 1}}``).

    ``hosts`` above 1 spreads stores and workers over pretended hosts: each host has
    its own folder of shared memory, so that everything between them goes over TCP.
    """

    def __init__(
        self,
        folder: Path,
        *,
        stores: int = 1,
        conductors: int = 0,
        prefill: int = 1,
        decode: int = 1,
        workers: int = 0,
        gateways: int = 0,
        hosts: int = 1,
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        self.folder = folder
        self._counts = {
            "store": max(stores, hosts),
            "conductor": conductors,
            "prefill": prefill,
            "decode": decode,
            "worker": workers,
            "gateway": gateways,
        }
        self._hosts = hosts
        self._settings = {role: dict(own) for role, own in (settings or {}).items()}
        folder.mkdir(parents=True, exist_ok=True)
        nats = folder / "nats"
        nats.mkdir(exist_ok=True)
        self.nats = NatsServer(nats)
        self.processes: dict[str, RoleProcess] = {}

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    def shm_dir(self, host: int = 0) -> Path:
        """The shared memory of one pretended host."""
        return Path("/dev/shm") / f"kvtide-test-{os.getpid()}-{self.folder.name}-{host}"  # noqa: S108 - memory is what is wanted

    def prefix(self, host: int) -> tuple[str, ...]:
        """The command that starts what runs on a pretended host; here none."""
        del host
        return ()

    def http_url(self, host: int, port: int) -> str:
        """Where a test reaches a port of a pretended host."""
        del host
        return f"http://127.0.0.1:{port}"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start everything; returns before it is ready."""
        self.nats.start()
        for role in ROLES:
            for number in range(self._counts[role]):
                self.add(role, number)

    def add(self, role: str, number: int, **settings: object) -> RoleProcess:
        """Start one more process (or the same one again, after a kill)."""
        name = f"{role}-{number}"
        shm_dir = self.shm_dir(number % self._hosts)
        shm_dir.mkdir(exist_ok=True)
        port = _free_port()
        common: dict[str, object] = {
            "nats": self.nats.url,
            "node": name,
            "state_dir": str(self.state_dir),
            "shm_dir": str(shm_dir),
            "log_format": "json",
            "http_port": port,
        }
        own = self._settings.get(role, {})
        process = RoleProcess(
            name,
            role,
            {**common, **own, **settings},
            self.folder / f"{name}.log",
            self.http_url(number % self._hosts, port),
            self.prefix(number % self._hosts),
        )
        process.start(_environment())
        self.processes[name] = process
        return process

    def restart(self, name: str) -> RoleProcess:
        """Start a process that has ended with the settings that it had."""
        process = self.processes[name]
        process.start(_environment())
        return process

    def __getitem__(self, name: str) -> RoleProcess:
        return self.processes[name]

    def kill(self, name: str) -> None:
        """SIGKILL, and wait for its end."""
        self.processes[name].send(signal.SIGKILL)
        self.processes[name].wait()

    def pause(self, name: str) -> None:
        process = self.processes[name].popen
        assert process is not None
        halt(process.pid)

    def resume(self, name: str) -> None:
        self.processes[name].send(signal.SIGCONT)

    def wait_ready(self, limit_s: float = READY_LIMIT_S) -> None:
        """Wait until each process says that it is ready.

        Raises:
            AssertionError: one has ended; the message holds the end of its log.
        """

        def ready() -> bool:
            for process in self.processes.values():
                if not process.alive:
                    raise AssertionError(f"{process.name} ended:\n{self.tail(process)}")
            return all(process.ready() for process in self.processes.values())

        wait_for(ready, "all processes are ready", limit_s)

    def tail(self, process: RoleProcess, limit: int = 4000) -> str:
        """The end of a process's log."""
        return process.log.read_text(errors="replace")[-limit:]

    def close(self) -> None:
        """End everything: politely, then not."""
        running = [one for one in self.processes.values() if one.alive]
        for process in running:
            process.send(signal.SIGCONT)
            process.send(signal.SIGTERM)
        deadline_s = time.monotonic() + STOP_LIMIT_S  # noqa: TID251 - real processes
        for process in running:
            left_s = max(0.1, deadline_s - time.monotonic())  # noqa: TID251 - as above
            try:
                process.wait(left_s)
            except subprocess.TimeoutExpired:
                process.send(signal.SIGKILL)
                process.wait()
        self.nats.kill()
        for host in range(self._hosts):
            folder = self.shm_dir(host)
            if folder.is_dir():
                for path in folder.iterdir():
                    path.unlink()
                folder.rmdir()


def _environment() -> dict[str, str]:
    given = dict(os.environ)  # noqa: TID251 - a process's environment
    return {
        **given,
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": given.get("OMP_NUM_THREADS", "2"),
    }


def _free_port() -> int:
    import socket  # noqa: PLC0415

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
