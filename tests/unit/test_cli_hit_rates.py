"""``kvtide sim hit-rates``: tables, JSON, and what it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtide.cli.commands.hit_rates import Wanted
from kvtide.cli.commands.sim import sim_app
from kvtide.runtime import ConfigError
from kvtide.sim.hit_report import (
    PUBLISHED,
    Line,
    Trace,
    lines_of,
    markdown,
    measure,
    rate_text,
    size_text,
)
from kvtide.store.eviction import Policy


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "conversation_trace.jsonl"
    chains = ([1, 2, 3], [1, 2, 4], [5], [1, 2, 3])
    lines = [
        {"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": ids}
        for ids in chains
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(sim_app, ["hit-rates", *arguments])
    return result.exit_code, result.stdout


def test_json_has_every_replay(trace: Path) -> None:
    code, text = run(str(trace), "--policy", "lru", "--tokens", "1e3,1e6", "--json")
    rows = json.loads(text)
    assert code == 0
    assert [(row["tokens"], row["tail_first"]) for row in rows] == [
        (1000, False), (10**6, False), (1000, True), (10**6, True),
    ]  # fmt: skip
    assert rows[1]["hit_rate"] == rows[1]["prefix_hit_rate"] == 0.5
    assert {row["trace"] for row in rows} == {"conversation"}


def test_the_table_stands_beside_the_published_line(trace: Path) -> None:
    code, text = run(str(trace), "--policy", "s3fifo", "--tokens", "1e6")
    assert code == 0
    assert "published" in text
    assert ".090" in text
    assert ".500" in text


def test_markdown_has_all_sections(trace: Path) -> None:
    text = markdown([Trace.read(trace)], "the command")
    assert "Made by `the command`" in text
    assert text.count("\n## ") == 3
    assert all(f"| {policy} | tail first | prefix |" in text for policy in Policy)


def test_lines_pair_all_hits_with_usable_ones(trace: Path) -> None:
    read = Trace.read(trace)
    rows = list(measure(read, [Policy.LRU], [10**6]))
    published, *lines = lines_of(rows, "conversation", [10**6])
    assert published.rates == (PUBLISHED["conversation"][10**6],)
    assert [(line.order, line.counted) for line in lines] == [
        ("front first", "all"), ("front first", "prefix"),
        ("tail first", "all"), ("tail first", "prefix"),
    ]  # fmt: skip
    assert lines[0] == Line("lru", "front first", "all", (0.5,))
    assert lines_of([], "unknown", [1]) == []


@pytest.mark.parametrize(
    ("policy", "tokens"),
    [("random", "1e5"), ("lru", "many"), ("lru", "0"), ("lru", "inf"), ("lru", "")],
)
def test_what_can_not_be_replayed_is_named(policy: str, tokens: str) -> None:
    with pytest.raises(ConfigError):
        Wanted.parse([Path("x")], [policy], tokens)


def test_numbers_are_short() -> None:
    assert [size_text(size) for size in (10**5, 3 * 10**6, 1234, 5)] == [
        "1e5", "3e6", "1.234e3", "5e0",
    ]  # fmt: skip
    assert (rate_text(0.1364), rate_text(None), rate_text(1.0)) == (".136", "", "1.000")
