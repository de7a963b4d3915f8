"""A block that another worker is computing is waited for, but not for long."""

import pytest
from tests.unit.prefill_world import (
    BLOCK,
    ME,
    OTHER,
    Shell,
    made_elsewhere,
    making_elsewhere,
    ref,
    slot,
    work,
)

from kvtide.bus.messages import BlocksMade, BlocksMaking, HandoverPlan, PrefillDone
from kvtide.kv import BlockKey, Located, NodeId, NodeRef
from kvtide.prefill import events
from kvtide.prefill.job import Job
from kvtide.prefill.limits import PrefillLimits
from kvtide.prefill.peers import Peers

PROMPT = work("a", 4 * BLOCK + 1)
KEYS = PROMPT.keys


def copies(count: int) -> tuple[Located, ...]:
    return tuple(Located(key, slot(90 + i), i) for i, key in enumerate(KEYS[:count]))


def waiting() -> Shell:
    """It waits for four blocks that another worker makes."""
    shell = Shell()
    shell.tell(events.PeerSaid(making_elsewhere(KEYS)))
    shell.tell(events.WorkArrived(PROMPT))
    shell.tell(events.Tick())
    assert shell.opened == set()
    return shell


def done(shell: Shell) -> tuple[int, int]:
    shell.run()
    [said] = shell.of(PrefillDone)
    assert isinstance(said, PrefillDone)
    return said.reused_tokens, said.computed_tokens


def test_what_the_other_has_made_is_loaded() -> None:
    shell = waiting()
    shell.tell(events.PeerSaid(made_elsewhere(copies(2), ended=False)))
    assert shell.opened == set(), "two more are being made"
    shell.tell(events.PeerSaid(made_elsewhere(copies(4), ended=False)))
    assert shell.opened == {ref("a")}
    assert done(shell) == (64, 0)
    [plan] = shell.of(HandoverPlan)  # decode has not heard of them
    assert isinstance(plan, HandoverPlan)
    assert [(one.block, one.located) for one in plan.copies] == [*enumerate(copies(4))]


def test_what_was_made_before_the_work_came_is_loaded_and_the_rest_waited_for() -> None:
    shell = Shell()
    shell.tell(events.PeerSaid(making_elsewhere(KEYS)))
    shell.tell(events.PeerSaid(made_elsewhere(copies(2), ended=False)))
    shell.tell(events.WorkArrived(PROMPT))
    assert shell.opened == set()
    shell.tell(events.PeerSaid(made_elsewhere(ended=True)))
    assert done(shell) == (32, 32)


def test_what_the_other_gives_up_is_computed_at_once() -> None:
    shell = waiting()
    shell.tell(events.PeerSaid(made_elsewhere(copies(1), ended=False)))
    shell.tell(events.PeerSaid(made_elsewhere(ended=True)))
    assert shell.opened == {ref("a")}
    assert done(shell) == (16, 48)


@pytest.mark.parametrize("epoch", [1, 2])
def test_when_the_other_dies_it_is_computed_at_once(epoch: int) -> None:
    shell = waiting()
    shell.tell(events.MemberGone(NodeRef(OTHER.node, epoch)))
    assert shell.opened == {ref("a")}
    assert done(shell) == (0, 64)


def test_an_older_life_of_the_other_may_go() -> None:
    shell = Shell()
    later = NodeRef(OTHER.node, 7)
    shell.tell(events.PeerSaid(making_elsewhere(KEYS, by=later)))
    shell.tell(events.WorkArrived(PROMPT))
    shell.tell(events.MemberGone(OTHER))
    assert shell.opened == set()


def test_nobody_waits_longer_than_computing_would_take() -> None:
    shell = waiting()
    own_s = 4 * BLOCK / PrefillLimits().initial_tokens_per_s
    shell.now_s += 0.9 * own_s
    shell.tell(events.Tick())
    assert shell.opened == set()
    shell.now_s += 0.2 * own_s
    shell.tell(events.Tick())
    assert done(shell) == (0, 64)


def test_what_takes_the_other_longer_is_not_waited_for() -> None:
    shell = Shell()
    shell.tell(events.PeerSaid(making_elsewhere(KEYS, left_ms=10_000)))
    shell.tell(events.WorkArrived(PROMPT))
    assert done(shell) == (0, 64)


def test_what_is_computed_here_is_said_and_its_end_too() -> None:
    shell = Shell()
    shell.tell(events.WorkArrived(PROMPT))
    shell.finish(ref("a"))
    [making] = shell.to_peers
    assert isinstance(making, BlocksMaking)
    assert (making.keys, making.waits) == (KEYS, False)
    assert making.left_ms == pytest.approx(64 * 1000 / 300)
    shell.run_step()
    shell.commit(ref("a"), copies(4))
    assert [
        (said.located, said.ended)
        for said in shell.to_peers
        if isinstance(said, BlocksMade)
    ] == [(copies(4), False), ((), True)]


def test_of_several_that_wait_the_first_inherits() -> None:
    first, second = (Shell(me=NodeRef(NodeId(name), 1)) for name in ("p1", "p2"))
    both = (first, second)
    for shell in both:
        shell.tell(events.PeerSaid(making_elsewhere(KEYS)))
        shell.tell(events.WorkArrived(PROMPT))
    _pass_on(first, second)
    assert all(shell.told for shell in both)
    for shell in reversed(both):
        shell.tell(events.PeerSaid(made_elsewhere(ended=True)))
    assert (first.opened, second.opened) == ({ref("a")}, set())
    first.finish(ref("a"))
    first.run_step()
    first.commit(ref("a"), copies(4))
    _pass_on(first, second)
    assert done(second) == (64, 0)


def _pass_on(*shells: Shell) -> None:
    """Each hears what the others have said."""
    for shell in shells:
        heard, shell.to_peers = shell.to_peers, []
        for said in heard:
            for other in shells:
                if other is not shell:
                    other.tell(events.PeerSaid(said))


def test_a_copy_with_which_a_load_broke_off_is_counted_on_no_more() -> None:
    peers = Peers()
    peers.found(copies(4))
    job = Job.of(PROMPT, BLOCK, 0.0)
    job.found(peers.copies)
    assert job.reuse == copies(4)
    peers.loaded(job, events.Loaded(job.ref, 4, 400, 1.0))
    assert list(peers.copies.values()) == [*copies(4)]
    peers.loaded(job, events.Loaded(job.ref, 2, 200, 1.0, whole=False))
    assert [*peers.copies] == [KEYS[0], KEYS[1], KEYS[3]]
    again = Located(KEYS[1], slot(7), 7)
    peers.found([again])
    peers.loaded(job, events.Loaded(job.ref, 1, 100, 1.0, whole=False))
    assert peers.copies[KEYS[1]] == again, "another copy than the one that failed"


def test_copies_of_a_store_that_is_gone_are_computed() -> None:
    shell = Shell()
    shell.tell(events.PeerSaid(made_elsewhere(copies(4), ended=True)))
    shell.tell(events.MemberGone(NodeRef(NodeId("s"), 1)))
    shell.tell(events.WorkArrived(PROMPT))
    assert done(shell) == (0, 64)


def test_one_does_not_wait_for_itself() -> None:
    shell = Shell()
    shell.tell(events.PeerSaid(making_elsewhere(KEYS, by=NodeRef(ME.node, 9))))
    shell.tell(events.WorkArrived(PROMPT))
    assert shell.opened == {ref("a")}


def test_what_is_remembered_is_bounded_and_forgotten() -> None:
    peers = Peers(kept=3)
    mine = (ME, ref("a"))
    for number in range(5):
        by = NodeRef(NodeId(f"o{number}"), 1)
        key = BlockKey(bytes([number]) * 16)
        peers.making(making_elsewhere((key, KEYS[0]), by=by), 0.0)
    assert len(peers) == 3
    assert peers.maker_of(BlockKey(bytes([1]) * 16), mine) is None
    assert peers.maker_of(BlockKey(bytes([4]) * 16), mine) is not None
    for number in range(5):
        peers.gone(NodeRef(NodeId(f"o{number}"), 1))
    assert len(peers) == 0
    assert peers.maker_of(KEYS[0], mine) is None
