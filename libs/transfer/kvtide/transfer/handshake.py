"""How two endpoints prove to each other that they hold the cluster's secret.

    client  HELLO      version, purpose, both nodes and epochs, nonce
    server  CHALLENGE  version, status, epoch, nonce, MAC over all of that
    client  PROOF      MAC
    server  READY      status, MAC

Nothing is read, and no length above 255 believed, before the proof. The MACs are
keyed with a key derived for this alone, are over the whole exchange so far, and
differ by role, so that none can be replayed or reflected.
"""

import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from kvtide.transfer.channel import Channel, Check
from kvtide.transfer.errors import Refused, StaleEpoch
from kvtide.transfer.handles import PROTOCOL, EndpointAddress
from kvtide.transfer.wire import LANE_BYTES, MAGIC

_START = struct.Struct("<4sB")
_HELLO = struct.Struct("<BQQ32sBB")
_CHALLENGE = struct.Struct("<BQ32s32s")
_READY = struct.Struct("<B32s")
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_MOST_NODE_BYTES = 255


class CrowdedError(Refused):
    """The other end has as many connections as it takes; later it may have room."""


class Use(IntEnum):
    """What a connection is for."""

    CONTROL = 1
    DATA = 2


class Verdict(IntEnum):
    """How the server takes a client."""

    WELCOME = 0
    WRONG_NODE = 1
    WRONG_EPOCH = 2
    CLIENT_STALE = 3
    TOO_MANY = 4


@dataclass(frozen=True, slots=True)
class Session:
    """A connection whose ends have proved themselves."""

    node: str
    epoch: int
    use: Use
    send_key: bytes
    receive_key: bytes
    lane: bytes
    """Names the connection; 16 bytes that both ends know and nobody else."""


Admit = Callable[[str, int], Verdict]
"""Asked with the proved (node, epoch) of a client."""


def greet(
    channel: Channel,
    key: bytes,
    us: tuple[str, int],
    address: EndpointAddress,
    use: Use,
    check: Check,
) -> Session:
    """The client's side.

    Raises:
        Refused: another protocol version, secret or node, or too many connections.
        StaleEpoch: one of the two epochs is out of date.
        OSError, and whatever ``check`` raises.
    """
    ours, theirs = us[0].encode(), address.node.encode()
    nonce = secrets.token_bytes(_NONCE_BYTES)
    lengths = (len(ours), len(theirs))
    fields = _HELLO.pack(use, us[1], address.epoch, nonce, *lengths)
    hello = _START.pack(MAGIC, PROTOCOL) + fields + ours + theirs
    channel.send([hello], check)
    start = channel.receive(_START.size, check)
    magic, version = _START.unpack(start)
    if magic != MAGIC:
        raise Refused("what answers there is not an endpoint", node=address.node)
    if version != PROTOCOL:
        raise Refused(
            f"the peer speaks protocol {version}, we speak {PROTOCOL}",
            node=address.node,
        )
    challenge = channel.receive(_CHALLENGE.size, check)
    verdict, epoch, _, mac = _CHALLENGE.unpack(challenge)
    script = hello + start + challenge[:-_PROOF_BYTES]
    if not hmac.compare_digest(mac, _mac(key, b"server", script)):
        raise Refused("the peer holds another secret", node=address.node)
    _raise_for(verdict, address, epoch)
    channel.send([_mac(key, b"client", script)], check)
    ready = channel.receive(_READY.size, check)
    verdict, mac = _READY.unpack(ready)
    if not hmac.compare_digest(mac, _mac(key, b"ready" + ready[:1], script)):
        raise Refused("the peer's answer is not genuine", node=address.node)
    _raise_for(verdict, address, epoch)
    return Session(
        address.node,
        address.epoch,
        use,
        _mac(key, b"to server", script),
        _mac(key, b"to client", script),
        _mac(key, b"lane", script)[:LANE_BYTES],
    )


def _raise_for(verdict: int, address: EndpointAddress, epoch: int) -> None:
    node = address.node
    match verdict:
        case Verdict.WELCOME:
            return
        case Verdict.WRONG_EPOCH:
            raise StaleEpoch(
                f"the peer's epoch is {epoch}, not {address.epoch}", node=node
            )
        case Verdict.CLIENT_STALE:
            raise StaleEpoch("the peer knows a newer epoch of ours", node=node)
        case Verdict.WRONG_NODE:
            raise Refused("another node answers at the peer's address", node=node)
        case Verdict.TOO_MANY:
            raise CrowdedError("the peer has too many connections", node=node)
        case _:
            raise Refused(f"the peer gives an unknown reason {verdict}", node=node)


def receive(
    channel: Channel, key: bytes, us: tuple[str, int], admit: Admit, check: Check
) -> Session:
    """The server's side; after an error the connection must be closed.

    Raises:
        Refused: the other end is no endpoint, speaks another version, or can't
            prove itself; the message says what it looked like.
        StaleEpoch: it wants, or is, another epoch.
        OSError, and whatever ``check`` raises.
    """
    start = channel.receive(_START.size, check)
    magic, version = _START.unpack(start)
    if magic != MAGIC:
        raise Refused(f"{look_of(start + channel.pending(64))} on the transfer port")
    if version != PROTOCOL:
        channel.send([_START.pack(MAGIC, PROTOCOL)], check)
        channel.part()
        raise Refused(f"a peer of protocol {version}; we speak {PROTOCOL}")
    fields = channel.receive(_HELLO.size, check)
    use, epoch, wanted_epoch, _, ours_length, wanted_length = _HELLO.unpack(fields)
    names = channel.receive(ours_length + wanted_length, check)
    try:
        node, wanted_node = names[:ours_length].decode(), names[ours_length:].decode()
        use = Use(use)
    except ValueError as error:
        raise Refused(f"a malformed hello: {error}") from error
    verdict = Verdict.WELCOME
    if wanted_node != us[0]:
        verdict = Verdict.WRONG_NODE
    elif wanted_epoch != us[1]:
        verdict = Verdict.WRONG_EPOCH
    answer = _START.pack(MAGIC, PROTOCOL) + _CHALLENGE.pack(
        verdict, us[1], secrets.token_bytes(_NONCE_BYTES), bytes(_PROOF_BYTES)
    )
    script = start + fields + names + answer[:-_PROOF_BYTES]
    channel.send([answer[:-_PROOF_BYTES], _mac(key, b"server", script)], check)
    if verdict is not Verdict.WELCOME:
        raise StaleEpoch(f"{node!r} wants {wanted_node!r} of epoch {wanted_epoch}")
    proof = channel.receive(_PROOF_BYTES, check)
    if not hmac.compare_digest(proof, _mac(key, b"client", script)):
        raise Refused(f"{node!r} does not hold the cluster's secret", node=node)
    verdict = admit(node, epoch)
    mac = _mac(key, b"ready" + bytes([verdict]), script)
    channel.send([_READY.pack(verdict, mac)], check)
    if verdict is not Verdict.WELCOME:
        raise StaleEpoch(f"{node!r} of epoch {epoch}: {verdict.name}", node=node)
    return Session(
        node,
        epoch,
        use,
        _mac(key, b"to client", script),
        _mac(key, b"to server", script),
        _mac(key, b"lane", script)[:LANE_BYTES],
    )


def _mac(key: bytes, role: bytes, script: bytes) -> bytes:
    return hmac.digest(key, bytes([len(role)]) + role + script, "sha256")


def look_of(data: bytes) -> str:
    """What the first bytes of a stranger look like, for people."""
    if data[:1] == b"\x16" and data[1:2] == b"\x03":
        return "a TLS hello"
    if data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "a pickle"
    verb = data.split(b" ", 1)[0]
    if verb in (b"GET", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"PRI", b"CONNECT"):
        return "an HTTP request"
    if data.startswith(b"SSH-"):
        return "an SSH client"
    return f"unknown bytes {data[:8].hex()}"
