"""What is remembered of a conductor's decisions, by itself and in the catalog."""

import pytest
from tests.unit.conductor_cluster import admit, beat, ref

from kvtide.bus.messages import Explained, Failure, RejectCode, Rejected
from kvtide.conductor.commands import RecordDecision
from kvtide.conductor.dispatcher import Dispatcher
from kvtide.conductor.events import AdmitAsked, MemberSeen, ReplyTo
from kvtide.conductor.records import decision_row
from kvtide.conductor.reducers.explanations import Explanations
from kvtide.kv import NodeId, RequestId, Role
from kvtide.policy import EXPLAINED_CANDIDATES


def keep(memory: Explanations, *names: str) -> None:
    for name in names:
        answer = Rejected(
            request=RequestId(name), attempt=1, code=RejectCode.OVERLOADED, reason=name
        )
        memory.keep(answer, ())


def found(memory: Explanations, asked: str) -> str | None:
    answer = memory.explain(RequestId(asked))
    if isinstance(answer, Explained):
        assert answer.request == answer.reason
        return answer.request
    assert isinstance(answer, Failure)
    assert answer.code == "unknown_request"
    return None


def test_a_request_is_found_by_its_name_and_by_what_its_client_called_it() -> None:
    memory = Explanations(limit=10)
    keep(memory, "mine.1", "mine.2", "mined.3", "yours.1", "yours")
    assert found(memory, "mine.1") == "mine.1"
    assert found(memory, "mine") == "mine.2"
    keep(memory, "mine.1")
    assert found(memory, "mine") == "mine.1"
    assert found(memory, "yours") == "yours"
    assert found(memory, "min") is None


def test_a_long_id_is_found_though_names_have_only_its_beginning() -> None:
    memory = Explanations(limit=10)
    keep(memory, "x" * 90 + ".1")
    assert found(memory, "x" * 128) == "x" * 90 + ".1"


def test_the_oldest_are_forgotten() -> None:
    memory = Explanations(limit=2)
    keep(memory, "a.1", "b.1", "c.1")
    assert [found(memory, name) for name in "abc"] == [None, "b.1", "c.1"]


@pytest.mark.parametrize("ttft_ms", [None, 1.0], ids=["placed", "refused"])
def test_the_catalog_gets_the_best_candidates_and_a_summary_of_the_rest(
    ttft_ms: float | None,
) -> None:
    mind, more = Dispatcher(ref("c1")), 3
    mind.handle(MemberSeen(beat("d1", Role.DECODE)), 1.0)
    for number in range(EXPLAINED_CANDIDATES + more):
        mind.handle(MemberSeen(beat(f"p{number}", Role.PREFILL)), 1.0)
    asked = AdmitAsked(admit(tokens=1000, ttft_ms=ttft_ms), ReplyTo(1))
    (record,) = (c for c in mind.handle(asked, 1.0) if isinstance(c, RecordDecision))
    row = decision_row(record, NodeId("c1"), 5.0)
    assert len(row.candidates) == EXPLAINED_CANDIDATES
    assert row.others is not None
    assert row.others.candidates == row.considered - EXPLAINED_CANDIDATES == more
    assert row.others.least_ttft_ms >= row.candidates[0].ttft_ms
