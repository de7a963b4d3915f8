"""Bytes ↔ messages. The envelope, the body in it, and what is refused.

An envelope is a MessagePack array ``[protocol, node, epoch, trace, body]``. The body is
a map whose ``t`` names its type: a message, or ``blob`` for one that is too large and
lies with the sender's transfer endpoint. Unknown fields are ignored, so that fields can
be added; whatever else does not fit is a ``WireError``, never a crash.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import blake3
import msgspec

from kvtide.bus.errors import WireError
from kvtide.bus.messages import AnyMessage, Message
from kvtide.kv import NodeId, NodeRef
from kvtide.transfer import EndpointAddress, RegionHandle

PROTOCOL = 1
"""The version of envelope and messages. Others' are refused."""

DIGEST_BYTES = 32


class DropReason(StrEnum):
    """Why a message that arrived was dropped; a label of the counter."""

    BYTES = "bytes"
    PROTOCOL = "protocol"
    TYPE = "type"
    FIELDS = "fields"
    BLOB = "blob"
    STALE = "stale"
    FULL = "full"


class BlobRef(msgspec.Struct, frozen=True, tag_field="t", tag="blob", kw_only=True):
    """Where a body lies that is too large for the bus, and what it hashes to.

    ``blake3`` is over the ``length`` bytes of the body.
    """

    address: EndpointAddress
    handle: RegionHandle
    length: int
    blake3: bytes


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What every message on the wire is wrapped in."""

    protocol: int
    node: str
    epoch: int
    trace: str
    body: msgspec.Raw


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """The part of an envelope that every version of it has."""

    protocol: int
    node: str = ""


class _Tag(msgspec.Struct, frozen=True):
    """What a body says that it is."""

    t: str


@dataclass(frozen=True, slots=True)
class Opened:
    """An envelope that could be read; ``body`` may still have to be fetched."""

    sender: NodeRef
    trace: str
    body: AnyMessage | BlobRef


class Codec:
    """Encodes and decodes. Stateless but for its cached coders; for one thread."""

    def __init__(self, protocol: int = PROTOCOL) -> None:
        """Build the coders once; building is what costs."""
        self.protocol = protocol
        self._encoder = msgspec.msgpack.Encoder()
        self._head = msgspec.msgpack.Decoder(_Head)
        self._envelope = msgspec.msgpack.Decoder(Envelope)
        self._body: msgspec.msgpack.Decoder[AnyMessage | BlobRef] = (
            msgspec.msgpack.Decoder(AnyMessage | BlobRef)
        )
        self._message: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(
            AnyMessage
        )
        self._tag = msgspec.msgpack.Decoder(_Tag)
        self._tags = frozenset(_tag_of(kind) for kind in AnyMessage.__args__)

    def encode_body(self, message: Message | BlobRef) -> bytes:
        """The body alone."""
        return self._encoder.encode(message)

    def wrap(self, sender: NodeRef, trace: str, body: bytes) -> bytes:
        """An encoded body in its envelope."""
        envelope = Envelope(
            self.protocol, sender.node, sender.epoch, trace, msgspec.Raw(body)
        )
        return self._encoder.encode(envelope)

    def open(self, data: bytes) -> Opened:
        """Read an envelope and its body.

        Raises:
            WireError: it is none of ours; ``reason`` says which way.
        """
        envelope = self._unwrap(data)
        sender = NodeRef(NodeId(envelope.node), envelope.epoch)
        return Opened(sender, envelope.trace, self._open_body(envelope))

    def open_blob(self, data: bytes | bytearray, ref: BlobRef) -> AnyMessage:
        """Read a body that was fetched.

        Raises:
            WireError: the bytes are not what ``ref`` promised, or no message.
        """
        if len(data) != ref.length or blake3.blake3(data).digest() != ref.blake3:
            raise WireError(
                "a fetched body is not what its reference says",
                reason=DropReason.BLOB,
                node=ref.address.node,
            )
        try:
            return self._message.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WireError(
                f"a fetched body is no message: {error}",
                reason=DropReason.FIELDS,
                node=ref.address.node,
            ) from error

    def _unwrap(self, data: bytes) -> Envelope:
        try:
            head = self._head.decode(data)
            if head.protocol != self.protocol:
                raise WireError(
                    f"protocol {head.protocol} of node {head.node!r}, ours is "
                    f"{self.protocol}: run the same version everywhere",
                    reason=DropReason.PROTOCOL,
                    node=head.node,
                )
            return self._envelope.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WireError(f"no envelope: {error}", reason=DropReason.BYTES) from error

    def _open_body(self, envelope: Envelope) -> AnyMessage | BlobRef:
        try:
            return self._body.decode(envelope.body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WireError(
                f"no message: {error}",
                reason=self._why(envelope.body),
                node=envelope.node,
            ) from error

    def _why(self, body: msgspec.Raw) -> DropReason:
        """Whether the type of a body that can't be read is one of ours."""
        try:
            tag = self._tag.decode(body).t
        except (msgspec.DecodeError, RecursionError):
            return DropReason.BYTES
        return DropReason.FIELDS if tag in self._tags else DropReason.TYPE


def _tag_of(kind: type[Message]) -> str:
    return str(kind.__struct_config__.tag)


def decode_plain(data: bytes) -> Any:
    """Any message as plain lists, maps, numbers and strings, knowing no types.

    For people who look on: newer and older protocols can be read too.

    Raises:
        WireError: it is not MessagePack.
    """
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"not MessagePack: {error}", reason=DropReason.BYTES) from error
