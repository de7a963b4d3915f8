"""Asks a running kvtide the same thing in several ways, and compares the answers.

``python3 ask.py http://127.0.0.1:8000``; needs nothing but Python's standard library.
"""

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TIMEOUT_S = 300
LONG = " ".join(f"{n} times {n} is {n * n}." for n in range(1, 90))


def call(url: str, body: dict[str, Any] | None = None) -> bytes:
    """The body of the answer to a GET, or to a POST of ``body``."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(  # noqa: S310 - the tester's own server
        url, data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
        return answer.read()


def complete(base: str, model: str, prompt: str) -> tuple[str, int]:
    """The greedy text, and how many prompt tokens came from the cache."""
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    answer = json.loads(call(f"{base}/v1/completions", body))
    usage = answer["usage"]
    assert usage["completion_tokens"] > 0, usage
    return answer["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]


def stream(base: str, model: str, prompt: str) -> str:
    """The greedy text, streamed."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 0,
        "stream": True,
    }
    raw = call(f"{base}/v1/completions", body).decode()
    events = [line[6:] for line in raw.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", events[-1]
    parsed = [json.loads(event) for event in events[:-1]]
    return "".join(
        choice["text"] for event in parsed for choice in event.get("choices", ())
    )


def main(base: str) -> None:
    """Check; an assertion that fails is the report."""
    model = json.loads(call(f"{base}/v1/models"))["data"][0]["id"]
    chat = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    said = json.loads(call(f"{base}/v1/chat/completions", chat))
    text = said["choices"][0]["message"]["content"]
    assert "Paris" in text, text
    cold, _ = complete(base, model, LONG)
    warm, cached = complete(base, model, LONG)
    assert warm == cold, (cold, warm)
    assert cached > 0, "the second identical prompt hit nothing"
    streamed = stream(base, model, LONG)
    assert streamed == cold, (cold, streamed)
    with ThreadPoolExecutor(4) as pool:
        prompts = [f"{LONG} Question {n}:" for n in range(4)]
        together = list(pool.map(lambda p: complete(base, model, p)[0], prompts))
    alone = [complete(base, model, prompt)[0] for prompt in prompts]
    assert together == alone, (together, alone)
    sys.stdout.write(f"{model} answers: {text!r}; {cached} cached tokens\n")


main(sys.argv[1])
