"""Loads on their way are counted once, and not for ever."""

import numpy as np
from hypothesis import given, settings, strategies as st

from kvtide.conductor.reducers.flows import Flows
from kvtide.kv import RequestId

R = RequestId("r")


def test_a_flow_ends_by_itself_or_with_its_request() -> None:
    flows, worker = Flows(), np.array([3])
    flows.add(R, 3, (1, 2, 2), 10.0)
    assert flows.outflows(4, 9.0).tolist() == [0, 1, 1, 0]
    assert flows.inflows(worker, 9.0).tolist() == [1]
    flows.add(R, 3, (1,), 12.0)  # placed anew
    assert flows.outflows(4, 11.0).tolist() == [0, 1, 0, 0]
    flows.remove(R)
    flows.remove(R)
    assert flows.outflows(4, 11.0).sum() == 0
    flows.add(R, 3, (1,), 20.0)
    assert flows.inflows(worker, 20.0).tolist() == [0]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "remove", "look"]),
            st.integers(0, 3),
            st.integers(0, 40),
            st.lists(st.integers(0, 30), max_size=3),
            st.floats(0, 5),
        ),
        max_size=50,
    )
)
def test_counts_are_never_negative_and_go_back_to_nothing(
    story: list[tuple[str, int, int, list[int], float]],
) -> None:
    flows, now_s = Flows(), 0.0
    for what, name, worker, hosts, seconds in story:
        match what:
            case "add":
                flows.add(RequestId(str(name)), worker, hosts, now_s + seconds)
            case "remove":
                flows.remove(RequestId(str(name)))
            case _:
                now_s += seconds
        assert flows.outflows(31, now_s).min() >= 0
        assert flows.outflows(31, now_s).max() <= 4
        assert flows.inflows(np.arange(41), now_s).min() >= 0
    assert flows.outflows(31, now_s + 10).sum() == 0
    assert flows.inflows(np.arange(41), now_s + 10).sum() == 0
