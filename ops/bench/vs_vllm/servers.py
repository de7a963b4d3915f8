"""Starts vLLM and kvtide on this machine, each on free ports, and stops them."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from kvtide.cli.settings import process_environment
from kvtide.runtime import SystemClock

READY_LIMIT_S = 420.0
STOP_LIMIT_S = 60.0
MAX_MODEL_LEN = 4096
VLLM_BLOCK_TOKENS = 32
"""The smallest that its attention on CPUs takes."""
HOST = "127.0.0.1"
CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers; ``pid`` leads its processes."""

    name: str
    url: str
    pid: int
    command: tuple[str, ...]
    state_dir: str = ""

    def cpu_s(self) -> float:
        """Processor time of all its processes so far."""
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.pid)
            for each in (first, *first.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = each.cpu_times()
                    total += times.user + times.system
        return total


class NotReadyError(Exception):
    """A server ended, or took too long, before it was ready."""


def free_port() -> int:
    """One that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def model_folder(given: Path | None) -> Path:
    """The folder that both serve: the demo model's by default, made if need be."""
    if given is not None:
        return given.resolve()
    command = (sys.executable, "-m", "kvtide.cli", "fetch-model")
    said = subprocess.run(  # noqa: S603 - ours
        command, check=True, capture_output=True, text=True
    ).stdout
    return Path(said.strip().splitlines()[-1])


@contextlib.contextmanager
def kvtide(
    folder: Path,
    work: Path,
    *,
    dram: str = "1GiB",
    kv_tokens: int = 0,
    more: Sequence[str] = (),
) -> Iterator[Server]:
    """``kvtide up``: one prefill and one decode worker unless ``more`` says otherwise.

    ``kv_tokens`` bounds the KV memory of each worker that decodes; 0: its default.
    """
    port, state = free_port(), work / "kvtide-state"
    work.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "kvtide.cli", "up", "--state-dir", str(state)),
        *("--port", str(port), "--model", str(folder), "--dram", dram, "--ssd", "0"),
        *more,
    ]
    if kv_tokens:
        config = work / "kvtide.toml"
        config.write_text(f"[decode]\nkv_tokens = {kv_tokens}\n")
        command += ["--config", str(config)]
    with _running("kvtide", command, port, "/readyz", {}, work) as (url, pid):
        yield Server("kvtide", url, pid, tuple(command), str(state))


@contextlib.contextmanager
def vllm(
    venv: Path,
    folder: Path,
    work: Path,
    *,
    caching: bool = False,
    kv_tokens: int = 0,
    cores: str = "",
    number: int = 0,
) -> Iterator[Server]:
    """``vllm serve`` in float32 on the CPU.

    ``kv_tokens`` bounds its KV memory, 0: 2 GiB. ``cores``, such as ``0`` or ``0-1``:
    those that it computes on.
    """
    port = free_port()
    switch = "--enable-prefix-caching" if caching else "--no-enable-prefix-caching"
    command = [
        *(str(venv / "bin" / "vllm"), "serve", str(folder)),
        *("--served-model-name", folder.name, "--dtype", "float32"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager", switch),
        *("--enable-prompt-tokens-details", "--host", HOST, "--port", str(port)),
    ]
    if kv_tokens:
        command += ["--block-size", str(VLLM_BLOCK_TOKENS)]
        command += ["--num-gpu-blocks-override", str(kv_tokens // VLLM_BLOCK_TOKENS)]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    if cores:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = cores
    name = f"vllm-{number}"
    with _running(name, command, port, "/health", environment, work) as (url, pid):
        yield Server(name, url, pid, tuple(command))


@contextlib.contextmanager
def round_robin(backends: Sequence[str], work: Path) -> Iterator[Server]:
    """The proxy beside this file, in front of ``backends``."""
    port = free_port()
    script = Path(__file__).with_name("round_robin.py")
    command = [sys.executable, str(script), "--port", str(port), *backends]
    with _running("round-robin", command, port, "/health", {}, work) as (url, pid):
        yield Server("round-robin", url, pid, tuple(command))


@contextlib.contextmanager
def _running(
    name: str,
    command: Sequence[str],
    port: int,
    probe: str,
    environment: dict[str, str],
    work: Path,
) -> Iterator[tuple[str, int]]:
    work.mkdir(parents=True, exist_ok=True)
    url, log = f"http://{HOST}:{port}", work / f"{name}.log"
    quiet = {"TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as out:
        process = subprocess.Popen(  # noqa: S603 - what the caller was told to run
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=process_environment({**quiet, **environment}),
            start_new_session=True,
        )
    try:
        _wait(process, url + probe, log)
        yield url, process.pid
    finally:
        _stop(process)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = CLOCK.monotonic() + READY_LIMIT_S
    while CLOCK.monotonic() < deadline_s:
        if process.poll() is not None:
            raise NotReadyError(f"it ended with {process.returncode}: see {log}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5, trust_env=False).is_success:
                return
        time.sleep(0.5)
    raise NotReadyError(f"not ready after {READY_LIMIT_S:.0f} s: see {log}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End it and all of its session."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def remember(found: Sequence[Server], path: Path) -> None:
    """So that other runs of the script measure these very servers."""
    rows = [
        {
            "name": s.name,
            "url": s.url,
            "pid": s.pid,
            "command": s.command,
            "state_dir": s.state_dir,
        }
        for s in found
    ]
    path.write_text(json.dumps(rows))


def remembered(path: Path) -> dict[str, Server]:
    """Those that still run, by name."""
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text())
    return {
        row["name"]: Server(
            row["name"], row["url"], row["pid"], tuple(row["command"]), row["state_dir"]
        )
        for row in rows
        if psutil.pid_exists(row["pid"])
    }
