"""Clients of raw bytes that go whenever they are told to, in whichever way."""

import json
import secrets
import socket
from collections.abc import Sequence
from typing import Any, Self

from tests.chaos.link import RESET_AT_CLOSE
from tests.e2e.system import Client

LIMIT_S = 150.0
KIB = 1 << 10


class Leaver:
    """One connection to a gateway's port, and one request over it: ``name``."""

    def __init__(self, port: int) -> None:
        self.name = f"leaver-{secrets.token_hex(6)}"
        self._sock = socket.create_connection(("127.0.0.1", port), LIMIT_S)
        self._sock.settimeout(LIMIT_S)
        self._got = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sock.close()

    def ask(self, body: dict[str, Any], share: float = 1.0) -> None:
        """Send the request, or the head and so much of its body."""
        told = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
            f"X-Request-Id: {self.name}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(told)}\r\n\r\n"
        )
        self._sock.sendall(head.encode() + told[: round(len(told) * share)])

    def hear(self, events: int) -> None:
        """Wait for so many events of the stream.

        Raises:
            AssertionError: it was refused, or ended before.
        """
        while self._got.count(b"data: ") < events:
            chunk = self._sock.recv(64 * KIB)
            self._got += chunk
            assert chunk, f"it ended: {self._got[-200:]!r}"
            assert self._got.startswith(b"HTTP/1.1 200"[: len(self._got)]), self._got

    def broken_off(self) -> None:
        """Read what there is to the end, before which it was to be broken off.

        Raises:
            AssertionError: the answer came whole.
        """
        try:
            while chunk := self._sock.recv(64 * KIB):
                self._got = self._got[-64:] + chunk
        except ConnectionResetError:
            return
        assert b"[DONE]" not in self._got, "it was never broken off"

    def leave(self, *, abruptly: bool) -> None:
        """By a reset, or as a program does that closes its file."""
        if abruptly:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
        self._sock.close()


def long_body(client: Client, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    """A stream that is far from its end whenever its client leaves."""
    return {
        "model": client.model,
        "prompt": list(prompt),
        "max_tokens": 1200,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **fields,
    }
