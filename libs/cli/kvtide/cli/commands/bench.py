"""``kvtide bench``: time to first token, cold and from the cache, of what runs.

Each round asks a long prompt that nobody asked before, then the same one again. What
the cache is worth is the ratio of the two times to the first token.
"""

import http.client
import json
import secrets
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from kvtide.runtime import Clock, ConfigError, KvtideError, SystemClock

TIMEOUT_S = 600.0
TOKENS_PER_LINE = 13.3
"""Of the demo model's tokenizer; the answer tells what it really was."""

_OK = 200
_DATA = b"data: "


class BenchError(KvtideError):
    """The server did not answer as expected."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One streamed answer. Times in milliseconds; ``tbt_ms`` is the mean."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: float
    tbt_ms: float


@dataclass(frozen=True, slots=True)
class Round:
    """The same prompt twice."""

    cold: Timing
    warm: Timing


@dataclass(frozen=True, slots=True)
class Server:
    """Where to ask; a connection of its own for each request."""

    host: str
    port: int

    def ask(self, model: str, prompt: str, output_tokens: int, clock: Clock) -> Timing:
        """One greedy streamed completion, timed from the request to each token.

        Raises:
            BenchError: an error instead of tokens.
        """
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started_s = clock.monotonic()
        arrivals_s: list[float] = []
        usage: Mapping[str, Any] = {}
        for event in self._events(body):
            if "error" in event:
                raise BenchError(str(event["error"]))
            if any(choice.get("text") for choice in event.get("choices", ())):
                arrivals_s.append(clock.monotonic())
            usage = event.get("usage") or usage
        if not arrivals_s or not usage:
            raise BenchError("the answer had no text or no usage")
        count = int(usage["completion_tokens"])
        spread_s = arrivals_s[-1] - arrivals_s[0]
        return Timing(
            prompt_tokens=int(usage["prompt_tokens"]),
            cached_tokens=int(usage["prompt_tokens_details"]["cached_tokens"]),
            output_tokens=count,
            ttft_ms=1000 * (arrivals_s[0] - started_s),
            tbt_ms=1000 * spread_s / max(1, count - 1),
        )

    def model(self) -> str:
        """The name of the model that is served.

        Raises:
            BenchError: no kvtide there.
        """
        connection = http.client.HTTPConnection(self.host, self.port, timeout=10)
        try:
            connection.request("GET", "/v1/models")
            answer = json.loads(connection.getresponse().read())
            return cast("str", answer["data"][0]["id"])
        except (OSError, ValueError, LookupError) as error:
            message = f"no kvtide answers at {self.host}:{self.port}: {error}"
            raise BenchError(message) from error
        finally:
            connection.close()

    def _events(self, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        try:
            connection.request(
                "POST",
                "/v1/completions",
                json.dumps(body),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            if response.status != _OK:
                text = response.read(2000).decode(errors="replace")
                raise BenchError(f"{response.status}: {text}")
            for line in response:
                if line.startswith(_DATA) and b"[DONE]" not in line:
                    yield json.loads(line[len(_DATA) :])
        except OSError as error:
            raise BenchError(f"the connection broke: {error}") from error
        finally:
            connection.close()


def bench(
    url: str,
    *,
    rounds: int,
    prompt_tokens: int,
    output_tokens: int,
    as_json: bool,
    console: Console,
) -> None:
    """Measure and print.

    Raises:
        ConfigError: not an HTTP URL.
        BenchError: the server does not answer as expected.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(f"{url!r} is no http:// URL", key="url")
    server = Server(parts.hostname, parts.port or 80)
    clock = SystemClock()
    model = server.model()
    # the first answer of a process pays for what is made once
    server.ask(model, "Hello", 2, clock)
    done: list[Round] = []
    for number in range(rounds):
        prompt = _unseen_prompt(prompt_tokens)
        cold = server.ask(model, prompt, output_tokens, clock)
        warm = server.ask(model, prompt, output_tokens, clock)
        done.append(Round(cold, warm))
        if not as_json:
            console.print(
                f"round {number + 1}: {cold.prompt_tokens} tokens, "
                f"cold {cold.ttft_ms:.0f} ms, again {warm.ttft_ms:.0f} ms "
                f"({warm.cached_tokens} from the cache)",
                highlight=False,
            )
    if as_json:
        console.print_json(json.dumps([asdict(item) for item in done]))
    else:
        console.print(_summary(done))


def _unseen_prompt(tokens: int) -> str:
    """About ``tokens`` long, and different from the first word on."""
    lines = max(1, round(tokens / TOKENS_PER_LINE))
    numbers = range(1, lines + 1)
    text = " ".join(f"{n} times {n} is {n * n}." for n in numbers)
    return f"Notebook {secrets.token_hex(8)}. {text}"


def _summary(rounds: list[Round]) -> Table:
    table = Table(box=None)
    for title in ("median of", "time to first token", "time between tokens", "cached"):
        table.add_column(title, justify="right")
    for name, timings in (
        ("a new prompt", [item.cold for item in rounds]),
        ("the same again", [item.warm for item in rounds]),
    ):
        table.add_row(
            name,
            f"{statistics.median(timing.ttft_ms for timing in timings):.0f} ms",
            f"{statistics.median(timing.tbt_ms for timing in timings):.0f} ms",
            f"{statistics.median(timing.cached_tokens for timing in timings):.0f} of "
            f"{statistics.median(timing.prompt_tokens for timing in timings):.0f}",
        )
    ratio = statistics.median(item.cold.ttft_ms / item.warm.ttft_ms for item in rounds)
    table.caption = f"the cache makes the first token {ratio:.1f} times faster"
    return table
