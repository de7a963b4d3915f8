"""Asks a process whether it is ready, over HTTP or by NATS's greeting."""

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import cast

PROBE_TIMEOUT_S = 2.0
_MOST_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class HttpProbe:
    """Ready when ``GET path`` answers 200."""

    host: str
    port: int
    path: str = "/readyz"


@dataclass(frozen=True, slots=True)
class GreetingProbe:
    """Ready when whoever connects is greeted with ``greeting``."""

    host: str
    port: int
    greeting: bytes = b"INFO "


Probe = HttpProbe | GreetingProbe


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """``state`` is what a process that is not ready says it is doing."""

    ready: bool
    state: str


async def ask(probe: Probe) -> ProbeResult:
    """One answer within ``PROBE_TIMEOUT_S``; no answer is not ready."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            if isinstance(probe, GreetingProbe):
                return await _ask_greeting(probe)
            status, body = await fetch(probe.host, probe.port, "GET", probe.path)
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return ProbeResult(ready=False, state="no answer yet")
    return ProbeResult(ready=status == 200, state=_state(body))  # noqa: PLR2004 - HTTP's OK


async def fetch(
    host: str, port: int, method: str, path: str, body: bytes = b""
) -> tuple[int, bytes]:
    """One HTTP exchange on a connection of its own: status and body.

    The caller limits the time.

    Raises:
        OSError: no connection, or it broke.
        ValueError: the answer is not HTTP.
    """
    reader, writer = await asyncio.open_connection(host, port, limit=_MOST_BYTES)
    try:
        head = (
            f"{method} {path} HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        answer = await _read_all(reader)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    lines, _, content = answer.partition(b"\r\n\r\n")
    words = lines.split(b"\r\n", 1)[0].split(b" ")
    if not words[0].startswith(b"HTTP/1.") or len(words) < 2:  # noqa: PLR2004
        message = "the answer is not HTTP"
        raise ValueError(message)
    return int(words[1]), content


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    answer = b""
    while len(answer) < _MOST_BYTES:
        chunk = await reader.read(_MOST_BYTES)
        if not chunk:
            break
        answer += chunk
    return answer


async def _ask_greeting(probe: GreetingProbe) -> ProbeResult:
    reader, writer = await asyncio.open_connection(probe.host, probe.port)
    try:
        said = await reader.readexactly(len(probe.greeting))
    finally:
        writer.close()
    return ProbeResult(ready=said == probe.greeting, state="")


def _state(body: bytes) -> str:
    """``state`` and the first detail of a readiness body, if that is what it is."""
    try:
        parsed = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(parsed, dict):
        return ""
    fields = cast("dict[str, object]", parsed)
    words = [str(value) for key, value in fields.items() if key != "ready"]
    return " ".join(words)[:80]
