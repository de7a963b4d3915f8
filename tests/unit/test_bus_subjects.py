"""Subjects say what they mean, and a bad name can't change it."""

import pytest
from hypothesis import given, strategies as st

from kvtide.bus import HOPS, Hop, Subjects
from kvtide.bus.subjects import matches
from kvtide.kv import NodeId, Role

SUBJECTS = Subjects("local")
NODE = NodeId("store-0")


def test_each_role_has_its_inboxes_and_no_other() -> None:
    for role in Role:
        for hop in Hop:
            if hop in HOPS[role]:
                subject = SUBJECTS.inbox(role, NODE, hop)
                assert subject == f"kvtide.local.inbox.{role}.store-0.{hop}"
            else:
                with pytest.raises(ValueError, match="has no inbox"):
                    SUBJECTS.inbox(role, NODE, hop)


def test_an_unknown_hop_is_refused() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        SUBJECTS.inbox(Role.STORE, NODE, "nowhere")


@pytest.mark.parametrize("bad", ["", "a.b", "a b", "*", ">", "a\r\nPUB", "ü", "a/b"])
def test_a_name_that_does_not_fit_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="can't be part of a subject"):
        Subjects(bad)
    with pytest.raises(ValueError, match="can't be part of a subject"):
        SUBJECTS.beat(NodeId(bad))
    with pytest.raises(ValueError, match="can't be part of a subject"):
        SUBJECTS.inbox(Role.STORE, NodeId(bad), Hop.POOL)


def test_wildcards_hear_their_kind_and_everything_hears_all() -> None:
    pairs = [
        (SUBJECTS.beats(), SUBJECTS.beat(NODE)),
        (SUBJECTS.goodbyes(), SUBJECTS.goodbye(NODE)),
        (SUBJECTS.all_blocks(), SUBJECTS.blocks(NODE)),
        (SUBJECTS.all_placements(), SUBJECTS.placements(NODE)),
        (SUBJECTS.all_making(), SUBJECTS.making(NODE)),
        (SUBJECTS.all_ended(), SUBJECTS.ended(NODE)),
        (SUBJECTS.replies(NODE, "abc"), SUBJECTS.reply(NODE, "abc", 7)),
    ]
    for wildcard, _ in pairs:
        heard = [subject for _, subject in pairs if matches(wildcard, subject)]
        assert heard == [dict(pairs)[wildcard]]
    everything = SUBJECTS.everything()
    assert all(matches(everything, subject) for _, subject in pairs)
    assert not matches(everything, Subjects("other").beat(NODE))


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=4))
def test_a_subject_matches_itself_and_nothing_longer(tokens: list[str]) -> None:
    subject = ".".join(tokens)
    assert matches(subject, subject)
    assert not matches(subject, f"{subject}.x")
    assert matches(f"{subject}.>", f"{subject}.x.y")
    assert not matches(f"{subject}.>", subject)
    assert matches(f"{subject}.*", f"{subject}.x")
    assert not matches(f"{subject}.*", f"{subject}.x.y")
