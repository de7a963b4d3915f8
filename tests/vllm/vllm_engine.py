"""vLLM engines for tests, each a process in vLLM's own environment."""

import base64
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.cluster import Cluster, wait_for

PYTHON = os.environ.get("KVTIDE_TEST_VLLM_PYTHON", "")  # noqa: TID251 - a test's own
START_LIMIT_S = 900.0
ANSWER_LIMIT_S = 600.0
_SCRIPT = Path(__file__).with_name("vllm_engine_process.py")


@dataclass(frozen=True)
class Generated:
    """What an engine answered to some prompts."""

    tokens: list[list[int]]
    cached: list[int]
    prompt_tokens: list[int]
    reasons: list[str]
    seconds: float
    params: list[dict[str, Any] | None]


@dataclass(frozen=True)
class Aborted:
    """How a request stood when it was aborted, and what was held afterwards."""

    answered: int
    state: list[str]
    requests: int
    used_blocks: int
    followed: int


class VllmEngine:
    """One engine process."""

    def __init__(self, options: Mapping[str, object], log: Path) -> None:
        self.log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - our own arguments
                ["nice", "-n", "5", PYTHON, str(_SCRIPT), json.dumps(options)],  # noqa: S607
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=vllm_environment(),
            )

    def wait_ready(self) -> None:
        self._hear(START_LIMIT_S)

    def generate(
        self,
        prompts: Sequence[str],
        max_tokens: int = 16,
        salt: str = "",
        params: Mapping[str, object] | None = None,
        lora: Path | None = None,
        picture: bytes | None = None,
    ) -> Generated:
        """``picture`` is of each prompt."""
        asked = {
            "prompts": list(prompts),
            "max_tokens": max_tokens,
            "salt": salt,
            "lora": None if lora is None else str(lora),
            "picture": picture and base64.b64encode(picture).decode(),
        }
        return Generated(**self._ask({"op": "generate", **asked, "params": params}))

    def abort(self, prompt: str, params: Mapping[str, object], steps: int) -> Aborted:
        """Begin a request, and abort it after so many steps."""
        asked = {"prompts": [prompt], "max_tokens": 16, "steps": steps}
        return Aborted(**self._ask({"op": "abort", **asked, "params": params}))

    def reset(self, *, pool: bool = False) -> None:
        """Forget the engine's own prefix cache; with ``pool`` what it had there, too."""
        assert self._ask({"op": "reset", "pool": pool}) == {"reset": True}

    def wait_linked(self) -> None:
        """Wait until it has found its store."""
        wait_for(
            lambda: bool(self._ask({"op": "pool"})["takes_blocks"]),
            "the engine found its store",
            60.0,
        )

    def wait_known(self, blocks: int) -> None:
        """Wait until its scheduler knows of so many blocks."""
        wait_for(lambda: self.known() >= blocks, f"{blocks} blocks are known", 60.0)

    def known(self) -> int:
        return int(self._ask({"op": "pool"})["known"])

    def groups(self) -> int:
        """Its KV-cache groups, as the connector took them."""
        return int(self._ask({"op": "pool"})["groups"])

    def metrics(self) -> dict[str, float]:
        return self._ask({"op": "metrics"})

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _ask(self, asked: Mapping[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        return self._hear(ANSWER_LIMIT_S)

    def _hear(self, limit_s: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(stdout, selectors.EVENT_READ)
            deadline_s = time.monotonic() + limit_s  # noqa: TID251 - a real process
            while not ready.select(1.0):
                if time.monotonic() > deadline_s:  # noqa: TID251 - a real process
                    raise TimeoutError(f"no answer in {limit_s} s:\n{self.tail()}")
        line = stdout.readline()
        if not line:
            raise AssertionError(f"the engine ended:\n{self.tail()}")
        return json.loads(line)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


def options(
    model: Path, cluster: Cluster | None, role: str = "kv_both", **extra: object
) -> dict[str, object]:
    """What vLLM is started with; ``cluster`` None is plain vLLM."""
    made: dict[str, object] = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 4096,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "max_num_seqs": 4,
    }
    if cluster is not None:
        made["kv_transfer_config"] = {
            "kv_connector": "KvtideConnector",
            "kv_connector_module_path": "kvtide.connect.vllm",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "nats": cluster.nats.url,
                "state_dir": str(cluster.state_dir),
                "shm_dir": str(cluster.shm_dir()),
                "log_level": "info",
                "save_timeout_s": 2.0,
                "load_timeout_s": 5.0,
                **extra,
            },
        }
    return made


@contextmanager
def vllm_engine(given: Mapping[str, object], log: Path) -> Generator[VllmEngine]:
    engine = VllmEngine(given, log)
    try:
        engine.wait_ready()
        if "kv_transfer_config" in given:
            engine.wait_linked()
        yield engine
    finally:
        engine.kill()


def vllm_environment() -> dict[str, str]:
    """What vLLM on two cores is started with."""
    return {
        **os.environ,  # noqa: TID251 - a process's environment
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
