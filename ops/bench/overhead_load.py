"""The client of ops/bench/overhead.py: bare HTTP/1.1 streams, so that it costs little."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtide.runtime import SystemClock

CLOCK = SystemClock()
LIMIT_S = 60.0
_OK = 200


@dataclass(slots=True)
class Result:
    """One request; times in ms from when it was due."""

    status: int
    first_ms: float
    last_ms: float
    tokens: int


@dataclass(slots=True)
class Client:
    """Asks one server; connections are used again."""

    host: str
    port: int
    model: str
    headers: dict[str, str] = field(default_factory=dict[str, str])
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(
        default_factory=list
    )

    def request(self, text: str, tokens: int) -> bytes:
        """What is sent."""
        body = json.dumps(
            {
                "model": self.model,
                "stream": True,
                "max_tokens": tokens,
                "messages": [{"role": "user", "content": text}],
            }
        ).encode()
        lines = [
            "POST /v1/chat/completions HTTP/1.1",
            f"host: {self.host}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    async def ask(self, text: str, tokens: int, due_s: float) -> Result:
        """Send, and read to the end."""
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await self._connection()
            writer.write(self.request(text, tokens))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            status = int(head.split(b" ", 2)[1])
            if b"content-length:" in head:
                size = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(size)
                now_ms = (CLOCK.monotonic() - due_s) * 1000
                self.idle.append((reader, writer))
                return Result(status, now_ms, now_ms, 0)
            result = await _stream(reader, status, due_s)
            self.idle.append((reader, writer))
            return result

    async def begin(
        self, text: str, tokens: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send, and read until the first event; the caller closes it."""
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection(self.host, self.port)
            writer.write(self.request(text, tokens))
            await reader.readuntil(b"content")
        return reader, writer

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self.idle:
            reader, writer = self.idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
        return await asyncio.open_connection(self.host, self.port)

    def close(self) -> None:
        """Close what is idle."""
        for _, writer in self.idle:
            writer.close()


async def _stream(reader: asyncio.StreamReader, status: int, due_s: float) -> Result:
    """Read a chunked stream of events; a token is an event with text."""
    first_ms = last_ms = 0.0
    tokens = 0
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        data = (await reader.readexactly(size + 2))[:-2]
        if size == 0:
            return Result(status, first_ms, last_ms, tokens)
        for line in data.split(b"\n\n"):
            if b'"content":"' in line.replace(b'": "', b'":"') and _has_text(line):
                last_ms = (CLOCK.monotonic() - due_s) * 1000
                first_ms = first_ms or last_ms
                tokens += 1


def _has_text(line: bytes) -> bool:
    event = json.loads(line.removeprefix(b"data: "))
    return any(choice["delta"].get("content") for choice in event["choices"])


async def load(
    client: Client, texts: Sequence[str], *, rate: float, seconds: float, tokens: int
) -> list[Result | None]:
    """Requests at random times, whatever the answers take (open loop).

    None for one that broke or took too long.
    """
    chance = random.Random(7)
    begin_s, due_s = CLOCK.monotonic(), 0.0
    found: list[Result | None] = []

    async def one(text: str, at_s: float) -> None:
        try:
            found.append(await client.ask(text, tokens, at_s))
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            found.append(None)

    asked = 0
    async with asyncio.TaskGroup() as tasks:
        while due_s < seconds:
            wait_s = begin_s + due_s - CLOCK.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.create_task(one(texts[asked % len(texts)], begin_s + due_s))
            asked += 1
            due_s += chance.expovariate(rate)
    return found
