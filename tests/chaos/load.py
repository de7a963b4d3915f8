"""A load whose every request is written down, and judged when all is over."""

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import httpx
from tests.chaos.site import ChaosSite
from tests.e2e.asking import Asking
from tests.e2e.fault_rounds import Question, Stream, is_right
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.oracle.reference import Oracle
from tests.e2e.system import Client, wait_for
from typing_extensions import override

from kvtide.gateway.api.problems import OVERLOADED_CODE
from kvtide.gateway.api.wishes import TTFT_HEADER

REQUEST_LIMIT_S = 150.0
"""Far above what an answer takes: what takes longer hangs."""
MORE_LIMIT_S = 300.0
SHARED = 130
TOKENS = 48
LEAVE_AFTER = 5
PAUSE_S = 0.2
END_LIMIT_S = 5.0
OK = 200
STATUS_OF = {OVERLOADED_CODE: 503, "shutting_down": 503, "deadline_exceeded": 504}
"""The status that an error would have had, had it come before the stream began."""


def questions(site: ChaosSite, count: int) -> list[Question]:
    """Prompts of which four each share a beginning; every other answer has a seed."""

    def made(number: int) -> Question:
        shared = text_tokens(site.tokenize, SHARED, 40 * (number // 4))
        own = text_tokens(site.tokenize, 60 + 97 * number % 400, 900 + 40 * number)
        sampling = {"temperature": 0.8, "seed": number} if number % 2 else {}
        prompt = [*shared, *own]
        whole = site.complete(prompt, TOKENS, ignore_eos=True, **sampling)
        return Question(prompt, sampling, whole.ids)

    numbers = list(range(count))
    answers: list[Question] = []
    for start in range(0, count, 4):
        jobs = [partial(made, number) for number in numbers[start : start + 4]]
        answers += site.each(jobs)
    for each in answers:
        if isinstance(each, Exception):
            raise each
    return answers


@dataclass
class Entry:
    """A request: what was asked of whom, and everything that ended it.

    ``ends`` are the terminal answers that the client saw: a finish, an error event or
    an error's status. ``broken`` is the reason why a connection ended without one;
    ``unreached`` if there was none: nobody was asked. ``first_s`` is when the first
    token came, ``billed`` what ``usage`` counted of them.
    """

    question: Question
    gateway: int
    streams: bool
    began_s: float
    ids: list[int] = field(default_factory=list[int])
    ends: list[str] = field(default_factory=list[str])
    done: int = 0
    broken: str = ""
    unreached: bool = False
    left: bool = False
    first_s: float | None = None
    ended_s: float | None = None
    retry_after: str | None = None
    billed: int | None = None

    @property
    def finished(self) -> bool:
        return self.ends == ["finish"]


class Ledger(Asking):
    """Requests at both gateways until the block ends; each is one `Entry`.

    Every seventh leaves after a few tokens. ``ttft_ms`` is a target that each names.
    A ``patient`` client comes again after a failure when an answer would have taken as
    long: so the share of requests that fail is that of the time in which they do,
    however slow the machine.
    """

    def __init__(
        self,
        site: ChaosSite,
        asked: Sequence[Question],
        threads: int = 3,
        *,
        leavers: bool = True,
        ttft_ms: float | None = None,
        patient: bool = False,
    ) -> None:
        super().__init__(threads, REQUEST_LIMIT_S)
        self.entries: list[Entry] = []
        self._site = site
        self._leavers = leavers
        self._patient = patient
        self._pause_s = PAUSE_S
        self._headers = {} if ttft_ms is None else {TTFT_HEADER: str(ttft_ms)}
        self._questions = itertools.cycle(asked)
        self._numbers = itertools.count()
        self._chance = random.Random(7)  # noqa: S311 - to do it again

    @override
    def ask(self) -> bool:
        with self.lock:
            number = next(self._numbers)
            entry = Entry(
                next(self._questions), number % 2, number % 3 != 0, time.monotonic()
            )
            entry.left = self._leavers and entry.streams and number % 7 == 6
            self.entries.append(entry)
        asks = _stream if entry.streams else _whole
        ports = _Ports()
        how = _How(self._headers, {"trace": ports})
        try:
            asks(self._site.gateways[entry.gateway], entry, how)
        except httpx.TransportError as error:
            entry.broken = repr(error)
            link = self._site.cluster.to_gateway[f"gateway-{entry.gateway}"]
            alone = bool(ports.own & link.turned_away)
            entry.unreached = alone or isinstance(error, httpx.ConnectError)
        entry.ended_s = time.monotonic()
        if not entry.finished:
            self.stop.wait(self._pause_s)
        elif self._patient:
            self._pause_s = max(PAUSE_S, entry.ended_s - entry.began_s)
        return True

    @property
    def right(self) -> int:
        return sum(entry.finished for entry in self.entries)

    def answered(self, more: int) -> None:
        """Wait for ``more`` whole answers from now on."""
        before = self.right
        wait_for(
            lambda: self.right >= before + more,
            MORE_LIMIT_S,
            f"{more} more answers than {before}; {self.seen()}",
        )

    def seen(self) -> str:
        """How requests ended, counted."""
        ends: Counter[str] = Counter()
        for entry in self.entries:
            if entry.left:
                ends["left by the client"] += 1
            elif entry.unreached:
                ends["no gateway there"] += 1
            elif entry.broken:
                ends["connection broken"] += 1
            else:
                ends[" and ".join(entry.ends) or "open"] += 1
        told = ", ".join(f"{count} {end}" for end, count in ends.most_common())
        return f"{len(self.entries)} requests: {told}"


class _Ports:
    """The ports from which one request's new connections went out."""

    def __init__(self) -> None:
        self.own: set[int] = set()

    def __call__(self, event: str, info: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            self.own.add(info["return_value"].get_extra_info("client_addr")[1])


class _How(NamedTuple):
    """What goes with a request besides its body."""

    headers: Mapping[str, str]
    extensions: Mapping[str, Any]


def _body(client: Client, entry: Entry) -> dict[str, Any]:
    return {
        "model": client.model,
        "prompt": list(entry.question.prompt),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **entry.question.sampling,
    }


def _whole(client: Client, entry: Entry, how: _How) -> None:
    body = _body(client, entry)
    response = client.http.post("/v1/completions", json=body, **how._asdict())
    if response.status_code != OK:
        _error(entry, response)
        return
    answer = response.json()
    (choice,) = answer["choices"]
    entry.ids += choice["token_ids"]
    entry.billed = answer["usage"]["completion_tokens"]
    entry.ends.append("finish")
    entry.done = 1


def _error(entry: Entry, response: httpx.Response) -> None:
    entry.ends.append(f"error {response.status_code}")
    entry.retry_after = response.headers.get("retry-after")


def _stream(client: Client, entry: Entry, how: _How) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}}
    body = {**_body(client, entry), **more}
    path = "/v1/completions"
    with client.http.stream("POST", path, json=body, **how._asdict()) as response:
        if response.status_code != OK:
            response.read()
            _error(entry, response)
            return
        for line in response.iter_lines():
            if line == "data: [DONE]":
                entry.done += 1
            elif line.startswith("data: "):
                _event(entry, json.loads(line.removeprefix("data: ")))
                if entry.left and len(entry.ids) >= LEAVE_AFTER:
                    return
    entry.left = False  # it was all there before the client went
    # nothing comes after an error event
    if not entry.done and (entry.finished or not entry.ends):
        entry.broken = "the stream ended without [DONE]"


def _event(entry: Entry, event: dict[str, Any]) -> None:
    if "error" in event:
        code = event["error"].get("code")
        entry.ends.append(f"error event {code}, {STATUS_OF.get(code, 500)}")
        return
    if event.get("usage"):
        entry.billed = event["usage"]["completion_tokens"]
    for choice in event["choices"]:
        entry.ids += choice.get("token_ids") or ()
        if entry.ids and entry.first_s is None:
            entry.first_s = time.monotonic()
        if choice.get("finish_reason"):
            entry.ends.append("finish")


@dataclass(frozen=True, slots=True)
class Allowed:
    """What besides a right answer a fault may bring: few errors, of these kinds.

    ``broken`` allows connections that break: only a dead or stopped gateway does that.
    ``unreached`` allows that there is no gateway to connect to, as while it restarts.
    """

    errors: tuple[str, ...] = ()
    broken: bool = False
    unreached: bool = False


def judge(
    entries: Sequence[Entry], allowed: Allowed, oracle: Callable[[], Oracle]
) -> list[str]:
    """What is wrong with the ledger; empty when every request ended once and right."""
    wrong: list[str] = []
    for number, entry in enumerate(entries):
        wrong += [f"request {number}: {what}" for what in _faults(entry, allowed)]
        whole = len(entry.ids) == TOKENS
        stream = Stream(entry.question, ids=entry.ids)
        if entry.finished and not (whole and _right(stream, oracle)):
            wrong.append(f"request {number}: wrong tokens {entry.ids}")
        if entry.finished and not entry.left and entry.billed != len(entry.ids):
            wrong.append(f"request {number}: {entry.billed} tokens are billed")
        if not entry.finished and not _begins(entry):
            wrong.append(f"request {number}: a wrong beginning {entry.ids}")
    return wrong


def _right(stream: Stream, oracle: Callable[[], Oracle]) -> bool:
    return tuple(stream.ids) == stream.question.answer or is_right(stream, oracle())


def _begins(entry: Entry) -> bool:
    """Whether what came before it broke off is how the answer begins.

    Where rounding decides, another beginning would be as right; none was ever seen.
    """
    return tuple(entry.ids) == entry.question.answer[: len(entry.ids)]


def _faults(entry: Entry, allowed: Allowed) -> list[str]:
    if entry.ended_s is None:
        return ["it never ended"]
    broken = allowed.broken or (allowed.unreached and entry.unreached)
    if entry.left or (entry.broken and broken):
        return []
    if entry.broken:
        return [f"broken: {entry.broken}"]
    if len(entry.ends) != 1:
        return [f"{len(entry.ends)} terminal answers: {entry.ends}"]
    if not entry.finished:
        few = entry.ends[0].endswith(allowed.errors or ("-",))
        return [] if few else [f"it ended with {entry.ends[0]}"]
    told = not entry.streams or entry.done == 1
    return [] if told else [f"[DONE] came {entry.done} times"]
