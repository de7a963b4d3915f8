"""What a conductor remembers of its decisions, and under which names."""

from kvtide.bus.messages import Explained, Failure, RejectCode, Rejected
from kvtide.conductor.reducers.explanations import Explanations
from kvtide.kv import RequestId


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
