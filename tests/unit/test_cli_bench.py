"""``kvtide bench`` against a server that answers as a gateway does."""

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from kvtide.cli.commands.bench import BenchError, bench
from kvtide.runtime import ConfigError


class Gateway(http.server.BaseHTTPRequestHandler):
    """Hits the cache for what it was asked before."""

    seen: set[str] = set()  # noqa: RUF012 - of one server, made anew by each test
    fails = False

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "m"}]}).encode())

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        body: dict[str, Any] = json.loads(self.rfile.read(length))
        if self.fails:
            self._answer(503, b'{"error": "overloaded"}')
            return
        prompt = body["prompt"]
        cached = 90 if prompt in self.seen else 0
        self.seen.add(prompt)
        usage = {
            "prompt_tokens": 100,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        events: list[dict[str, Any]] = [
            {"choices": [{"text": "a"}]},
            {"choices": [{"text": "b"}]},
            {"choices": [], "usage": usage},
        ]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._answer(200, "".join([": ping\n\n", *lines, "data: [DONE]\n\n"]).encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        pass

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def gateway() -> Iterator[str]:
    Gateway.seen, Gateway.fails = set(), False
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(10)


def run(url: str, console: Console, *, as_json: bool = False) -> None:
    bench(
        url,
        rounds=2,
        prompt_tokens=100,
        output_tokens=2,
        as_json=as_json,
        console=console,
    )


def test_each_round_is_cold_and_then_warm(
    gateway: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(gateway, Console(), as_json=True)
    rounds = json.loads(capsys.readouterr().out)
    assert [item["cold"]["cached_tokens"] for item in rounds] == [0, 0]
    assert [item["warm"]["cached_tokens"] for item in rounds] == [90, 90]
    assert all(item["cold"]["ttft_ms"] > 0 for item in rounds)


def test_the_table_tells_the_ratio(
    gateway: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(gateway, Console(width=120))
    out = capsys.readouterr().out
    assert "90 of 100" in out
    assert "times faster" in out


def test_what_goes_wrong_is_said(gateway: str) -> None:
    with pytest.raises(ConfigError):
        run("ftp://x", Console())
    with pytest.raises(BenchError, match="no kvtide answers"):
        run("http://127.0.0.1:1", Console())
    Gateway.fails = True
    with pytest.raises(BenchError, match=r"503: .*overloaded"):
        run(gateway, Console())
