"""What ``kvtide top`` shows."""

import io

from rich.console import Console
from tests.unit.test_ui_pictures import ended, member

from kvtide.bus.messages import NodeView, StatusReply
from kvtide.cli.commands.top import picture
from kvtide.kv import RequestId


def shown(reply: object, *names: str) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(picture(reply, tuple(ended(RequestId(name)) for name in names)))
    return console.export_text()


def test_nodes_and_the_newest_requests_are_shown() -> None:
    view = NodeView(beat=member("prefill-0", queued=3).beat, age_ms=100)
    reply = StatusReply(
        nodes=(view,), indexed_blocks=2, indexed_copies=2, bookings=0, exact=True
    )
    text = shown(reply, "first", "second")
    assert "prefill-0" in text
    assert "3 queued" in text
    assert text.index("second") < text.index("first")
    assert "16 (40%)" in text
    assert "40 ms" in text


def test_an_answer_that_is_no_status_is_said() -> None:
    assert "did not answer" in shown(None)
