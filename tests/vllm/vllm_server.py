"""Plain vLLM servers for tests: ``vllm serve``, unchanged, with KV events switched on."""

import json
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.integration.cluster import wait_for
from tests.vllm.vllm_engine import PYTHON, START_LIMIT_S

NAME_THERE = "demo-at-engine"
BLOCK_TOKENS = 128


@dataclass(frozen=True)
class Ports:
    """Where one server is."""

    http: int
    events: int
    replay: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    def given(self, model: Path) -> dict[str, object]:
        """What its router is told."""
        return {
            "url": self.url,
            "model": str(model),
            "events": f"tcp://127.0.0.1:{self.events}",
            "replay": f"tcp://127.0.0.1:{self.replay}",
            "poll_s": 0.2,
        }


def free_ports() -> Ports:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(3)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return Ports(*(int(probe.getsockname()[1]) for probe in probes))


def healthy(ports: Ports) -> bool:
    try:
        with urllib.request.urlopen(f"{ports.url}/health", timeout=5) as answer:  # noqa: S310 - our own address
            return answer.status == 200
    except OSError:
        return False


class VllmServer:
    """One server process, in a group of its own with all that it starts."""

    def __init__(self, model: Path, ports: Ports, log: Path) -> None:
        self.ports, self._log = ports, log
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{ports.events}",
            "replay_endpoint": f"tcp://127.0.0.1:{ports.replay}",
        }
        flags = {
            "model": str(model),
            "served-model-name": NAME_THERE,
            "host": "127.0.0.1",
            "port": str(ports.http),
            "dtype": "float32",
            "max-model-len": "2048",
            "max-num-seqs": "4",
            "kv-events-config": json.dumps(events),
        }
        command = [
            "nice",
            "-n",
            "5",
            PYTHON,
            "-m",
            "vllm.entrypoints.openai.api_server",
        ]
        command += [part for key, text in flags.items() for part in (f"--{key}", text)]
        command += ["--enforce-eager", "--enable-prompt-tokens-details"]
        own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        own |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        own |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with log.open("ab") as out:
            self._process = subprocess.Popen(  # noqa: S603 - our own arguments
                command,
                stdout=out,
                stderr=out,
                env={**os.environ, **own},  # noqa: TID251 - a process's environment
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        def ready() -> bool:
            if self._process.poll() is not None:
                tail = self._log.read_text(errors="replace")[-6000:]
                raise AssertionError(f"the server ended:\n{tail}")
            return healthy(self.ports)

        wait_for(ready, "the server answers", START_LIMIT_S)

    def kill(self) -> None:
        """It and its engine's processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def vllm_servers(model: Path, count: int, folder: Path) -> Generator[list[VllmServer]]:
    servers: list[VllmServer] = []
    try:
        for number in range(count):
            log = folder / f"server-{number}.log"
            servers.append(VllmServer(model, free_ports(), log))
        for server in servers:
            server.wait_ready()
        yield servers
    finally:
        for server in servers:
            server.kill()
