"""Every message survives the wire; nothing else gets through, and nothing crashes."""

from enum import StrEnum
from functools import cache
from typing import Any, NewType, get_args, get_origin, get_type_hints

import blake3
import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from kvtide.bus import PROTOCOL, Codec, DropReason, WireError, decode_plain
from kvtide.bus.codec import BlobRef, Envelope
from kvtide.bus.messages import Ack, AnyMessage, Failure, Message
from kvtide.kv import NodeId, NodeRef
from kvtide.transfer import EndpointAddress, RegionHandle

SENDER = NodeRef(NodeId("node-1"), 1_700_000_000_000)
CODEC = Codec()
KINDS: tuple[type[Message], ...] = AnyMessage.__args__


def wrapped(body: bytes, protocol: int = PROTOCOL) -> bytes:
    return Codec(protocol).wrap(SENDER, "trace", body)


def reason_of(data: bytes) -> str:
    with pytest.raises(WireError) as caught:
        CODEC.open(data)
    return caught.value.reason


PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40),
    bytes: st.binary(max_size=40),
    type(None): st.none(),
}


@cache
def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type that a message may hold."""
    if hint in PLAIN:
        return PLAIN[hint]
    if isinstance(hint, NewType):
        return values(hint.__supertype__)
    if parts := get_args(hint):
        return values_of_parts(hint, parts)
    if issubclass(hint, StrEnum):
        return st.sampled_from(list(hint))
    hints = get_type_hints(hint)
    names = [*getattr(hint, "__struct_fields__", hint.__annotations__)]
    return st.builds(hint, **{name: values(hints[name]) for name in names})


def values_of_parts(hint: Any, parts: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """Values of a tuple or a union."""
    if get_origin(hint) is not tuple:
        return st.one_of([values(part) for part in parts])
    if Ellipsis in parts:
        return st.lists(values(parts[0]), max_size=4).map(tuple)
    return st.tuples(*map(values, parts))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_it_survives_the_wire(kind: type[Message]) -> None:
    @given(values(kind))
    @settings(max_examples=25, deadline=None)
    def survives(message: Message) -> None:
        opened = CODEC.open(wrapped(CODEC.encode_body(message)))
        assert opened.body == message
        assert type(opened.body) is kind
        assert (opened.sender, opened.trace) == (SENDER, "trace")

    survives()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_it_can_be_read_knowing_no_types(kind: type[Message]) -> None:
    @given(values(kind))
    @settings(max_examples=5, deadline=None)
    def readable(message: Message) -> None:
        plain = decode_plain(wrapped(CODEC.encode_body(message)))
        assert plain[:4] == [PROTOCOL, SENDER.node, SENDER.epoch, "trace"]
        assert plain[4]["t"] == kind.__struct_config__.tag
        assert set(plain[4]) == {"t", *kind.__struct_fields__}

    readable()


def test_tags_are_unique_and_none_is_the_blob() -> None:
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert len(set(tags)) == len(tags)
    assert BlobRef.__struct_config__.tag not in tags


def test_a_later_field_is_ignored() -> None:
    body = msgspec.msgpack.encode(
        {"t": "failure", "code": "x", "reason": "y", "added_later": [1, {"a": b"b"}]}
    )
    assert CODEC.open(wrapped(body)).body == Failure(code="x", reason="y")


def test_a_later_part_of_the_envelope_is_ignored() -> None:
    body = msgspec.Raw(CODEC.encode_body(Ack()))
    data = msgspec.msgpack.encode([PROTOCOL, "n", 1, "", body, "added later"])
    assert CODEC.open(data).body == Ack()


def encoded(thing: Any) -> bytes:
    return msgspec.msgpack.encode(thing)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", DropReason.BYTES),
        (b"hello", DropReason.BYTES),
        (b"\xc1", DropReason.BYTES),
        (encoded([]), DropReason.BYTES),
        (encoded({"t": "ack"}), DropReason.BYTES),
        (encoded([PROTOCOL]), DropReason.BYTES),
        (encoded([PROTOCOL, 7, 1, "", {"t": "ack"}]), DropReason.BYTES),
        (encoded([PROTOCOL, "n", -1.5, "", {"t": "ack"}]), DropReason.BYTES),
        (encoded(["one", "n", 1, "", {"t": "ack"}]), DropReason.BYTES),
        (wrapped(encoded({"t": "ack"}), protocol=2), DropReason.PROTOCOL),
        (encoded([99, "n", "another", "shape"]), DropReason.PROTOCOL),
        (encoded([99]), DropReason.PROTOCOL),
        (wrapped(encoded({"t": "nonsense"})), DropReason.TYPE),
        (wrapped(encoded({"t": 3})), DropReason.BYTES),
        (wrapped(encoded({"no": "type"})), DropReason.BYTES),
        (wrapped(encoded([1, 2])), DropReason.BYTES),
        (wrapped(encoded({"t": "failure"})), DropReason.FIELDS),
        (
            wrapped(encoded({"t": "failure", "code": 1, "reason": ""})),
            DropReason.FIELDS,
        ),
    ],
)
def test_what_is_no_message_is_refused_with_a_reason(data: bytes, reason: str) -> None:
    assert reason_of(data) == reason


DEEP = 200_000
ATTACKS = {
    "deep arrays": b"\x91" * DEEP,
    "deep maps": b"\x81\xa1t" * DEEP,
    "a huge array": b"\xdd\xff\xff\xff\xff",
    "a huge map": b"\xdf\xff\xff\xff\xff",
    "huge bytes": b"\xc6\xff\xff\xff\xff",
    "a huge string": b"\xdb\xff\xff\xff\xff",
    "a huge extension": b"\xc9\xff\xff\xff\xff\x01",
    "bad utf-8": b"\xa2\xff\xff",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
@pytest.mark.parametrize(
    "around",
    [
        b"",
        b"\x95\x01\xa1n\x01\xa0",
        b"\x95\x01\xa1n\x01\xa0\x82\xa1t\xa7failure\xa4code",
        b"\x95\x01\xa1n\x01\xa0\x82\xa1t\xa7failure\xa7unknown",
        b"\x95\x01\xa1n\x01\xa0\x82\xa1t\xa8presence\xa4keys",
    ],
    ids=["outside", "as the body", "in a field", "in an unknown field", "in a list"],
)
def test_an_attack_on_depth_or_length_is_refused(around: bytes, attack: bytes) -> None:
    reason_of(around + attack)
    with pytest.raises(WireError):
        decode_plain(around + attack)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_opened_or_refused(data: bytes) -> None:
    for candidate in (data, wrapped(b"\x81\xa1t" + data)):
        try:
            CODEC.open(candidate)
        except WireError as error:
            assert error.reason in set(DropReason)  # noqa: PT017 - either way is right


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_message_is_opened_or_refused(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    whole = bytearray(wrapped(CODEC.encode_body(data.draw(values(kind)))))
    index = data.draw(st.integers(0, len(whole) - 1))
    whole[index] = data.draw(st.integers(0, 255))
    try:
        CODEC.open(bytes(whole))
    except WireError as error:
        assert error.reason in set(DropReason)  # noqa: PT017 - either way is right


def blob(body: bytes, *, length: int | None = None, digest: bytes | None = None) -> Any:
    return BlobRef(
        address=EndpointAddress("n", 1, "h", 1, "", 1),
        handle=RegionHandle("n", 1, 1, len(body), b"cap", ""),
        length=len(body) if length is None else length,
        blake3=blake3.blake3(body).digest() if digest is None else digest,
    )


def test_a_blob_reference_survives_the_wire_and_opens_its_body() -> None:
    body = CODEC.encode_body(Failure(code="a", reason="b"))
    ref = blob(body)
    opened = CODEC.open(wrapped(CODEC.encode_body(ref)))
    assert opened.body == ref
    assert CODEC.open_blob(body, ref) == Failure(code="a", reason="b")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"length": 3}, DropReason.BLOB),
        ({"digest": b"\x00" * 32}, DropReason.BLOB),
    ],
)
def test_a_body_that_is_not_the_promised_one_is_refused(
    change: dict[str, Any], reason: str
) -> None:
    body = CODEC.encode_body(Ack())
    with pytest.raises(WireError) as caught:
        CODEC.open_blob(body, blob(body, **change))
    assert caught.value.reason == reason


def test_a_blob_in_a_blob_is_refused() -> None:
    inner = CODEC.encode_body(blob(b"x"))
    with pytest.raises(WireError) as caught:
        CODEC.open_blob(inner, blob(inner))
    assert caught.value.reason == DropReason.FIELDS


def test_the_envelope_is_the_documented_array() -> None:
    assert Envelope.__struct_fields__ == ("protocol", "node", "epoch", "trace", "body")
