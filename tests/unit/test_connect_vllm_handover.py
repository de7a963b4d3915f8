"""Params of a handover, the names of prompts, and how long somebody waits for one."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.connect.prefix_plan import Claim, Geometry, Group, Move, PrefixPlan, Prompt
from kvtide.connect.vllm_handover import (
    Offer,
    Waits,
    answer_params,
    is_for_handover,
    offer_of,
    prompt_of,
    tail_name,
)

ONE = Geometry((Group(4),), hash_tokens=4, unit_tokens=4)
MIXED = Geometry((Group(8), Group(4, window_tokens=8)), hash_tokens=4, unit_tokens=8)
ME = Claim("t")
CHAIN = [b"h0", b"h1", b"h2"]
TEN = Prompt(10, b"tail")


def request(tokens: int, **changes: object) -> Any:
    made: dict[str, object] = {
        "prompt_token_ids": list(range(tokens)),
        "prompt_embeds": None,
        "mm_features": [],
        "block_hashes": CHAIN[: tokens // 4],
        **changes,
    }
    return SimpleNamespace(**made)


def test_the_answer_of_prefill_is_an_offer_to_decode() -> None:
    prompt = prompt_of(request(10), 4)
    assert prompt is not None
    params = answer_params("e", "r", prompt, 30.0)
    assert offer_of(params) == Offer(10, prompt.tail.hex())
    assert not is_for_handover(params)
    assert is_for_handover({"do_remote_decode": True})
    assert not is_for_handover(None)


@pytest.mark.parametrize(
    "changes",
    [
        {"do_remote_prefill": False},
        {"remote_num_tokens": "10"},
        {"remote_num_tokens": 0},
        {"remote_digest": None},
    ],
)
def test_params_that_do_not_fit_are_no_offer(changes: dict[str, object]) -> None:
    assert offer_of(answer_params("e", "r", TEN, 30.0) | changes) is None
    assert offer_of(None) is None


def test_a_prompt_is_named_by_all_of_its_tokens() -> None:
    ten = prompt_of(request(10), 4)
    assert ten == Prompt(10, tail_name(b"h1", [8, 9]))
    other = [*range(9), 77]
    assert prompt_of(request(10, prompt_token_ids=other), 4) != ten
    assert prompt_of(request(10, block_hashes=[b"h0", b"x"]), 4) != ten
    assert prompt_of(request(3), 4) == Prompt(3, tail_name(b"", [0, 1, 2]))
    assert tail_name(b"h1", [8]) != tail_name(b"h1", [8, 9])


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": None},
        {"prompt_embeds": "some"},
        {"mm_features": ["a picture"]},
        {"block_hashes": CHAIN[:1]},
    ],
)
def test_what_tokens_do_not_tell_has_no_name(changes: dict[str, object]) -> None:
    assert prompt_of(request(10, **changes), 4) is None


def test_a_prompt_is_loaded_whole_or_not_as_a_prompt() -> None:
    pool = {b"h0", b"h1", b"tail"}

    def hits(group: int, names: Any) -> int:
        del group
        return sum(name in pool for name in names)

    assert ONE.prompt_tokens(CHAIN, TEN, 0, hits) == 10
    assert ONE.prompt_tokens(CHAIN, TEN, 4, hits) == 6
    pool.discard(b"tail")
    assert ONE.prompt_tokens(CHAIN, TEN, 0, hits) == 0
    # without a rest there is no last page of its own
    assert ONE.prompt_tokens(CHAIN, Prompt(8, b"none"), 0, hits) == 8
    # a block that is full but has no name yet
    assert ONE.prompt_tokens(CHAIN[:1], TEN, 0, hits) == 0


def test_decode_loads_the_last_page_too() -> None:
    plan = PrefixPlan(ONE)
    plan.allocated("r", ME, CHAIN, [[11, 12, 13, 14]], (4, 10), loaded=TEN)
    (task,) = plan.take_loads()
    assert task.moves == (Move(0, (12, 13), (b"h1", b"tail")),)
    assert not task.kept


def test_a_window_needs_only_its_own_pages() -> None:
    plan = PrefixPlan(MIXED)
    tables = [[1, 2], [0, 5, 6]]
    plan.allocated("r", ME, CHAIN, tables, (0, 10), loaded=TEN)
    (task,) = plan.take_loads()
    assert task.moves == (
        Move(0, (1, 2), (b"h1", b"tail")),
        Move(1, (5, 6), (b"h1", b"tail")),
    )


def test_a_window_that_begins_with_a_block_keeps_the_block_before() -> None:
    """The last token is computed again, and its window begins one token earlier."""
    eleven = Prompt(11, b"tail")
    group = MIXED.groups[1]
    assert (group.needed_from(10), group.needed_from(11)) == (0, 1)
    assert MIXED.prompt_end(eleven) == 10
    assert MIXED.prompt_end(TEN) == 10
    asked: list[tuple[int, list[bytes]]] = []

    def hits(number: int, names: Sequence[bytes]) -> int:
        asked.append((number, list(names)))
        return len(names)

    assert MIXED.prompt_tokens(CHAIN, eleven, 0, hits) == 10
    assert asked == [(0, [b"h1", b"tail"]), (1, [b"h0", b"h1", b"tail"])]
    plan = PrefixPlan(MIXED)
    plan.allocated("r", ME, CHAIN, [[1, 2], [4, 5, 6]], (0, 10), loaded=eleven)
    (task,) = plan.take_loads()
    assert task.moves[1] == Move(1, (4, 5, 6), (b"h0", b"h1", b"tail"))
    plan.allocated("p", ME, CHAIN, [[1, 2], [4, 5, 6]], (0, 0), handover=eleven)
    plan.begins("p", [[1, 2], [4, 5, 6]], 0)
    given = plan.computes("p", 0, 11)
    assert given is not None
    assert given.moves[1] == Move(1, (4, 5, 6), (b"h0", b"h1", b"tail"))


def test_prefill_hands_all_of_the_prompt_over_once() -> None:
    plan = PrefixPlan(ONE)
    plan.allocated("r", ME, CHAIN, [[1, 2, 3]], (0, 0), handover=TEN)
    plan.begins("r", [[1, 2, 3]], 4)
    first = plan.computes("r", 4, 8)
    assert first is not None
    assert first.moves == (Move(0, (2,), (b"h1",)),)
    assert not first.kept
    assert plan.handed_over("r") is None
    last = plan.computes("r", 8, 10)
    assert last is not None
    assert last.kept
    # what was there before it began is named too: the store is to keep it
    assert last.moves == (Move(0, (1, 2, 3), (b"h0", b"h1", b"tail")),)
    assert plan.handed_over("r") == TEN
    assert plan.computes("r", 10, 11) is None
    plan.finished("r")
    assert plan.handed_over("r") is None
    assert len(plan) == 0


def test_a_prompt_that_was_not_computed_is_not_handed_over() -> None:
    plan = PrefixPlan(ONE)
    plan.allocated("r", ME, CHAIN, [[1, 2, 3]], (0, 0), handover=TEN)
    plan.begins("r", [[1, 2, 3]], 0)
    plan.computes("r", 0, 9)
    assert plan.handed_over("r") is None
    assert plan.certain("r", 9) == 9
    assert plan.certain("r", 15) == 10
    assert plan.certain("unknown", 9) == 0


def test_nobody_waits_for_ever() -> None:
    waits = Waits(1.0)
    assert waits.may_wait("r", 5.0)
    assert waits.may_wait("r", 5.9)
    assert not waits.may_wait("r", 6.0)
    waits.ended("r")
    assert len(waits) == 0
    assert waits.may_wait("r", 7.0)
