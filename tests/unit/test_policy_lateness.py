"""How late first tokens come is learnt from requests that have ended."""

import random

import msgspec
import pytest
from tests.unit.conductor_cluster import beat, ended, ref
from tests.unit.test_conductor_dispatcher import World

from kvtide.conductor.dispatcher import Dispatcher
from kvtide.conductor.events import EndHeard, MemberSeen
from kvtide.conductor.serving import ServingRules
from kvtide.kv import Role
from kvtide.policy import LatenessFit


def test_overheads_and_shares_are_found_in_spite_of_outliers() -> None:
    draw, fit = random.Random(1), LatenessFit()  # noqa: S311 - a test
    for number in range(300):
        queue_ms = draw.choice((0.0, 0.0, draw.uniform(0, 2000)))
        rest_ms = draw.uniform(50, 1500)
        actual_ms = (40 + 1.1 * queue_ms + 1.3 * rest_ms) * draw.uniform(0.95, 1.05)
        fit.add(queue_ms, rest_ms, actual_ms * (20 if number % 20 == 7 else 1))
    found = fit.known
    assert found is not None
    assert found.fixed_ms == pytest.approx(40, abs=15)
    assert found.queue_share == pytest.approx(1.1, abs=0.12)
    assert found.rest_share == pytest.approx(1.3, abs=0.12)
    ttft_ms = found.fixed_ms + found.queue_share * 70 + found.rest_share * 300
    assert found.rest_ms(70, ttft_ms) == pytest.approx(300)


def test_little_is_believed_of_few_requests_and_never_much() -> None:
    fit = LatenessFit()
    for _ in range(9):
        fit.add(0, 100, 500)
    assert fit.known is None
    for _ in range(50):
        fit.add(0, 100, 1e9)
    assert fit.known is not None
    assert fit.known.rest_share <= 4


def served(made: World, number: int) -> float:
    """How far off the prediction is, of a first token that takes 1.6 times the parts."""
    cost = made.placed(request=f"r{number}", tokens=1000, chain=()).chosen
    parts_ms = cost.queue_ms + cost.transfer_ms + cost.prefill_ms
    actual_ms = 30 + 1.6 * parts_ms
    made.now_s += 5
    over = msgspec.structs.replace(ended(f"r{number}"), ttft_ms=actual_ms)
    made.handle(EndHeard(over))
    return abs(cost.ttft_ms / actual_ms - 1)


@pytest.mark.parametrize("calibrated", [True, False])
def test_a_conductor_predicts_better_as_requests_end(*, calibrated: bool) -> None:
    made = World(Dispatcher(ref("c1"), serving=ServingRules(calibrated=calibrated)))
    for each in (beat("p1", Role.PREFILL), beat("d1", Role.DECODE)):
        made.handle(MemberSeen(each))
    errors = [served(made, number) for number in range(40)]
    assert errors[0] > 0.3
    assert (errors[-1] < 0.05) == calibrated
