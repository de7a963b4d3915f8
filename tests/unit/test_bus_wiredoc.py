"""docs/wire.md says what the types say."""

from pathlib import Path

from kvtide.bus import messages
from kvtide.bus.wiredoc import document

WIRE = Path(__file__).resolve().parents[2] / "docs" / "wire.md"


def test_the_committed_file_is_the_generated_one() -> None:
    assert WIRE.read_text() == document(), (
        "run: python -m kvtide.bus.wiredoc > docs/wire.md"
    )


def test_every_message_is_in_it_once() -> None:
    text = document()
    names = [kind.__name__ for kind in messages.AnyMessage.__args__]
    assert {name: text.count(f"### {name}\n") for name in names} == dict.fromkeys(
        names, 1
    )


def test_every_message_is_documented_under_its_tag() -> None:
    text = document()
    for kind in messages.AnyMessage.__args__:
        assert f'`{{"t": "{kind.__struct_config__.tag}", …}}`' in text
