"""Streams under way while workers are killed and stopped, and what each pause is made of."""

import itertools
import json
import os
import random
import secrets
import signal
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
from tests.e2e.asking import Asking
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.oracle.reference import Oracle
from tests.e2e.system import System, wait_for
from tests.integration.otlp_receiver import OtlpReceiver, SeenSpan
from typing_extensions import override

from kvtide.engine.sampling import uniform

TOKENS = 32
STREAM_LIMIT_S = 90.0
READY_LIMIT_S = 90.0
MOST_STOPPED_S = 5.0
EDGE_GAP = 1e-4
"""How far ``TIE_GAP`` in the logits can move an edge between two tokens."""
ROLES = ("prefill", "decode")
PARTS = ("notice", "place", "make", "tell")
"""From the fault to the new placement's question, to its answer, to the end of the step
that makes the next token, to the client."""


@dataclass(frozen=True)
class Question:
    """A prompt, how its answer is drawn, and the answer of an undisturbed run."""

    prompt: Sequence[int]
    sampling: dict[str, Any]
    answer: tuple[int, ...]

    @property
    def is_greedy(self) -> bool:
        return "seed" not in self.sampling


def questions(system: System, count: int) -> list[Question]:
    """Prompts of many lengths; every other one is drawn with a seed."""

    def made(number: int) -> Question:
        prompt = text_tokens(system.tokenize, 30 + 37 * number % 200, 300 + 40 * number)
        sampling = {"temperature": 0.8, "seed": number} if number % 2 else {}
        whole = system.complete(prompt, TOKENS, ignore_eos=True, **sampling)
        return Question(prompt, sampling, whole.ids)

    return system.each([partial(made, number) for number in range(count)])


@dataclass
class Stream:
    """One stream's tokens, each with the wall-clock time at which it came."""

    question: Question
    decode: str = ""
    """Which worker it was promised first."""
    trace: str = field(default_factory=lambda: secrets.token_hex(16))
    ids: list[int] = field(default_factory=list[int])
    times_s: list[float] = field(default_factory=list[float])
    began_s: float = field(default_factory=time.time)
    ended_s: float | None = None
    failure: Exception | None = None

    def read(self, system: System) -> None:
        try:
            self._read(system)
        except Exception as failure:  # noqa: BLE001 - raised in the test's own thread
            self.failure = failure
        self.ended_s = time.time()

    def _read(self, system: System) -> None:
        body = {
            "model": system.model,
            "prompt": list(self.question.prompt),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            # a cache of its own: each stream is prefilled anew
            "cache_salt": self.trace,
            **self.question.sampling,
        }
        headers = {
            "traceparent": f"00-{self.trace}-{'1' * 16}-01",
            "x-kvtide-debug": "1",
        }
        with system.http.stream(
            "POST", "/v1/completions", json=body, headers=headers
        ) as response:
            if not response.is_success:
                raise AssertionError(response.read().decode())
            self.decode = response.headers["x-kvtide-decode"]
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        for choice in event["choices"]:
            got = choice.get("token_ids") or ()
            self.ids += got
            self.times_s += [time.time()] * len(got)

    def next_after(self, moment_s: float) -> float | None:
        """When the next token came, if the stream was open at that moment."""
        if self.began_s > moment_s:
            return None
        return next((at for at in self.times_s if at > moment_s), None)


class Streams(Asking):
    """A few streams at any time until the block ends."""

    def __init__(self, system: System, asked: Sequence[Question], threads: int) -> None:
        super().__init__(threads, STREAM_LIMIT_S)
        self.all: list[Stream] = []
        self._system = system
        self._questions = itertools.cycle(asked)

    @override
    def ask(self) -> bool:
        with self.lock:
            stream = Stream(next(self._questions))
            self.all.append(stream)
        stream.read(self._system)
        return stream.failure is None


def is_right(stream: Stream, oracle: Oracle) -> bool:
    """Equal to the undisturbed answer, or as right as it where rounding decides.

    Of tokens that are equally likely, greedy, and of those whose edges a seeded number
    falls on, an undisturbed run too has now one and now the other.
    """
    question, ids = stream.question, stream.ids
    if tuple(ids) == question.answer:
        return True
    if len(ids) != len(question.answer):
        return False
    if question.is_greedy:
        return oracle.check(question.prompt, ids).right
    logits = oracle.logits([*question.prompt, *ids[:-1]], len(ids)).double()
    edges = (logits / question.sampling["temperature"]).softmax(-1).cumsum(-1)
    for at, token in enumerate(ids):
        drawn = uniform(question.sampling["seed"], 0, len(question.prompt) + at)
        low = float(edges[at, token - 1]) if token else 0.0
        if not low - EDGE_GAP <= drawn <= float(edges[at, token]) + EDGE_GAP:
            return False
    return True


@dataclass(frozen=True)
class Fault:
    """What was done to whom, and when."""

    worker: str
    kind: str
    at_s: float


class Saboteur:
    """Kills and stops workers at random moments; one of each role stays untouched."""

    def __init__(self, system: System, chance: random.Random) -> None:
        self.faults: list[Fault] = []
        self._system = system
        self._chance = chance
        self._waking: list[tuple[float, int]] = []
        # a process that is started again has the port of the one before
        self._urls = {name: beat["http"] for name, beat in system.beats().items()}

    def run(self, plan: Iterable[tuple[str, str]]) -> None:
        """Do to a worker of each role what is said, ``kill`` or ``stop``."""
        try:
            for role, kind in plan:
                wait_for(
                    lambda r=role: self._are_ready(r), READY_LIMIT_S, f"{role}s", 0.02
                )
                self._sleep(self._chance.uniform(0.0, 0.6))
                self._harm(role, kind)
        finally:
            self._wake(float("inf"))

    def _harm(self, role: str, kind: str) -> None:
        names = {
            n: p for n, p in self._system.processes().items() if n.startswith(role)
        }
        worker = self._chance.choice(sorted(names))
        pid = names[worker]
        self.faults.append(Fault(worker, kind, time.time()))
        os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "stop":
            until_s = time.time() + self._chance.uniform(0.3, MOST_STOPPED_S)
            self._waking.append((until_s, pid))

    def _sleep(self, seconds: float) -> None:
        end_s = time.time() + seconds
        while time.time() < end_s:
            self._wake(time.time())
            time.sleep(0.02)

    def _wake(self, now_s: float) -> None:
        due = [pid for at_s, pid in self._waking if at_s <= now_s]
        self._waking = [(at_s, pid) for at_s, pid in self._waking if at_s > now_s]
        for pid in due:
            os.kill(pid, signal.SIGCONT)

    def _are_ready(self, role: str) -> bool:
        self._wake(time.time())
        stopped = {pid for _, pid in self._waking}
        pids = self._system.processes()
        workers = [name for name in self._urls if name.startswith(role)]
        return all(
            pids.get(name) not in {None, *stopped} and _is_ready(self._urls[name])
            for name in workers
        )


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=1).is_success
    except httpx.TransportError:
        return False


@dataclass(frozen=True)
class Pause:
    """A stream's silence after a fault that moved it elsewhere, and its parts."""

    fault: Fault
    silence_s: float
    parts_s: tuple[float, ...]


def pauses(
    faults: Sequence[Fault], streams: Sequence[Stream], collector: OtlpReceiver
) -> list[Pause]:
    """What each fail-over took: of streams that were placed again after a fault."""
    found: list[Pause] = []
    by_trace: dict[str, list[SeenSpan]] = {}
    for span in collector.spans():
        by_trace.setdefault(span.trace, []).append(span)
    for stream in streams:
        spans = by_trace.get(stream.trace, [])
        gateway = [s for s in spans if s.service == "kvtide-gateway"]
        admits = sorted((s.start_ns, s.end_ns) for s in gateway if s.name == "admit")
        for start_ns, end_ns in admits[1:]:
            before = [f for f in faults if stream.began_s < f.at_s < start_ns / 1e9]
            came_s = stream.next_after(start_ns / 1e9)
            steps = [
                s.end_ns / 1e9
                for s in spans
                if s.name == "decode.first_step" and s.end_ns > end_ns
            ]
            if not before or came_s is None:
                continue
            at_s = before[-1].at_s
            # the step may have ended with a worker that died next
            made_s = min([*steps, came_s])
            marks = (at_s, start_ns / 1e9, end_ns / 1e9, made_s, came_s)
            parts = tuple(b - a for a, b in itertools.pairwise(marks))
            found.append(Pause(before[-1], came_s - at_s, parts))
    return found


def told(found: Sequence[Pause]) -> str:
    """The medians, for people."""
    lines: list[str] = []
    for role, kind in itertools.product(ROLES, ("kill", "stop")):
        some = [
            one
            for one in found
            if one.fault.worker.startswith(role) and one.fault.kind == kind
        ]
        if not some:
            continue
        median_s = statistics.median(one.silence_s for one in some)
        parts = ", ".join(
            f"{name} {statistics.median(one.parts_s[at] for one in some):.2f}"
            for at, name in enumerate(PARTS)
        )
        lines.append(
            f"{kind} of {role}: {median_s:.2f} s to the next token at the median of "
            f"{len(some)} fail-overs ({parts})"
        )
    return "\n".join(lines)
