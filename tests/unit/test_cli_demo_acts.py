"""What the demo claims, when the system is not as good as it says."""

from collections.abc import Iterator
from typing import cast

import pytest
from rich.console import Console

from kvtide.cli.demo import guide
from kvtide.cli.demo.stage import Heard, Stage


class Poor:
    """A system that caches nothing, and forgets where it was when a worker dies."""

    def __init__(self) -> None:
        self.killed: list[str] = []

    def ask(self, prompt: str, tokens: int) -> Heard:
        del prompt
        ids = list(range(tokens))
        times = [2.0 + number for number in ids]
        return Heard("r", ids, times, 1.0, prompt_tokens=900)

    def stream(self, prompt: str, tokens: int) -> Iterator[Heard]:
        del prompt
        heard = Heard("r", prompt_tokens=100)
        for number in range(tokens - 1):
            heard.ids.append(number if number < guide.KILL_AFTER else 0)
            heard.at_s.append(float(number))
            yield heard

    def kill(self, child: str) -> None:
        self.killed.append(child)

    def origins(self, request: str) -> dict[str, int]:
        del request
        return {"computed": 900}

    def page(self, heard: Heard) -> str:
        return heard.request


@pytest.mark.parametrize("title", [title for title, _ in guide.ACTS])
def test_a_claim_that_is_not_so_is_broken(title: str) -> None:
    poor = Poor()
    act = dict(guide.ACTS)[title]
    claims = act(cast("Stage", poor), Console(quiet=True))
    held = [claim.text for claim in claims if claim.held]
    assert held in ([], ["both answers are the same"])
    if "dies" in title:
        assert poor.killed == ["decode-0"]


def test_prompts_of_two_topics_share_no_prefix() -> None:
    one, other = guide.prompt("a", 3), guide.prompt("b", 3)
    assert one.splitlines()[0] != other.splitlines()[0]
    assert one == guide.prompt("a", 3)
