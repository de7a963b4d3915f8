"""Whether times tell one tenant what another one has cached.

    python ops/bench/timing_isolation.py --rounds 100 --out ops/bench/results/timing_isolation.json

Starts a system of its own with two tenants. In each round tenant ``a`` asks a new prompt,
and tenant ``b`` one of its own; then ``b`` asks, in random order, three prompts of equal
length and takes the time until the first token of each:

- *theirs*: the prompt that ``a`` has just asked, and has in the cache;
- *cold*: one that nobody ever asked;
- *own*: the one that ``b`` has asked before. The control: this one is told by its time.

The differences to *cold* are tested by flipping their signs (a permutation test of paired
differences, two-sided). Times keep the secret if *theirs* can't be told from *cold* while
*own* can, and what *theirs* may differ by at most (95 %) is little beside what a hit saves.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.e2e.system import System

KINDS = ("theirs", "cold", "own")
FLIPS = 10_000
WARM_UP = 3
HEARD_S = 30.0
VOCABULARY = range(1000, 40_000)
TOLD = 0.001
"""The control must be told at this level."""

SECRET_AT = 0.01
MOST_SHARE = 0.2
"""What theirs may differ by, at most, of what a hit saves."""


@dataclass(frozen=True)
class Difference:
    """To cold, in ms; ``p``: how often chance alone makes one as large."""

    mean_ms: float
    low_ms: float
    high_ms: float
    p: float


def difference(pairs: Sequence[tuple[float, float]], rng: random.Random) -> Difference:
    """Of paired times: the mean, its 95 % interval (bootstrap), and the test."""
    deltas = [one - other for one, other in pairs]
    mean = fmean(deltas)
    as_large = sum(
        abs(fmean([d if rng.getrandbits(1) else -d for d in deltas])) >= abs(mean)
        for _ in range(FLIPS)
    )
    means = sorted(fmean(rng.choices(deltas, k=len(deltas))) for _ in range(2000))
    return Difference(mean, means[50], means[-51], (as_large + 1) / (FLIPS + 1))


class Tenant:
    """Somebody with a key."""

    def __init__(self, url: str, key: str, model: str) -> None:
        """``key`` as ``kvtide keys make`` shows it."""
        headers = {"authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=120)
        self._model = model

    def known(self) -> bool:
        """Whether the gateway takes the key yet."""
        return self._http.get("/v1/models").is_success

    def ask(self, prompt: Sequence[int]) -> tuple[float, int]:
        """Milliseconds until the first token, and tokens that were cached."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began_s = time.perf_counter()
        first_s, cached = 0.0, 0
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                first_s = first_s or time.perf_counter()
                usage = json.loads(line[6:]).get("usage")
                if usage:
                    cached = usage["prompt_tokens_details"]["cached_tokens"]
        return (first_s - began_s) * 1e3, cached


def kvtide(state: Path, *words: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "kvtide.cli", *words, "--state-dir", str(state)]
    return subprocess.check_output(command, text=True)  # noqa: S603


def tenant(system: System, name: str, model: str) -> Tenant:
    """A new tenant of a running system."""
    kvtide(system.state, "tenants", "add", name)
    made = json.loads(kvtide(system.state, "keys", "make", name, "--json"))
    told = Tenant(system.url, made["key"], model)
    end_s = time.perf_counter() + HEARD_S
    while not told.known():
        if time.perf_counter() > end_s:
            raise TimeoutError("the gateway does not hear of the key")
        time.sleep(0.2)
    return told


def measure(
    system: System, rounds: int, tokens: int, rng: random.Random
) -> dict[str, object]:
    """Ask, and say what the times tell."""
    model = system.model
    a, b = (tenant(system, name, model) for name in ("a", "b"))
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cached: dict[str, list[int]] = {kind: [] for kind in KINDS}

    def prompt() -> list[int]:
        return rng.choices(VOCABULARY, k=tokens)

    for number in range(rounds + WARM_UP):
        prompts = {kind: prompt() for kind in KINDS}
        a.ask(prompts["theirs"])
        b.ask(prompts["own"])
        for kind in rng.sample(KINDS, k=3):
            took_ms, hit = b.ask(prompts[kind])
            if number >= WARM_UP:
                times[kind].append(took_ms)
                cached[kind].append(hit)
    theirs, own = (
        difference(list(zip(times[kind], times["cold"], strict=True)), rng)
        for kind in ("theirs", "own")
    )
    saves_ms = -own.mean_ms
    most_ms = max(abs(theirs.low_ms), abs(theirs.high_ms))
    return {
        "rounds": rounds,
        "prompt_tokens": tokens,
        "ttft_ms": {kind: round(median(times[kind]), 2) for kind in KINDS},
        "cached_tokens": {kind: max(cached[kind]) for kind in KINDS},
        "theirs_minus_cold": asdict(theirs),
        "own_minus_cold": asdict(own),
        "theirs_differs_by_at_most_share_of_a_hit": round(most_ms / saves_ms, 4),
        "keeps_the_secret": (
            max(cached["theirs"] + cached["cold"]) == 0
            and own.p < TOLD
            and own.mean_ms < 0
            and theirs.p > SECRET_AT
            and most_ms < MOST_SHARE * saves_ms
        ),
        "times_ms": {kind: [round(each, 2) for each in times[kind]] for kind in KINDS},
    }


def main() -> int:
    """Run; 1 if times tell what they should not, or the control does not work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        with System(state) as system:
            found = measure(
                system, given.rounds, given.tokens, random.Random(given.seed)
            )
    shown = {key: value for key, value in found.items() if key != "times_ms"}
    print(json.dumps(shown, indent=1))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found["keeps_the_secret"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
