"""What the demo shows, in order; each act says what it claims and whether it held."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

from kvtide.cli.demo.stage import DemoError, Heard, Stage
from kvtide.cli.exits import FAILED
from kvtide.runtime import SystemClock

FIRST_ACT_LINES = 48
OTHER_PROMPTS = 4
STREAM_TOKENS = 48
KILL_AFTER = 8
WARM_SHARE = 0.6
"""A warm time to first token above this part of the cold one breaks the claim."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that the demo says, and whether it was so."""

    text: str
    held: bool


Act = Callable[[Stage, Console], list[Claim]]


def prompt(topic: str, lines: int) -> str:
    """A long prompt about something, unlike that about anything else. Pure."""
    body = [
        f"{number}. A fact about {topic} that a sailor noted on day {number}."
        for number in range(1, lines + 1)
    ]
    return "\n".join([f"Notes on {topic}.", *body, f"In short, {topic}"])


def demo(*, keep: bool, console: Console) -> int:
    """Play all acts; the exit code says whether every claim held.

    Raises:
        DemoError: the system did not start, or answered with an error.
    """
    clock = SystemClock()
    console.print(
        "A system of its own starts: gateway, conductor, prefill, decode, store, NATS. "
        "The first time, the demo model (98 MB) is fetched and converted."
    )
    claims: list[Claim] = []
    with Stage(clock) as stage:
        console.print(
            f"It answers at {stage.url}/v1; the dashboard is {stage.url}/ui/\n"
        )
        for title, act in ACTS:
            console.rule(title, align="left")
            for claim in act(stage, console):
                mark = "[green]held[/green]" if claim.held else "[red]broken[/red]"
                console.print(f"  {mark}: {claim.text}", highlight=False)
                claims.append(claim)
            console.print()
        broken = sum(not claim.held for claim in claims)
        console.print(f"{len(claims) - broken} of {len(claims)} claims held.")
        if keep:
            console.print(f"It goes on at {stage.url}/ui/ until Ctrl-C.")
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(1)
    return FAILED if broken else 0


def reuse(stage: Stage, console: Console) -> list[Claim]:
    """The same long prompt twice."""
    text = prompt("the tides", FIRST_ACT_LINES)
    cold, warm = stage.ask(text, 8), stage.ask(text, 8)
    _show(console, stage, "new", cold)
    _show(console, stage, "again", warm)
    console.print("  Look at: where the prompt's KV came from, in the second one.")
    return [
        Claim(
            f"{warm.cached_tokens} of {warm.prompt_tokens} tokens came from the pool",
            warm.cached_tokens > 0.8 * warm.prompt_tokens - 64,
        ),
        Claim(
            f"the first token came after {warm.ttft_ms:.0f} ms instead of "
            f"{cold.ttft_ms:.0f} ms",
            warm.ttft_ms < WARM_SHARE * cold.ttft_ms,
        ),
        Claim("both answers are the same", warm.ids == cold.ids),
    ]


def fail_over(stage: Stage, console: Console) -> list[Claim]:
    """A decode worker is killed in mid-stream."""
    text = prompt("a lighthouse", 12)
    undisturbed = stage.ask(text, STREAM_TOKENS)
    killed = False
    heard: Heard | None = None
    for heard in stage.stream(text, STREAM_TOKENS):
        if not killed and len(heard.ids) >= KILL_AFTER:
            stage.kill("decode-0")
            killed = True
    if heard is None:
        raise DemoError("the stream had no event")
    _show(console, stage, "decode-0 killed in mid-stream", heard)
    console.print(
        "  Look at: the fail-over in the timeline, and Cluster: what happened."
    )
    return [
        Claim("the stream went on to its end", len(heard.ids) == STREAM_TOKENS),
        Claim(
            f"its tokens are those of an undisturbed run, after a silence of "
            f"{heard.longest_gap_s:.1f} s",
            heard.ids == undisturbed.ids,
        ),
    ]


def reload(stage: Stage, console: Console) -> list[Claim]:
    """More prompts than DRAM holds; then the first one again, from SSD."""
    text = prompt("the tides", FIRST_ACT_LINES)
    for number in range(OTHER_PROMPTS):
        stage.ask(prompt(f"harbour {number}", FIRST_ACT_LINES), 1)
        console.print(f"  another prompt, {number + 1} of {OTHER_PROMPTS}")
    heard = stage.ask(text, 8)
    _show(console, stage, "the first prompt once more", heard)
    origins = stage.origins(heard.request)
    console.print(
        "  Look at: Cache, what is kept where and what went; and this request."
    )
    return [
        Claim(
            f"{origins.get('ssd', 0)} tokens were found on the SSD, "
            f"{origins.get('host', 0)} in DRAM",
            origins.get("ssd", 0) > 0,
        ),
        Claim(
            f"{heard.cached_tokens} of {heard.prompt_tokens} tokens were not computed "
            "again",
            heard.cached_tokens > 0,
        ),
    ]


ACTS: tuple[tuple[str, Act], ...] = (
    ("1. A prompt, and the same again", reuse),
    ("2. A worker dies in mid-stream", fail_over),
    ("3. Out of DRAM, back from SSD", reload),
)


def _show(console: Console, stage: Stage, name: str, heard: Heard) -> None:
    console.print(
        f"  {name}: {heard.prompt_tokens} prompt tokens, {heard.cached_tokens} of them "
        f"cached; first token after {heard.ttft_ms:.0f} ms\n    {stage.page(heard)}",
        highlight=False,
    )
