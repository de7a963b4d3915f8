"""Time to first token of a prompt that is new, and of the same prompt once more.

    make up                                   # in one terminal
    .venv/bin/python ops/bench/reuse_ttft.py  # in another

Each pair sends a prompt that nobody has sent before (cold), then the same prompt again
(warm). The figure is the ratio warm / cold within a pair, so the machine's speed drops
out; ``cached_tokens`` of both answers says why.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass

import httpx

WORDS = [
    "river",
    "stone",
    "lantern",
    "harvest",
    "copper",
    "window",
    "garden",
    "winter",
    "letter",
    "morning",
    "market",
    "bridge",
    "violin",
    "thunder",
    "meadow",
    "captain",
    "orchard",
    "silver",
    "candle",
    "forest",
    "engine",
    "harbour",
    "island",
    "pepper",
    "mirror",
    "saddle",
    "cotton",
    "planet",
    "rocket",
    "temple",
    "valley",
    "whisper",
    "yellow",
]


@dataclass(frozen=True, slots=True)
class Reply:
    """One streamed answer: seconds to its first token, and what usage said."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


def make_prompt(rng: random.Random, words: int) -> str:
    """Words in an order that nobody has sent before: no prefix is shared."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


def ask(client: httpx.Client, model: str, prompt: str) -> Reply:
    """Stream eight greedy tokens and time the first."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start_s = time.perf_counter()
    ttft_s = 0.0
    with client.stream("POST", "/v1/completions", json=body) as response:
        if not response.is_success:
            raise SystemExit(f"{response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if chunk["choices"] and not ttft_s:
                ttft_s = time.perf_counter() - start_s
            if chunk.get("usage"):
                usage = chunk["usage"]
    details = usage["prompt_tokens_details"]
    return Reply(ttft_s, usage["prompt_tokens"], details["cached_tokens"])


def main() -> None:
    """Measure and print a line a pair, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--words", type=int, default=1900, help="words in a prompt")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with httpx.Client(base_url=args.url, timeout=300) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        ask(client, model, make_prompt(rng, 50))  # first use of everything
        ratios: list[float] = []
        colds: list[float] = []
        for pair in range(args.pairs):
            prompt = make_prompt(rng, args.words)
            cold, warm = ask(client, model, prompt), ask(client, model, prompt)
            ratios.append(warm.ttft_s / cold.ttft_s)
            colds.append(cold.ttft_s)
            print(
                f"pair {pair}: {cold.prompt_tokens} tokens; "
                f"cold {cold.ttft_s * 1e3:.0f} ms ({cold.cached_tokens} cached), "
                f"warm {warm.ttft_s * 1e3:.0f} ms ({warm.cached_tokens} cached), "
                f"ratio {ratios[-1]:.3f}"
            )
    print(
        f"median: cold {statistics.median(colds) * 1e3:.0f} ms, "
        f"warm / cold {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
