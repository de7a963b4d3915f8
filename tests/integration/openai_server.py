"""A small HTTP server that answers as OpenAI's API does, or fails as it is told."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Server:
    """One token a piece; ``fault`` decides by the request's number what goes wrong."""

    faults: dict[int, str] = field(default_factory=dict[int, str])
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    headers: list[str] = field(default_factory=list[str])
    open: set[int] = field(default_factory=set[int])
    most_open: int = 0
    hold: asyncio.Event | None = None
    url: str = ""

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client went, or the test is over
        finally:
            writer.close()

    async def _one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET"):
            page = b'{"data": [{"id": "m"}]}'
            if "/metrics" in head:
                page = b"kvtide_store_staged_total %d\n" % len(self.asked)
            writer.write(_whole(200, page))
            return True
        length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
        assert length is not None
        body = json.loads(await reader.readexactly(int(length[1])))
        number = len(self.asked)
        self.asked.append(body)
        self.headers.append(head)
        self.open.add(number)
        self.most_open = max(self.most_open, len(self.open))
        try:
            return await self._answer(body, number, writer)
        finally:
            self.open.discard(number)

    async def _answer(
        self, body: dict[str, Any], number: int, writer: asyncio.StreamWriter
    ) -> bool:
        fault = self.faults.get(number, "")
        if fault.isdigit():
            writer.write(_whole(int(fault), b'{"error": "no"}'))
            return True
        if fault == "break":
            return False
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        if fault == "hang":
            await asyncio.sleep(3600)
        if self.hold is not None:
            await self.hold.wait()
        chat = "messages" in body
        for at in range(body["max_tokens"]):
            if fault == "error" and at:
                _event(writer, {"error": {"message": "lost"}})
                break
            word = f" w{at}"
            choice = {"delta": {"content": word}} if chat else {"text": word}
            _event(writer, {"choices": [choice], "usage": None})
            await writer.drain()
            await asyncio.sleep(0)
            if fault == "cut" and at:
                writer.write(b"0\r\n\r\n")
                return True
        usage = {
            "prompt_tokens": len(prompt_of(body).split()),
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        _event(writer, {"choices": [], "usage": usage})
        self.open.discard(number)  # before the client may ask again
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        return True


def prompt_of(body: dict[str, Any]) -> str:
    if "messages" in body:
        return " ".join(each["content"] for each in body["messages"])
    return body["prompt"]


def _whole(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    writer.write(_chunk(b"data: " + json.dumps(body).encode() + b"\n\n"))


@asynccontextmanager
async def serving() -> AsyncGenerator[Server]:
    """One on a free port."""
    made = Server()
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    made.url = f"http://127.0.0.1:{port}"
    yield made
    listening.close()
