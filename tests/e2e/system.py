"""The whole system as a user starts it: ``kvtide up`` in a process of its own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
from typing_extensions import override

from kvtide.cli.supervisor.leftovers import own_shm_dir
from kvtide.engine.demo import default_cache_dir

START_LIMIT_S = 240.0
STOP_LIMIT_S = 60.0
IDLE_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: token ids without the end token, text, and what usage says."""

    ids: tuple[int, ...]
    text: str
    finish: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class RequestError(Exception):
    """The system answered with an error, or broke the connection."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(
    condition: Callable[[], bool], limit_s: float, what: str, pause_s: float = 0.1
) -> None:
    """Wait until it holds, at most ``limit_s``."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {limit_s} s: {what}")
        time.sleep(pause_s)


class Client:
    """Asks a gateway at ``url``; safe to use from several threads."""

    def __init__(self, url: str, model: str | None = None) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=180.0)
        self._model = model

    @property
    def http(self) -> httpx.Client:
        return self._http

    @property
    def model(self) -> str:
        if self._model is None:
            self._model = self._http.get("/v1/models").json()["data"][0]["id"]
        return self._model

    def close(self) -> None:
        self._http.close()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            response = self._http.post(path, json=body)
        except httpx.TransportError as error:
            raise RequestError(0, repr(error)) from error
        if not response.is_success:
            raise RequestError(response.status_code, response.text)
        return response.json()

    def complete(
        self, prompt: Sequence[int] | str, max_tokens: int, **fields: Any
    ) -> Answer:
        body = {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            **fields,
        }
        return _answer(self.post("/v1/completions", body))

    def chat(
        self, messages: Sequence[dict[str, str]], max_tokens: int, **fields: Any
    ) -> Answer:
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            **fields,
        }
        return _answer(self.post("/v1/chat/completions", body))

    def stream(
        self, prompt: Sequence[int], max_tokens: int, **fields: Any
    ) -> Iterator[dict[str, Any]]:
        """The events of a streamed completion; raises on an error event."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        done = False
        try:
            with self._http.stream("POST", "/v1/completions", json=body) as response:
                if not response.is_success:
                    raise RequestError(response.status_code, response.read().decode())
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            raise RequestError(500, line)
                        yield event
        except httpx.TransportError as error:
            raise RequestError(0, repr(error)) from error
        if not done:
            raise RequestError(0, "the stream ended without [DONE]")

    def stream_ids(
        self, prompt: Sequence[int], max_tokens: int, **fields: Any
    ) -> tuple[int, ...]:
        ids: list[int] = []
        for event in self.stream(prompt, max_tokens, **fields):
            for choice in event["choices"]:
                ids.extend(choice.get("token_ids") or ())
        return tuple(ids)

    def tokenize(self, text: str) -> list[int]:
        body = {"model": self.model, "prompt": text}
        return self.post("/tokenize", body)["tokens"]

    def each(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run all at once; results (or the exceptions) in order."""

        def run(job: Callable[[], Any]) -> Any:
            try:
                return job()
            except RequestError as error:
                return error

        with ThreadPoolExecutor(len(jobs)) as pool:
            return list(pool.map(run, jobs))


def _answer(body: dict[str, Any]) -> Answer:
    choice = body["choices"][0]
    usage = body["usage"]
    return Answer(
        ids=tuple(choice["token_ids"]),
        text=choice["message"]["content"] if "message" in choice else choice["text"],
        finish=choice["finish_reason"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        completion_tokens=usage["completion_tokens"],
    )


class Site(Client):
    """A running system that can be asked what it holds and over which paths it read."""

    @property
    def address(self) -> list[str]:
        """How commands find it."""
        raise NotImplementedError

    def fetch(self, url: str) -> str:
        """The body of a role's own HTTP port."""
        response = httpx.get(url, timeout=30)
        response.raise_for_status()
        return response.text

    def status(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "kvtide.cli", "status", "--json"]
        done = subprocess.run(
            [*command, *self.address], capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    def beats(self) -> dict[str, dict[str, Any]]:
        """The last beat of each node, by name; every node must say its load."""
        beats = {
            node["beat"]["node"]["node"]: node["beat"]
            for node in self.status()["nodes"]
        }
        silent = [name for name, beat in beats.items() if not beat["load"]]
        assert silent == [], "nodes without a load"
        return beats

    def held(self) -> dict[str, float]:
        """Everything that requests hold somewhere, by node and name; zeros left out."""
        return {
            f"{name}.{what}": load[what]
            for name, beat in self.beats().items()
            for load in beat["load"]
            for what in HOLDINGS
            if load.get(what)
        }

    def wait_idle(self, *nodes: str) -> None:
        """Wait until all ``nodes`` are there and nothing is held for any request."""
        wait_for(
            lambda: set(nodes) <= set(self.beats()) and not self.held(),
            IDLE_LIMIT_S,
            f"idle; held {self.held()}",
        )

    def handed_over(self) -> dict[str, float]:
        """Bytes that decode workers read from prefill's slots, by path."""
        by_path: dict[str, float] = {}
        for beat in self.beats().values():
            if "decode" not in beat["roles"]:
                continue
            for line in self.fetch(f"{beat['http']}/metrics").splitlines():
                if line.startswith("kvtide_pool_read_bytes_total{") and (
                    'purpose="handover"' in line
                ):
                    path = line.partition('path="')[2].partition('"')[0]
                    value = float(line.rpartition(" ")[2])
                    by_path[path] = by_path.get(path, 0.0) + value
        return by_path


class System(Site):
    """``kvtide up`` with its own state folder; leaves nothing."""

    def __init__(self, state: Path, *args: str) -> None:
        self.port = free_port()
        super().__init__(f"http://127.0.0.1:{self.port}")
        self.state = state
        self._args = args
        self._process: subprocess.Popen[bytes] | None = None
        self._log = state.with_suffix(".out")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.stop()
        finally:
            self.close()

    @property
    @override
    def address(self) -> list[str]:
        return ["--state-dir", str(self.state)]

    @property
    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "kvtide.cli", "up"),
            *("--state-dir", str(self.state), "--port", str(self.port)),
            *("--cache-dir", str(default_cache_dir())),
            # a spare loads its model while tests count seconds: only who asks has one
            *(() if "--spare" in self._args else ("--no-spare",)),
            # tests run side by side: more threads would only get in one another's way
            *("--threads", "1"),
            *self._args,
        ]

    def start(self) -> None:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_for(self._ready, START_LIMIT_S, "the system is ready", 0.3)
        except BaseException:
            self.kill_supervisor()
            raise

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"kvtide up ended: {self._log.read_text()}")
        try:
            return self._http.get("/readyz", timeout=5).is_success
        except httpx.TransportError:
            return False

    def ready(self) -> bool:
        """Whether the gateway says so and every role that should run does."""
        return self._ready() and all(alive(pid) for pid in self.processes().values())

    @property
    def shm_dir(self) -> Path:
        """This system's folder in shared memory."""
        return own_shm_dir(self.state)

    def stop(self) -> None:
        """Ask it to stop, and see that nothing of it is left."""
        assert self._process is not None
        pids = self.processes()
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill_supervisor()
            raise
        assert code == 0, self._log.read_text()
        assert [name for name, pid in pids.items() if alive(pid)] == []

    def kill_supervisor(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def processes(self) -> dict[str, int]:
        """Process ids by name (``store``, ``decode-0``…)."""
        page = json.loads((self.state / "run" / "processes.json").read_text())
        return {child["name"]: child["pid"] for child in page["children"]}

    def pids(self, role: str) -> list[int]:
        return [pid for name, pid in self.processes().items() if name.startswith(role)]


HOLDINGS = (
    *("open_requests", "bookings", "queued", "running", "waiting"),
    *("kv_tokens_used", "kv_tokens_promised"),
    *("reserved_slots", "quarantined_slots", "leases", "pins"),
)


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rindex(b")") + 2 : stat.rindex(b")") + 3] not in (b"Z", b"X")


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))  # noqa: S108, PTH208 - names are all we need
