"""Sends answers, whole or as server-sent events, and notices that the client left."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvtide.gateway.api.answers import Answers, Choice, Said
from kvtide.gateway.api.asking import Questions
from kvtide.gateway.api.dialect import Dialect
from kvtide.gateway.api.door import Door
from kvtide.gateway.api.problems import of_failure
from kvtide.gateway.api.progress import Progress
from kvtide.gateway.api.replies import Insight
from kvtide.gateway.errors import RequestFailedError
from kvtide.gateway.life import Finish
from kvtide.runtime import TaskScope

PING = b": ping\n\n"


class AnswerResponse(Response):
    """Submits the questions when it is sent; cancels them when the client goes.

    A failure before anything was sent is raised, and becomes a status of its own;
    later it is an error event, after which the stream ends without ``[DONE]``.
    """

    def __init__(
        self, door: Door, questions: Questions, dialect: Dialect, *, stream: bool
    ) -> None:
        """Nothing happens before the call."""
        super().__init__()
        self._door = door
        self._questions = questions
        self._dialect = dialect
        self._is_stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send, or stop when the client is gone."""
        del scope
        with Answers(self._door, self._questions) as answers:
            talk = self._stream if self._is_stream else self._whole
            await while_connected(receive, talk(answers, send))

    # ---- in one piece

    async def _whole(self, answers: Answers, send: Send) -> None:
        while not answers.is_done:
            await answers.take(self._door.settings.request_timeout_s)
        body = self._dialect.whole(answers)
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        if self._dialect.frame.show_insight:
            headers |= _insight_headers(answers.choices)
        await send(_start(headers))
        await send({"type": "http.response.body", "body": body})

    # ---- as events

    async def _stream(self, answers: Answers, send: Send) -> None:
        taken = await self._first(answers)
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        if self._dialect.frame.show_insight:
            headers |= _outlook_headers(answers.choices)
        await send(_start(headers))
        await _send_more(send, self._dialect.opening(answers))
        progress = Progress(answers, asked=self._dialect.frame.show_progress)
        try:
            await self._tell(answers, taken, progress, send)
        except RequestFailedError as error:
            last = self._dialect.failure(of_failure(error.failure))
        else:
            last = self._dialect.closing(answers)
        await send({"type": "http.response.body", "body": last})

    async def _tell(
        self, answers: Answers, taken: Sequence[Said], progress: Progress, send: Send
    ) -> None:
        """All that comes, until all answers are done; a ping when long nothing did."""
        now_s = self._door.gateway.node.clock.monotonic
        ping_s = self._door.settings.ping_s
        sent_s = now_s()
        while True:
            body = self._events(taken) + progress.news()
            if not body and now_s() >= sent_s + ping_s:
                body = PING
            if body:
                await _send_more(send, body)
                sent_s = now_s()
            if answers.is_done:
                return
            wait_s = min(sent_s + ping_s - now_s(), progress.poll_s)
            taken = await answers.take(max(0.0, wait_s))

    async def _first(self, answers: Answers) -> Sequence[Said]:
        """Wait until workers have taken it: until then a failure has its own status."""
        while True:
            taken = await answers.take(self._door.settings.request_timeout_s)
            if taken:
                return taken

    def _events(self, taken: Sequence[Said]) -> bytes:
        events: list[bytes] = []
        for said in taken:
            events.append(self._dialect.piece(said))
            if isinstance(said.command, Finish):
                events.append(self._dialect.ending(said.choice))
        return b"".join(events)


async def while_connected(receive: Receive, talk: Coroutine[Any, Any, None]) -> bool:
    """Await ``talk``; cancel it and return False as soon as the client is gone.

    The request's body must have been read. Raises what ``talk`` raises.
    """
    async with TaskScope(on_error=_ignore) as scope:
        talking = scope.spawn(talk, name="answer")
        watching = scope.spawn(_until_gone(receive), name="disconnect watch")
        await asyncio.wait((talking, watching), return_when=asyncio.FIRST_COMPLETED)
        if not talking.done():
            return False
        talking.result()
        return True


def _ignore(error: BaseException) -> None:
    """The error is raised to the caller, who awaits the task."""
    del error


async def _until_gone(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


def _start(headers: dict[str, str]) -> dict[str, Any]:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw}


async def _send_more(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _insight_headers(choices: Sequence[Choice]) -> dict[str, str]:
    """How the first answer was made."""
    insight = choices[0].insight
    headers = _placement_headers(insight)
    headers["x-kvtide-hit-tokens"] = str(insight.hit_tokens)
    if insight.queue_ms is not None:
        headers["x-kvtide-queue-ms"] = f"{insight.queue_ms:.1f}"
    return headers


def _outlook_headers(choices: Sequence[Choice]) -> dict[str, str]:
    """How it is going to be made: nobody knows more before the first token."""
    headers = _placement_headers(choices[0].insight)
    expected = choices[0].estimate
    if expected is not None:
        headers["x-kvtide-expected-hit-tokens"] = str(expected.hit_tokens)
        headers["x-kvtide-expected-queue-ms"] = f"{expected.queue_ms:.1f}"
    return headers


def _placement_headers(insight: Insight) -> dict[str, str]:
    return {
        "x-kvtide-request": insight.request,
        "x-kvtide-attempt": str(insight.attempt),
        "x-kvtide-prefill": insight.prefill,
        "x-kvtide-decode": insight.decode,
    }
