"""Sends a load to a server and books how each request ended: the asyncio shell.

TTFT counts from when a request was due, so that a server that stalls is not spared the
requests that could not be sent meanwhile.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import msgspec

from kvtide.cli.serve_bench.dialogue import Api, Dialogue, Style
from kvtide.cli.serve_bench.errors import LoadError, NoServerError
from kvtide.cli.serve_bench.outcomes import Exchange, Ledger, Outcome
from kvtide.cli.serve_bench.reading import Reading, of_status
from kvtide.cli.serve_bench.words import Kind, Piece, text_of
from kvtide.cli.serve_bench.workload import Ask, Conversation
from kvtide.runtime import Clock

CONNECT_TIMEOUT_S = 10.0
LOOK_TIMEOUT_S = 10.0
_OK = 200
_MOST_ERROR_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Manner:
    """How a load is sent.

    ``concurrency`` conversations are held at any time, each begun when one has ended;
    None: each begins when it is due, as long as fewer than ``most_open`` are open.
    """

    api: Api
    style: Style
    text_seed: int
    timeout_s: float
    concurrency: int | None = None
    most_open: int = 1024
    warmup: int = 0
    warmup_words: int = 16


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


def client_of(url: str, headers: dict[str, str]) -> httpx.AsyncClient:
    """Connections to one server; no proxy, whatever the environment says.

    ``url`` may end in ``/v1``, as OpenAI's own clients have it.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    return httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"),
        headers=headers,
        limits=limits,
        timeout=timeout,
        trust_env=False,
    )


async def model_of(client: httpx.AsyncClient) -> str:
    """The first model that the server names.

    Raises:
        NoServerError: it names none.
    """
    url = str(client.base_url)
    try:
        answer = await client.get("/v1/models", timeout=LOOK_TIMEOUT_S)
        if answer.status_code != _OK:
            text = answer.text[:200]
            raise NoServerError(url, f"/v1/models: {answer.status_code}: {text}")
        return msgspec.json.decode(answer.content, type=_Models).data[0].id
    except (httpx.HTTPError, msgspec.MsgspecError, IndexError) as error:
        reason = f"/v1/models: {error or type(error).__name__}"
        raise NoServerError(url, reason) from error


async def pages_of(urls: Sequence[str]) -> list[str]:
    """What each shows; a page that can't be had is empty, so that a load goes on."""
    pages: list[str] = []
    async with httpx.AsyncClient(timeout=LOOK_TIMEOUT_S, trust_env=False) as client:
        for url in urls:
            try:
                answer = await client.get(url)
            except httpx.HTTPError:
                pages.append("")
            else:
                pages.append(answer.text if answer.status_code == _OK else "")
    return pages


@dataclass(slots=True)
class Load:
    """One load on one server. ``run`` once."""

    client: httpx.AsyncClient
    manner: Manner
    clock: Clock
    _started_s: float = field(default=0.0, init=False)

    async def warm_up(self) -> None:
        """Requests of text of their own, one after the other, that are not counted.

        Raises:
            LoadError: one was not answered: so would the others be.
        """
        for number in range(self.manner.warmup):
            ask = Ask((Piece(Kind.WARMUP, number, self.manner.warmup_words),), 4)
            found = await self._talk(Conversation(-1 - number, 0.0, (ask,)), None)
            if found is not None:
                raise LoadError(f"the warm-up was not answered: {found}")

    async def run(self, conversations: Sequence[Conversation]) -> tuple[Exchange, ...]:
        """Send all; each turn ends with exactly one outcome, even if cancelled."""
        ledger = Ledger(conversations)
        self._started_s = self.clock.monotonic()
        try:
            if self.manner.concurrency is None:
                await self._when_due(conversations, ledger)
            else:
                await self._one_by_one(conversations, ledger, self.manner.concurrency)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None  # noqa: S101 - we run in one
            task.uncancel()
        return ledger.close()

    def _now_s(self) -> float:
        return self.clock.monotonic() - self._started_s

    async def _when_due(
        self, conversations: Sequence[Conversation], ledger: Ledger
    ) -> None:
        room = asyncio.Semaphore(self.manner.most_open)

        async def hold(each: Conversation) -> None:
            try:
                await self._talk(each, ledger, due_s=each.at_s)
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            for each in sorted(conversations, key=lambda one: one.at_s):
                await self.clock.sleep(each.at_s - self._now_s())
                await room.acquire()
                group.create_task(hold(each))

    async def _one_by_one(
        self, conversations: Sequence[Conversation], ledger: Ledger, count: int
    ) -> None:
        left = iter(conversations)

        async def client() -> None:
            for each in left:
                await self._talk(each, ledger)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(count, len(conversations))):
                group.create_task(client())

    async def _talk(
        self, each: Conversation, ledger: Ledger | None, due_s: float | None = None
    ) -> str | None:
        """All turns, until one fails: what was wrong with that one, or None."""
        dialogue = Dialogue()
        for turn, ask in enumerate(each.turns):
            if turn:
                due_s = self._now_s() + ask.think_s
                await self.clock.sleep(ask.think_s)
            dialogue.say(text_of(ask.pieces, self.manner.text_seed))
            exchange, text = await self._ask(each.number, turn, ask, dialogue, due_s)
            if ledger is not None:
                ledger.end(exchange)
            if exchange.outcome is not Outcome.COMPLETED:
                if ledger is not None:
                    ledger.skip_rest(each, turn)
                return f"{exchange.outcome}: {exchange.detail}"
            dialogue.say(text)
        return None

    async def _ask(
        self,
        conversation: int,
        turn: int,
        ask: Ask,
        dialogue: Dialogue,
        due_s: float | None,
    ) -> tuple[Exchange, str]:
        manner, reading = self.manner, Reading()
        body = dialogue.body(manner.api, manner.style, ask.output_tokens)
        sent_s = self._now_s()
        try:
            async with asyncio.timeout(manner.timeout_s):
                outcome, detail = await self._stream(body, reading)
        except TimeoutError:
            outcome = Outcome.TIMED_OUT
            detail = f"no whole answer in {manner.timeout_s:g} s"
        except httpx.HTTPError as error:
            outcome = Outcome.UNREACHABLE
            detail = f"{type(error).__name__}: {error}"
        exchange = Exchange(
            conversation,
            turn,
            outcome,
            ask.output_tokens,
            due_s=sent_s if due_s is None else due_s,
            sent_s=sent_s,
            ended_s=self._now_s(),
            arrivals_s=tuple(reading.arrivals_s),
            usage=reading.usage,
            detail=detail,
            finish_reason=reading.finish_reason,
        )
        return exchange, reading.text

    async def _stream(self, body: bytes, reading: Reading) -> tuple[Outcome, str]:
        headers = {"content-type": "application/json"}
        request = self.client.stream(
            "POST", self.manner.api.path, content=body, headers=headers
        )
        async with request as response:
            if response.status_code != _OK:
                text = await _beginning(response)
                return of_status(response.status_code, text)
            async for line in response.aiter_lines():
                reading.line(line, self._now_s())
                if reading.is_over:
                    break
        return reading.close(), reading.detail


async def _beginning(response: httpx.Response) -> str:
    """Of an error's body, which may be of any length."""
    text = b""
    async for piece in response.aiter_bytes():
        text += piece
        if len(text) >= _MOST_ERROR_BYTES:
            break
    return text[:_MOST_ERROR_BYTES].decode(errors="replace")
