"""The system that a demo plays on: ``kvtide up`` in a folder of its own, and a client."""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from kvtide.cli.settings import own_command
from kvtide.runtime import Clock, KvtideError

READY_LIMIT_S = 600.0
STOP_LIMIT_S = 60.0
ASK_LIMIT_S = 300.0
DRAM = "64MiB"
SSD = "1GiB"


class DemoError(KvtideError):
    """The demo can't go on; the message says what was wrong."""


@dataclass(slots=True)
class Heard:
    """One streamed answer: ids, when each came (seconds), and what usage says."""

    request: str
    ids: list[int] = field(default_factory=list[int])
    at_s: list[float] = field(default_factory=list[float])
    asked_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from the question to the first token."""
        return 1000 * (self.at_s[0] - self.asked_s)

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two tokens."""
        return max(
            (b - a for a, b in zip(self.at_s, self.at_s[1:], strict=False)), default=0.0
        )


class Stage:
    """A system of its own, ended and removed with the context."""

    def __init__(self, clock: Clock) -> None:
        """Nothing is started before the context is entered."""
        self._clock = clock
        self._folder = Path(tempfile.mkdtemp(prefix="kvtide-demo-"))
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        self._http = httpx.Client(base_url=self.url, timeout=ASK_LIMIT_S)
        self._model = ""

    def __enter__(self) -> Self:
        """Start, and wait until the model answers.

        Raises:
            DemoError: it did not start; the message has the end of its output.
        """
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        """Stop everything and remove the folder."""
        self._end()

    def _start(self) -> None:
        port = self.url.rpartition(":")[2]
        state = str(self._folder / "state")
        output = self._folder / "up.log"
        command = [
            *own_command(), "up", "--port", port, "--state-dir", state,
            "--dram", DRAM, "--ssd", SSD,
        ]  # fmt: skip
        with output.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline_s = self._clock.monotonic() + READY_LIMIT_S
        while not self._is_ready():
            ended = self._process.poll() is not None
            if ended or self._clock.monotonic() > deadline_s:
                text = output.read_text(errors="replace")[-2000:]
                raise DemoError(f"the system did not start:\n{text}")
            time.sleep(0.3)
        self._model = self._http.get("/v1/models").json()["data"][0]["id"]

    def _is_ready(self) -> bool:
        try:
            return self._http.get("/readyz", timeout=2).is_success
        except httpx.TransportError:
            return False

    def _end(self) -> None:
        process, self._process = self._process, None
        self._http.close()
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- the client

    def ask(self, prompt: str, tokens: int) -> Heard:
        """The whole of a greedy streamed completion.

        Raises:
            DemoError: the system answered with an error.
        """
        events = list(self.stream(prompt, tokens))
        if not events or not events[-1].ids:
            raise DemoError("an answer had no token")
        return events[-1]

    def stream(self, prompt: str, tokens: int) -> Iterator[Heard]:
        """The answer so far, after each event.

        Raises:
            DemoError: the system answered with an error.
        """
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": tokens,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        asked_s = self._clock.monotonic()
        try:
            with self._http.stream("POST", "/v1/completions", json=body) as reply:
                if not reply.is_success:
                    raise DemoError(f"{reply.status_code}: {reply.read().decode()}")
                name = reply.headers.get("x-request-id", "")
                heard = Heard(name, asked_s=asked_s)
                for line in reply.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        self._hear(heard, json.loads(line[len("data: ") :]))
                        yield heard
        except httpx.TransportError as error:
            raise DemoError(f"the connection broke: {error!r}") from error

    def _hear(self, heard: Heard, event: dict[str, Any]) -> None:
        if "error" in event:
            raise DemoError(str(event["error"]))
        now_s = self._clock.monotonic()
        for choice in event.get("choices", ()):
            ids = choice.get("token_ids") or ()
            heard.ids.extend(ids)
            heard.at_s.extend([now_s] * len(ids))
        usage = event.get("usage")
        if usage:
            heard.prompt_tokens = usage["prompt_tokens"]
            heard.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]

    # ---- eyes and hands

    def kill(self, child: str) -> None:
        """``kill -9`` of one of the system's processes, by its name.

        Raises:
            DemoError: there is no such process.
        """
        page = json.loads(
            (self._folder / "state" / "run" / "processes.json").read_text()
        )
        pids = {each["name"]: each["pid"] for each in page["children"]}
        if child not in pids:
            raise DemoError(f"no process {child} among {', '.join(pids)}")
        os.kill(pids[child], signal.SIGKILL)

    def origins(self, request: str) -> dict[str, int]:
        """Prompt tokens of a request by where their KV was planned to come from."""
        reply = self._http.get(f"/admin/ui/requests/{request}")
        counts: dict[str, int] = {}
        if reply.is_success:
            for each in reply.json()["detail"]["origins"]:
                length = each["end"] - each["start"]
                counts[each["source"]] = counts.get(each["source"], 0) + length
        return counts

    def page(self, heard: Heard) -> str:
        """Where the dashboard shows a request."""
        return f"{self.url}/ui/#/requests/{heard.request}"
