"""Owner lists, tombstones and fencing, as prefill and decode share them."""

from hypothesis import given, strategies as st

from kvtide.bus.ownership import Ownership, Standing
from kvtide.kv import NodeId, NodeRef, RequestId, RequestRef

GATEWAY = NodeRef(NodeId("g"), 1)


def ref(name: str = "r", attempt: int = 1) -> RequestRef:
    return RequestRef(RequestId(name), attempt)


def test_repeat_of_held_work_is_known() -> None:
    owners = Ownership()
    assert owners.judge(ref(), GATEWAY, 0) is Standing.NEW
    owners.hold(ref(), GATEWAY)
    assert owners.judge(ref(), GATEWAY, 0) is Standing.HELD
    assert owners.judge(ref(attempt=0), GATEWAY, 0) is Standing.STALE
    assert owners.judge(ref(attempt=2), GATEWAY, 0) is Standing.NEW


def test_the_same_attempt_from_another_owner_is_not_the_held_one() -> None:
    owners = Ownership()
    owners.judge(ref(), GATEWAY, 0)
    owners.hold(ref(), GATEWAY)
    other = NodeRef(NodeId("h"), 1)
    assert owners.judge(ref(), other, 0) is Standing.STALE
    assert owners.judge(ref(), GATEWAY, 0) is Standing.HELD
    later = NodeRef(GATEWAY.node, 2)
    assert owners.judge(ref(), later, 0) is Standing.STALE


def test_cancel_before_work_leaves_a_tombstone_for_its_time() -> None:
    owners = Ownership(memory_s=60)
    assert owners.cancel(ref(attempt=2), 0) is None
    assert owners.judge(ref(attempt=1), GATEWAY, 59) is Standing.CANCELLED
    assert owners.judge(ref(attempt=2), GATEWAY, 59) is Standing.CANCELLED
    assert owners.judge(ref(attempt=3), GATEWAY, 59) is Standing.NEW
    owners.expire(61)
    assert owners.tombstones == 0
    assert owners.judge(ref(attempt=2), GATEWAY, 61) is Standing.NEW


def test_cancel_frees_its_attempt_and_older_ones_only() -> None:
    owners = Ownership()
    owners.hold(ref(attempt=2), GATEWAY)
    assert owners.cancel(ref(attempt=1), 0) is None
    assert owners.cancel(ref(attempt=3), 0) == ref(attempt=2)


def test_ended_attempt_is_stale_when_it_comes_again() -> None:
    owners = Ownership()
    owners.judge(ref(), GATEWAY, 0)
    owners.hold(ref(), GATEWAY)
    owners.drop(ref(), 0)
    assert owners.judge(ref(), GATEWAY, 1) is Standing.STALE


def test_absent_twice_is_freed_once_is_not() -> None:
    owners = Ownership()
    owners.judge(ref("a"), GATEWAY, 0)
    owners.hold(ref("a"), GATEWAY)
    owners.hold(ref("b"), GATEWAY)
    assert owners.listed(GATEWAY, 1, [ref("b")], 1) == []
    assert owners.listed(GATEWAY, 1, [ref("b")], 1) == []  # a repeat is no second list
    assert owners.listed(GATEWAY, 2, [ref("a")], 2) == []  # it was listed in between
    assert owners.listed(GATEWAY, 3, [ref("b")], 3) == []
    assert owners.listed(GATEWAY, 4, [ref("b")], 4) == [ref("a")]


def test_newer_life_of_the_owner_fences_the_older() -> None:
    owners = Ownership()
    owners.judge(ref("a"), GATEWAY, 0)
    owners.hold(ref("a"), GATEWAY)
    newer = NodeRef(GATEWAY.node, 2)
    assert owners.listed(newer, 0, [], 1) == [ref("a")]
    assert owners.judge(ref("b"), GATEWAY, 1) is Standing.FENCED
    assert owners.listed(GATEWAY, 9, [], 1) == []


def test_gone_and_silent_owners_lose_what_they_have() -> None:
    owners = Ownership(silence_s=10)
    owners.judge(ref("a"), GATEWAY, 0)
    owners.hold(ref("a"), GATEWAY)
    assert owners.gone(NodeRef(NodeId("other"), 5)) == []
    assert owners.gone(GATEWAY) == [ref("a")]
    assert owners.expire(9) == []
    assert owners.expire(11) == [ref("a")]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=60))
def test_tombstones_are_bounded_and_the_newest_stay(
    cancels: list[tuple[int, int]],
) -> None:
    owners = Ownership(memory_limit=4)
    for at_s, (number, attempt) in enumerate(cancels):
        owners.cancel(ref(str(number), attempt), at_s)
        assert owners.tombstones <= 4
        assert owners.judge(ref(str(number), attempt), GATEWAY, at_s) is (
            Standing.CANCELLED
        )
