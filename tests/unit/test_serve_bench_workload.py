"""Loads of ``kvtide bench serve`` and what is made of their answers: pure parts."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from kvtide.cli.serve_bench.counters import counts, grown
from kvtide.cli.serve_bench.dialogue import Api, Dialogue, Style
from kvtide.cli.serve_bench.errors import EndedTwiceError
from kvtide.cli.serve_bench.figures import (
    Targets,
    gaps_ms,
    is_good,
    longest_tenth_ms,
    summary,
    timing,
)
from kvtide.cli.serve_bench.outcomes import Exchange, Ledger, Outcome, Usage
from kvtide.cli.serve_bench.plot import plot
from kvtide.cli.serve_bench.reading import Reading, of_status
from kvtide.cli.serve_bench.traces import Scale, of_trace
from kvtide.cli.serve_bench.words import WORDS, Kind, Piece, text_of
from kvtide.cli.serve_bench.workload import (
    Ask,
    Conversation,
    Mix,
    fitted,
    of_mix,
    poisson,
)
from kvtide.sim.hit_rates import BLOCK_TOKENS, TraceRequest

seeds = st.integers(0, 1000)
counted = st.integers(1, 60)


@given(
    seeds, st.sampled_from(Kind), st.integers(0, 1 << 40), counted, st.integers(0, 60)
)
def test_equal_pieces_are_equal_text_as_far_as_both_go(
    seed: int, kind: Kind, key: int, words: int, more: int
) -> None:
    short = text_of([Piece(kind, key, words)], seed)
    long = text_of([Piece(kind, key, words + more)], seed)
    assert long.split()[:words] == short.split()
    assert set(short.split()) <= set(WORDS)


def test_other_pieces_and_seeds_are_other_text() -> None:
    texts = {
        text_of([Piece(kind, key, 20)], seed)
        for kind in Kind
        for key in range(20)
        for seed in range(3)
    }
    assert len(texts) == len(Kind) * 20 * 3


mixes = st.builds(
    Mix,
    conversations=st.integers(1, 12),
    prompt_tokens=counted,
    output_tokens=counted,
    spread=st.sampled_from([0.0, 0.7]),
    prefixes=st.integers(1, 4),
    prefix_tokens=st.integers(0, 30),
    turns=st.integers(1, 4),
    think_s=st.sampled_from([0.0, 2.0]),
)


@given(mixes, seeds)
def test_a_mix_is_what_its_rules_say_and_the_same_again(mix: Mix, seed: int) -> None:
    made = of_mix(mix, seed)
    assert made == of_mix(mix, seed)
    assert [each.number for each in made] == list(range(mix.conversations))
    assert {len(each.turns) for each in made} == {mix.turns}
    own = [p.key for c in made for a in c.turns for p in a.pieces if p.kind is Kind.OWN]
    assert len(own) == len(set(own)) == mix.conversations * mix.turns
    for each in made:
        shared = [p for a in each.turns for p in a.pieces if p.kind is Kind.PREFIX]
        assert [p.words for p in shared] == [mix.prefix_tokens] * bool(
            mix.prefix_tokens
        )
        assert each.turns[0].think_s == 0
    if not mix.spread:
        assert {a.output_tokens for c in made for a in c.turns} == {mix.output_tokens}


@given(mixes, seeds, st.floats(0.1, 100))
def test_poisson_arrivals_only_grow(mix: Mix, seed: int, per_s: float) -> None:
    begun = poisson(of_mix(mix, seed), per_s, seed)
    times = [each.at_s for each in begun]
    assert all(a < b for a, b in pairwise([0.0, *times]))
    assert begun == poisson(of_mix(mix, seed), per_s, seed)


def test_poisson_arrivals_have_their_rate() -> None:
    begun = poisson(of_mix(Mix(4000, 1, 1), 0), 5.0, 0)
    assert begun[-1].at_s == pytest.approx(800, rel=0.1)


@given(mixes, seeds, st.integers(2, 200), st.integers(1, 100))
def test_what_is_kept_fits(
    mix: Mix, seed: int, most_tokens: int, most_output: int
) -> None:
    made = of_mix(mix, seed)
    kept, cut = fitted(made, most_tokens, most_output)
    assert [each.number for each in kept] == [each.number for each in made]
    for each in kept:
        assert each.turns
        total = sum(ask.words + ask.output_tokens for ask in each.turns)
        assert total <= most_tokens
        assert all(1 <= ask.output_tokens <= most_output for ask in each.turns)
        assert all(ask.words >= 1 for ask in each.turns)
    if cut == 0:
        assert [len(c.turns) for c in kept] == [len(c.turns) for c in made]


requests = st.builds(
    TraceRequest,
    timestamp=st.integers(0, 100_000).map(float),
    input_length=st.integers(1, 4 * BLOCK_TOKENS),
    output_length=st.integers(0, 500),
    hash_ids=st.lists(st.integers(0, 9), max_size=6).map(tuple),
)
scales = st.builds(
    Scale,
    speed=st.floats(0.1, 50),
    length=st.floats(0.01, 2),
    skip=st.integers(0, 3),
    requests=st.integers(0, 5),
)


@given(st.lists(requests, max_size=10), scales)
def test_a_trace_is_scaled(trace: list[TraceRequest], scale: Scale) -> None:
    made = of_trace(trace, scale)
    ordered = sorted(trace, key=lambda each: each.timestamp)[scale.skip :]
    assert len(made) == len(ordered[: scale.requests or None])
    for each, request in zip(made, ordered, strict=False):
        (ask,) = each.turns
        assert ask.words == max(1, round(request.input_length * scale.length))
        assert ask.output_tokens == max(1, round(request.output_length * scale.length))
        since_s = (request.timestamp - ordered[0].timestamp) / 1000
        assert each.at_s == pytest.approx(since_s / scale.speed)


def test_equal_block_ids_are_equal_text_and_no_others() -> None:
    trace = [
        TraceRequest(float(at), 1600, 10, ids)
        for at, ids in enumerate([(1, 2, 3, 4), (1, 2, 3, 9), (1, 7, 3, 4)])
    ]
    words = [
        text_of(each.turns[0].pieces, 0).split()
        for each in of_trace(trace, Scale(length=0.25))
    ]
    assert [len(each) for each in words] == [400, 400, 400]
    assert words[0][:384] == words[1][:384]
    assert words[0][384:] != words[1][384:]
    assert words[0][:128] == words[2][:128]
    assert words[0][128:256] != words[2][128:256]


def test_a_sample_keeps_conversations_whole() -> None:
    trace = [
        TraceRequest(float(at), 1600, 10, (0, 1 + at % 400, 10_000 + at))
        for at in range(1200)
    ]
    made = of_trace(trace, Scale(sample=0.25))
    seconds = [each.turns[0].pieces[1].key for each in made]
    assert {seconds.count(key) for key in seconds} == {3}
    assert 60 <= len(set(seconds)) <= 140


# ---- what is read

USAGE = (
    'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, '
    '"prompt_tokens_details": {"cached_tokens": 4}}}'
)


def test_an_answer_is_read() -> None:
    reading = Reading()
    for at_s, line in enumerate(
        (
            ": ping",
            'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
            'data: {"choices": [{"delta": {"content": "a"}}], "usage": null}',
            'data: {"choices": [{"text": "b", "finish_reason": null}]}',
            'data: {"choices": [{"text": "", "finish_reason": "length"}]}',
            USAGE,
            "data: [DONE]",
            'data: {"choices": [{"text": "late"}]}',
        )
    ):
        reading.line(line, float(at_s))
    assert reading.close() is Outcome.COMPLETED
    assert reading.arrivals_s == [2.0, 3.0]
    assert reading.text == "ab"
    assert reading.usage == Usage(7, 2, 4)
    assert reading.finish_reason == "length"


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        ([], Outcome.CUT),
        (['data: {"choices": [{"text": "a"}]}'], Outcome.CUT),
        (
            ['data: {"choices": [{"text": "a", "finish_reason": "stop"}]}'],
            Outcome.COMPLETED,
        ),
        (["data: [DONE]"], Outcome.BAD_ANSWER),
        (["data: {", "data: [DONE]"], Outcome.BAD_ANSWER),
        (['data: {"choices": 3}'], Outcome.BAD_ANSWER),
        (['data: {"error": {"message": "no"}}', "data: [DONE]"], Outcome.ERROR_EVENT),
    ],
)
def test_every_stream_ends_in_one_way(lines: list[str], outcome: Outcome) -> None:
    reading = Reading()
    for line in lines:
        reading.line(line, 0.0)
    assert reading.close() is outcome
    assert reading.close() is outcome
    assert (reading.detail == "") == (outcome is Outcome.COMPLETED)


@given(st.lists(st.text(max_size=40), max_size=10))
def test_no_stream_breaks_the_reader(lines: list[str]) -> None:
    reading = Reading()
    for line in lines:
        reading.line("data: " + line, 0.0)
    assert reading.close() in (Outcome.BAD_ANSWER, Outcome.CUT)


def test_statuses_have_outcomes() -> None:
    assert of_status(429, "later")[0] is Outcome.REFUSED
    assert of_status(503, "later")[0] is Outcome.REFUSED
    assert of_status(401, "who?") == (Outcome.HTTP_ERROR, "401: who?")


def test_a_body_is_what_the_api_wants() -> None:
    dialogue = Dialogue()
    for text in ("one two", " three", "four"):
        dialogue.say(text)
    style = Style("m", seed=3)
    assert b'"prompt":"one two three four"' in dialogue.body(Api.COMPLETIONS, style, 5)
    chat = dialogue.body(Api.CHAT, style, 5)
    assert b'{"role":"assistant","content":" three"},{"role":"user"' in chat
    assert b'"ignore_eos":true' in chat
    bare = Dialogue(["x"]).body(Api.CHAT, Style("m", ignore_eos=False), 5)
    assert b"ignore_eos" not in bare


# ---- what is booked

TWO = (
    Conversation(0, 0.0, (Ask((), 1), Ask((), 2), Ask((), 3))),
    Conversation(1, 0.0, (Ask((), 4),)),
)


def test_every_turn_has_one_outcome() -> None:
    ledger = Ledger(TWO)
    ledger.end(Exchange(0, 0, Outcome.TIMED_OUT, 1))
    ledger.skip_rest(TWO[0], 0)
    with pytest.raises(EndedTwiceError):
        ledger.end(Exchange(0, 2, Outcome.COMPLETED, 3))
    with pytest.raises(EndedTwiceError):
        ledger.end(Exchange(9, 0, Outcome.COMPLETED, 3))
    ends = [(e.conversation, e.turn, e.outcome, e.asked_tokens) for e in ledger.close()]
    assert ends == [
        (0, 0, Outcome.TIMED_OUT, 1),
        (0, 1, Outcome.SKIPPED, 2),
        (0, 2, Outcome.SKIPPED, 3),
        (1, 0, Outcome.INTERRUPTED, 4),
    ]


# ---- what is summed up


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_the_longest_tenth_lies_between_mean_and_maximum(gaps: list[float]) -> None:
    found = longest_tenth_ms(gaps)
    assert sum(gaps) / len(gaps) <= found * (1 + 1e-9)
    assert found <= max(gaps) * (1 + 1e-9)


def test_the_longest_tenth_is_rounded_up() -> None:
    assert longest_tenth_ms([1.0, 9.0]) == 9
    assert longest_tenth_ms([*([0.0] * 18), 6.0, 4.0]) == 5
    assert longest_tenth_ms([*([0.0] * 18), 6.0, 4.0, 2.0]) == 4


def test_tokens_that_come_together_have_no_gap() -> None:
    assert gaps_ms([1.0, 2.0], 4) == [1000.0, 0.0, 0.0]
    assert gaps_ms([1.0, 2.0], 0) == [1000.0]
    assert gaps_ms([1.0], 1) == []


def exchange(number: int, **changes: object) -> Exchange:
    """Due at 0, sent at 0.5 s, tokens at 1.0, 1.1 and 1.4 s."""
    fields: dict[str, object] = {
        "due_s": 0.0,
        "sent_s": 0.5,
        "ended_s": 1.5,
        "arrivals_s": (1.0, 1.1, 1.4),
        "usage": Usage(10, 3, 4),
    } | changes
    outcome = fields.pop("outcome", Outcome.COMPLETED)
    return Exchange(number, 0, outcome, 3, **fields)  # type: ignore[arg-type]


def test_times_count_from_when_a_request_was_due() -> None:
    found = timing(exchange(0))
    assert found is not None
    assert found.ttft_ms == pytest.approx(1000)
    assert found.tbt_ms == pytest.approx(300)
    assert found.tpot_ms == pytest.approx(200)
    assert found.e2e_ms == pytest.approx(1400)
    assert timing(exchange(0, outcome=Outcome.CUT)) is None
    assert is_good(found, Targets(1000.1, 300.1))
    assert not is_good(found, Targets(999, None))
    assert not is_good(found, Targets(None, 299))
    assert not is_good(None, Targets())


def test_a_summary_counts_all_and_times_what_completed() -> None:
    found = summary(
        [
            exchange(0),
            exchange(1, usage=Usage(10, 2, None), due_s=0.9),
            exchange(2, outcome=Outcome.REFUSED, usage=Usage(), arrivals_s=()),
            Exchange(3, 0, Outcome.SKIPPED, 3),
        ],
        Targets(ttft_ms=500.0),
    )
    assert found.requests == 4
    assert found.outcomes == {"completed": 2, "refused": 1, "skipped": 1}
    assert (found.good, found.goodput) == (1, 0.25)
    assert found.span_s == 1.5
    assert (found.prompt_tokens, found.output_tokens) == (20, 5)
    assert (found.cached_tokens, found.hit_share, found.hit_requests) == (4, 0.4, 1)
    assert found.short_answers == 1
    assert found.ttft_ms.mean == pytest.approx(550)
    assert found.late_ms.most == pytest.approx(500)


def test_nothing_sums_up_to_nothing() -> None:
    found = summary([], Targets())
    assert (found.requests, found.goodput, found.hit_share) == (0, 0.0, None)
    assert found.cached_tokens is None
    assert "<polyline" not in plot([], Targets(), "none")


def test_a_plot_is_well_formed_and_shows_the_target() -> None:
    found = timing(exchange(0))
    assert found is not None
    drawn = plot([found] * 1000, Targets(tbt_ms=250.0), "a < b")
    assert drawn.count("<polyline") == 2
    assert drawn.count("stroke-dasharray") == 1
    assert "a &lt; b" in drawn
    assert len(drawn) < 20_000


# ---- counters

PAGE = """# HELP kvtide_pool_read_bytes_total x
kvtide_pool_read_bytes_total{purpose="reuse",path="shm"} 10.0
kvtide_pool_read_bytes_total{purpose="handover",path="shm"} 99.0
kvtide_pool_read_bytes_total{purpose="reuse",path="tcp"} 5e3
kvtide_store_staged_total 3.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 7.0
else_total 8.0
"""


def test_hits_are_told_apart_by_where_they_were() -> None:
    before = counts([PAGE, PAGE])
    assert before == {
        "bytes reused over shm": 20.0,
        "bytes reused over tcp": 10_000.0,
        "blocks staged from SSD": 6.0,
        "vLLM: prompt tokens found": 14.0,
    }
    after = counts([PAGE.replace("staged_total 3.0", "staged_total 2.0"), PAGE])
    assert grown(before, after)["blocks staged from SSD"] == 5.0
    assert grown(before, before)["bytes reused over shm"] == 0.0
