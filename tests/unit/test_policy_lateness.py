"""How late first tokens come is learnt from requests that have ended."""

import random
from dataclasses import replace

import msgspec
import pytest
from tests.unit.conductor_cluster import admit, beat, ended, ref
from tests.unit.test_conductor_dispatcher import World

from kvtide.bus.messages import Rejected
from kvtide.conductor.dispatcher import Dispatcher
from kvtide.conductor.events import EndHeard, MemberSeen
from kvtide.conductor.serving import ServingRules
from kvtide.kv import NodeId, Role
from kvtide.policy import Ask, CrowdFit, Estimate, LatenessFit, Targets
from kvtide.policy.admission import overload


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


def test_what_each_open_request_costs_is_an_upper_quartile_of_what_was_seen() -> None:
    crowd = CrowdFit()
    for number in range(9):
        crowd.add(4, 100, 100 + 4 * 50, number)
        assert crowd.ms(4, number) == 0, number
    crowd.add(0, 100, 1e9, 9)
    assert crowd.ms(4, 9) == 0
    crowd.add(4, 100, float("nan"), 9)
    crowd.add(4, 100, 1e9, 9)
    assert crowd.ms(3, 9) == pytest.approx(3 * 50)
    assert crowd.ms(40, 9) == pytest.approx(4 * 50), "more were never seen"
    crowd.add(8, 100, 100 + 8 * 50, 9)
    assert crowd.ms(40, 9) == pytest.approx(8 * 50)
    assert crowd.ms(0, 9) == 0
    for _ in range(41):
        crowd.add(2, 100, 90, 10)
    assert crowd.ms(8, 10) == 0, "never earlier than predicted"


def test_a_crowd_that_is_let_in_no_more_is_thought_quicker_in_time() -> None:
    crowd = CrowdFit()
    for _ in range(41):
        crowd.add(1, 100, 100 + 8000, 1000)
    assert crowd.ms(1, 1030) == pytest.approx(8000), "a pause is no proof"
    assert crowd.ms(1, 1060) == pytest.approx(4000)
    assert crowd.ms(1, 1120) == pytest.approx(1000)
    crowd.add(1, 100, 100, 1120)
    assert crowd.ms(1, 1120) == pytest.approx(1000), "nor is it as slow again at once"
    assert crowd.ms(1, 1e6) == 0


@pytest.mark.parametrize("each_ms", [0.0, 400.0])
def test_a_target_is_held_against_what_open_requests_cost(each_ms: float) -> None:
    """Four are open at a time; each makes the first token of another one later."""
    made = World(Dispatcher(ref("c1")))
    for each in (beat("p1", Role.PREFILL), beat("d1", Role.DECODE)):
        made.handle(MemberSeen(each))
    predicted_ms: dict[int, float] = {}
    for number in range(40):
        cost = made.placed(request=f"r{number}", tokens=1000, chain=()).chosen
        predicted_ms[number] = cost.ttft_ms
        made.now_s += 1
        if number >= 3:
            came_ms = predicted_ms[number - 3] + 3 * each_ms
            over = msgspec.structs.replace(ended(f"r{number - 3}"), ttft_ms=came_ms)
            made.handle(EndHeard(over))
    # alone the parts add up to 4056 ms, three others' queue included
    question = admit("late", tokens=1000, chain=(), ttft_ms=4500.0)
    answer, _ = made.ask(question)
    assert isinstance(answer, Rejected) == (each_ms > 0), answer
    for number in range(37, 40):
        made.handle(EndHeard(ended(f"r{number}")))
    made.handle(EndHeard(ended("late")))
    made.now_s += 10
    alone = made.placed(request="again", tokens=1000, chain=()).chosen
    slack_ms = alone.ttft_ms + 200
    made.placed(request="again", attempt=1, tokens=1000, chain=(), ttft_ms=slack_ms)


def test_a_refusal_says_what_is_owed_to_the_crowd() -> None:
    ask = Ask(1000, 100, 64, 1, ttft_ms=1000.0, crowd_ms=600.0)
    cost = Estimate(NodeId("p"), NodeId("d"), 0, 0.0, 0.0, 500.0, 500.0, 30.0)
    assert overload(replace(ask, crowd_ms=0.0), cost, Targets()) is None
    late = overload(ask, cost, Targets())
    assert late is not None
    assert "1100 ms (600 of them because of all that is open)" in late.reason
    assert late.retry_after_ms == pytest.approx(100)


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


@pytest.mark.parametrize("attempt", [1, 2])
def test_requests_that_were_placed_anew_teach_nothing(attempt: int) -> None:
    made = World(Dispatcher(ref("c1")))
    for each in (beat("p1", Role.PREFILL), beat("d1", Role.DECODE)):
        made.handle(MemberSeen(each))
    made.placed(request="other", tokens=1000, chain=())
    made.now_s += 5
    predicted_ms: list[float] = []
    for number in range(40):
        name = f"r{number}"
        cost = made.placed(request=name, attempt=attempt, tokens=1000, chain=()).chosen
        predicted_ms.append(cost.ttft_ms)
        made.now_s += 5
        over = msgspec.structs.replace(
            ended(name, attempt=attempt), ttft_ms=cost.ttft_ms + 5000
        )
        made.handle(EndHeard(over))
    question = admit("late", chain=(), ttft_ms=predicted_ms[-1] + 100)
    answer, _ = made.ask(question)
    learnt = predicted_ms[-1] > predicted_ms[0] + 100 or isinstance(answer, Rejected)
    assert learnt == (attempt == 1), (predicted_ms, answer)
