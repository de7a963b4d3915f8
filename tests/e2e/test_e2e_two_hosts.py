"""Prefill here, decode in another network namespace, no memory shared between them.

Host A is the root namespace; host B is one of the test's own, joined by a veth pair,
with a shared-memory file system of its own. Every hand-over must go over TCP.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.oracle.reference import Oracle
from tests.e2e.system import Client, free_port, wait_for
from tests.integration.nats_server import binary

from kvtide.engine.demo import default_cache_dir, ensure_demo_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="needs root and iproute2 for network namespaces",
    ),
]

NAMESPACE = f"kvtide-{os.getpid()}"
LINK_A, LINK_B = f"kva{os.getpid()}", f"kvb{os.getpid()}"
HOST_A, HOST_B = "10.231.77.1", "10.231.77.2"
IN_B = ("ip", "netns", "exec", NAMESPACE)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.decode()}")


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    with ExitStack() as undo:
        try:
            run("ip", "netns", "add", NAMESPACE)
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        undo.callback(run, "ip", "netns", "del", NAMESPACE)
        run("ip", "link", "add", LINK_A, "type", "veth", "peer", "name", LINK_B)
        run("ip", "link", "set", LINK_B, "netns", NAMESPACE)
        run("ip", "addr", "add", f"{HOST_A}/30", "dev", LINK_A)
        run("ip", "link", "set", LINK_A, "up")
        run(*IN_B, "ip", "addr", "add", f"{HOST_B}/30", "dev", LINK_B)
        run(*IN_B, "ip", "link", "set", LINK_B, "up")
        run(*IN_B, "ip", "link", "set", "lo", "up")
        yield


class Hosts:
    """The roles' processes on both hosts."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.ports = {
            name: free_port() for name in ("store-a", "store-b", "gateway", "decode")
        }
        self._undo = ExitStack()
        self._model = model
        self._nats = f"nats://{HOST_A}:{free_port()}"
        (folder / "secret").write_text(os.urandom(32).hex())
        (folder / "secret").chmod(0o600)

    def start(self) -> None:
        port = self._nats.rpartition(":")[2]
        self._spawn([str(binary()), "--addr", HOST_A, "--port", port], "nats")
        for host in "ab":
            shm = self.folder / f"shm-{host}"
            shm.mkdir()
            run("mount", "-t", "tmpfs", "-o", "size=700m", "tmpfs", str(shm))
            self._undo.callback(run, "umount", "-l", str(shm))
        dram = ("--dram-bytes", str(400 << 20))
        model = ("--model", str(self._model))
        self._role("store", "store-a", "a", *dram)
        self._role("store", "store-b", "b", *dram)
        self._role("conductor", "conductor", "a")
        self._role("prefill", "prefill", "a", *model)
        self._role("decode", "decode", "b", *model)
        self._role("gateway", "gateway", "a", *model)

    def stop(self) -> None:
        self._undo.close()

    def _role(self, role: str, node: str, host: str, *more: str) -> None:
        address = HOST_A if host == "a" else HOST_B
        command = [
            *(() if host == "a" else IN_B),
            *(sys.executable, "-m", "kvtide.cli", role, "--node", node),
            *("--nats", self._nats, "--listen", address),
            *("--state-dir", str(self.folder / f"state-{host}")),
            *("--secret-file", str(self.folder / "secret")),
            *("--shm-dir", str(self.folder / f"shm-{host}")),
            *("--http-port", str(self.ports.get(node, 0))),
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


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure_demo_model(default_cache_dir())


@pytest.fixture(scope="module")
def hosts(
    network: None, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[Hosts]:
    made = Hosts(tmp_path_factory.mktemp("hosts"), model)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def client(hosts: Hosts) -> Iterator[Client]:
    made = Client(f"http://{HOST_A}:{hosts.ports['gateway']}")

    def ready() -> bool:
        try:
            return made.http.get("/readyz", timeout=5).is_success
        except httpx.TransportError:
            return False

    wait_for(ready, 180, f"the gateway is ready; logs in {hosts.folder}", 0.3)
    yield made
    made.close()


def read_bytes(port: int, path: str) -> float:
    """Bytes that the decode worker read from the pool over ``path``."""
    command = [*IN_B, sys.executable, "-c", _GET, f"http://{HOST_B}:{port}/metrics"]
    text = subprocess.run(command, capture_output=True, timeout=30, check=True).stdout
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.decode().splitlines()
        if line.startswith("kvtide_pool_read_bytes_total") and f'path="{path}"' in line
    )


_GET = "import sys,urllib.request as u;print(u.urlopen(sys.argv[1]).read().decode())"


def test_every_hand_over_goes_over_tcp_and_every_token_is_right(
    hosts: Hosts, client: Client, model: Path
) -> None:
    oracle = Oracle(model)
    expected = 0
    for tokens in (63, 64, 65, 500):
        prompt = text_tokens(client.tokenize, tokens, 3000 + tokens)
        cold = client.complete(prompt, 24, ignore_eos=True)
        warm = client.complete(prompt, 24, ignore_eos=True)
        assert cold.cached_tokens == 0
        assert warm.cached_tokens == (tokens - 1) // 64 * 64
        for answer in (cold, warm):
            verdict = oracle.check(prompt, list(answer.ids))
            assert verdict.right, (tokens, answer, verdict)
        expected += tokens - 1
    prompts = [text_tokens(client.tokenize, 150 + 30 * i, 9000 * i) for i in range(8)]
    answers = client.each(
        [lambda p=p: client.complete(p, 24, ignore_eos=True) for p in prompts]
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert oracle.check(prompt, list(answer.ids)).right, (prompt, answer)
    over_tcp = read_bytes(hosts.ports["decode"], "tcp")
    assert over_tcp > expected * 30 * 2 * 3 * 64 * 4 * 0.9  # K and V of all layers
    assert read_bytes(hosts.ports["decode"], "shm") < over_tcp / 4
