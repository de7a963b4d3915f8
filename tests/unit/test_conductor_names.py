"""Two requests of one name: the first keeps what it was answered."""

from typing import Any

import pytest
from tests.unit.conductor_cluster import BLOCK, admit, beat, keys, ref

from kvtide.bus.messages import Admit, Placed, RejectCode, Rejected
from kvtide.conductor.commands import Command, Reply
from kvtide.conductor.dispatcher import Dispatcher
from kvtide.conductor.events import AdmitAsked, MemberSeen, ReplyTo
from kvtide.kv import Role


def ask(dispatcher: Dispatcher, question: Admit) -> tuple[object, list[Command]]:
    reply, *rest = dispatcher.handle(AdmitAsked(question, ReplyTo(1)), 1000.0)
    assert isinstance(reply, Reply)
    return reply.message, rest


@pytest.mark.parametrize(
    "changes",
    [
        {"gateway": ref("g2")},
        {"gateway": ref("g2"), "attempt": 1},
        {"chain": keys(8, start=500)},
        {"tokens": 999, "chain": keys(1000 // BLOCK)},
    ],
)
def test_another_request_of_a_name_that_is_taken_is_refused(
    changes: dict[str, Any],
) -> None:
    dispatcher = Dispatcher(ref("c1"))
    for name, role in (("p1", Role.PREFILL), ("d1", Role.DECODE)):
        dispatcher.handle(MemberSeen(beat(name, role)), 1000.0)
    first, _ = ask(dispatcher, admit())
    assert isinstance(first, Placed)
    load = dispatcher.load()
    other, commands = ask(dispatcher, admit(**changes))
    assert isinstance(other, Rejected)
    assert other.code is RejectCode.STALE_ATTEMPT
    assert commands == []
    assert dispatcher.load() == load
    assert ask(dispatcher, admit())[0] == first
