"""A system on two hosts: prefill here, decode in another network namespace.

Host A is the root namespace; host B is one of the test's own, joined by a veth pair,
with a shared-memory file system of its own. Every hand-over must go over TCP.
"""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import httpx
from tests.e2e.system import Site, free_port, wait_for
from tests.integration.nats_server import binary
from typing_extensions import override

from kvtide.engine.demo import default_cache_dir, ensure_demo_model

_SUBNET = os.getpid() % (1 << 14)  # of a killed run the addresses may still be there
HOST_A, HOST_B = (
    f"10.231.{_SUBNET >> 6}.{4 * (_SUBNET & 63) + host}" for host in (1, 2)
)
SHM_SIZE = "400m"


class NoNamespacesError(Exception):
    """This machine or user can't make network namespaces."""


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.decode()}")


class TwoHosts(Site):
    """Two prefill workers and a store on A, two decode workers and a store on B.

    NATS, the conductor and the gateway are on A. Raises ``NoNamespacesError`` on
    entering where it can't be set up.
    """

    def __init__(self, folder: Path, dram_bytes: int) -> None:
        self.folder = folder
        self._dram_bytes = dram_bytes
        self._namespace = f"kvtide-{os.getpid()}"
        self._in_b = ("ip", "netns", "exec", self._namespace)
        self._undo = ExitStack()
        self._gateway_port = free_port()
        self._nats = f"nats://{HOST_A}:{free_port()}"
        super().__init__(f"http://{HOST_A}:{self._gateway_port}")

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise NoNamespacesError("needs root and iproute2")
        try:
            self._join()
            self._start()
            wait_for(self._ready, 240, f"a ready gateway; logs in {self.folder}", 0.3)
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
        self._undo.close()

    @property
    @override
    def address(self) -> list[str]:
        state = ["--state-dir", str(self.folder / "state-a")]
        return ["--nats", self._nats, *state]

    @override
    def fetch(self, url: str) -> str:
        script = "import sys,urllib.request as u;print(u.urlopen(sys.argv[1]).read().decode())"
        command = [*self._in_b, sys.executable, "-c", script, url]
        done = subprocess.run(command, capture_output=True, timeout=30, check=True)
        return done.stdout.decode()

    def _join(self) -> None:
        link_a, link_b = f"kva{os.getpid()}", f"kvb{os.getpid()}"
        try:
            run("ip", "netns", "add", self._namespace)
        except OSError as error:
            raise NoNamespacesError(str(error)) from error
        self._undo.callback(run, "ip", "netns", "del", self._namespace)
        run("ip", "link", "add", link_a, "type", "veth", "peer", "name", link_b)
        run("ip", "link", "set", link_b, "netns", self._namespace)
        run("ip", "addr", "add", f"{HOST_A}/30", "dev", link_a)
        run("ip", "link", "set", link_a, "up")
        run(*self._in_b, "ip", "addr", "add", f"{HOST_B}/30", "dev", link_b)
        run(*self._in_b, "ip", "link", "set", link_b, "up")
        run(*self._in_b, "ip", "link", "set", "lo", "up")

    def _start(self) -> None:
        self.folder.mkdir(parents=True)
        secret = os.urandom(32).hex()
        for host in "ab":
            state = self.folder / f"state-{host}"
            state.mkdir()
            (state / "secret").touch(0o600)
            (state / "secret").write_text(secret)
        port = self._nats.rpartition(":")[2]
        self._spawn([str(binary()), "--addr", HOST_A, "--port", port], "nats")
        for host in "ab":
            shm = self.folder / f"shm-{host}"
            shm.mkdir()
            run("mount", "-t", "tmpfs", "-o", f"size={SHM_SIZE}", "tmpfs", str(shm))
            self._undo.callback(run, "umount", "-l", str(shm))
        dram = ("--dram-bytes", str(self._dram_bytes))
        model = ("--model", str(ensure_demo_model(default_cache_dir())))
        worker = (*model, "--threads", "1")
        self._role("store", "store-a", "a", *dram)
        self._role("store", "store-b", "b", *dram)
        self._role("conductor", "conductor", "a")
        for number in range(2):
            self._role("prefill", f"prefill-{number}", "a", *worker)
            self._role("decode", f"decode-{number}", "b", *worker)
        http = ("--http-port", str(self._gateway_port))
        self._role("gateway", "gateway", "a", *model, *http)

    def _role(self, role: str, node: str, host: str, *more: str) -> None:
        address = HOST_A if host == "a" else HOST_B
        command = [
            *(() if host == "a" else self._in_b),
            *(sys.executable, "-m", "kvtide.cli", role, "--node", node),
            *("--nats", self._nats, "--listen", address),
            *("--state-dir", str(self.folder / f"state-{host}")),
            *("--shm-dir", str(self.folder / f"shm-{host}")),
            *more,
        ]
        self._spawn(command, node)

    def _spawn(self, command: list[str], name: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

        def end() -> None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

        self._undo.callback(end)

    def _ready(self) -> bool:
        try:
            return self.http.get("/readyz", timeout=5).is_success
        except httpx.TransportError:
            return False
