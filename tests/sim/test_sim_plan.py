"""Plans: reuse measured exactly, and a no where pooling can't pay."""

from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console

from kvtide.cli.commands.plan_report import Question, answer
from kvtide.sim.hit_rates import TraceRequest, replay
from kvtide.sim.perf.rules import Rules
from kvtide.sim.perf.shapes import ClusterShape, read_cluster
from kvtide.sim.perf.workload import SimRequest, SyntheticText, synthetic
from kvtide.sim.plan.reuse import reuse_of
from kvtide.sim.plan.study import break_even, study
from kvtide.sim.plan.verdict import Verdict, judge
from kvtide.store.eviction import Policy

EXAMPLES = Path(__file__).parents[2] / "examples"
CHAT = SyntheticText(
    requests=45,
    requests_per_s=3.0,
    prompt_tokens=8000,
    output_tokens=40,
    turns=3,
    think_s=10.0,
)


def pair(**changes: float) -> ClusterShape:
    shape = read_cluster(EXAMPLES / "clusters" / "a800-llama3-70b.toml")
    text = msgspec.structs.replace(shape.text, prefills=1, decodes=1)
    node = msgspec.structs.replace(text.node, **changes)
    return ClusterShape(msgspec.structs.replace(text, node=node))


def verdict(text: SyntheticText, shape: ClusterShape) -> Verdict:
    requests = list(synthetic(text, 512, rate=1.0, seed=3))
    return judge(study(requests, shape, Rules(), lambda _: None))


def test_break_even_is_the_papers() -> None:
    for name, published in (("a800", 6), ("h800", 19)):
        shape = read_cluster(EXAMPLES / "clusters" / f"{name}-llama3-70b.toml")
        assert round(break_even(shape, 8192).nominal / 1e9) == published
    # longer prefixes cost more compute a token, so a slower network is enough
    assert break_even(pair(), 131_072).nominal < break_even(pair(), 8192).nominal


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 12), unique=True, max_size=5), max_size=20))
def test_reuse_distances_give_the_hits_of_any_pool(prompts: list[list[int]]) -> None:
    requests = [
        SimRequest(n, float(n), 512 * len(ids) + 1, 1, tuple(ids))
        for n, ids in enumerate(prompts)
    ]
    found = reuse_of(requests, 512)
    for size in (1, 2, 5, 20):
        seen: list[int] = []
        hits = 0
        for block in (block for ids in prompts for block in ids):
            hits += block in seen[-size:]
            if block in seen:
                seen.remove(block)
            seen.append(block)
        assert int((found.distance < size).sum()) == hits
    trace = [TraceRequest(0.0, 1, 1, tuple(ids)) for ids in prompts]
    assert replay(trace, 1000, Policy.LRU).hits == len(found.distance)


def test_short_prompts_are_not_worth_a_pool() -> None:
    short = msgspec.structs.replace(CHAT, prompt_tokens=200, turns=1)
    found = verdict(short, pair())
    assert not found.pool
    assert "coupled" in found.advice
    assert any("short" in reason for reason in found.reasons)
    assert any("again" in reason for reason in found.reasons)


def test_a_slow_network_is_not_worth_a_pool() -> None:
    found = verdict(CHAT, pair(network_bytes_per_s=1.5e9))
    assert not found.pool
    assert any("network is slow" in reason for reason in found.reasons)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.plots = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name in {"src", "href"} for name, _ in attrs)
        if tag not in {"meta", "path", "polyline"}:
            self.open.append(tag)
        self.plots += tag == "svg"

    def handle_endtag(self, tag: str) -> None:
        if tag not in {"path", "polyline"}:
            assert self.open.pop() == tag


@pytest.mark.timeout(120)
def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    workload, html = tmp_path / "chat.toml", tmp_path / "plan.html"
    workload.write_text(
        "requests = 40\nrequests_per_s = 2.0\nprompt_tokens = 6000.0\n"
        "output_tokens = 30.0\nturns = 2\n"
    )
    cluster = tmp_path / "pair.toml"
    text = (EXAMPLES / "clusters" / "a800-llama3-70b.toml").read_text()
    text = text.replace("prefills = 8 ", "prefills = 1 ")
    cluster.write_text(text.replace("decodes = 8\n", "decodes = 1\n"))
    console = Console(record=True, width=200)
    asked = Question(workload, cluster, html, 40, 1.0, 30_000.0, 200.0)
    answer(asked, console)
    assert "goodput" in console.export_text()
    tags = Tags()
    tags.feed(html.read_text())
    assert not tags.open
    assert tags.plots == 6
