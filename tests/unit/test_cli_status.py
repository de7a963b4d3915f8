"""What ``kvtide status`` says of a store."""

import io

import pytest
from rich.console import Console

from kvtide.bus.messages import Beat, NodeView, StatusReply, StoreLoad
from kvtide.bus.messages.membership import NodeState
from kvtide.cli.commands.status import print_status
from kvtide.kv import NodeId, NodeRef, Role


def said(load: StoreLoad) -> str:
    beat = Beat(
        node=NodeRef(NodeId("store-3"), 5),
        roles=(Role.STORE,),
        seq=1,
        host="abcdef0123",
        state=NodeState.READY,
        steps=0,
        load=(load,),
    )
    view = NodeView(beat=beat, age_ms=120.0, blocks=17)
    reply = StatusReply(
        nodes=(view,), indexed_blocks=17, indexed_copies=20, bookings=1, exact=True
    )
    out = io.StringIO()
    print_status(reply, Console(file=out, width=200))
    return out.getvalue()


@pytest.mark.parametrize(
    ("state", "reason", "text"),
    [
        ("ready", "", "SSD 1.0 GiB of 4.0 GiB, 17 blocks"),
        ("out", "[Errno 5] gone", "SSD 1.0 GiB of 4.0 GiB (out: [Errno 5] gone)"),
        ("read_only", "full", "SSD 1.0 GiB of 4.0 GiB (read only: full)"),
    ],
)
def test_the_ssd_is_shown_and_what_is_wrong_with_it(
    state: str, reason: str, text: str
) -> None:
    load = StoreLoad(
        capacity_bytes=1 << 30,
        ssd_state=state,
        ssd_reason=reason,
        ssd_used_bytes=1 << 30,
        ssd_total_bytes=4 << 30,
    )
    assert text in said(load)
    assert "cache 0 B of 1.0 GiB, SSD 1.0 GiB of 4.0 GiB, 17 blocks" in said(load)


def test_a_store_without_an_ssd_says_nothing_of_one() -> None:
    assert "SSD" not in said(StoreLoad(capacity_bytes=1 << 30))
