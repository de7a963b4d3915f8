"""A peer that holds the secret and still sends nonsense: refused, and nothing breaks."""

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings, strategies as st

from kvtide.runtime import SystemClock
from kvtide.transfer import Access, Endpoint, ReadSlice, RegionHandle
from kvtide.transfer.capability import derive_key
from kvtide.transfer.channel import Channel, ChannelClosedError
from kvtide.transfer.handles import PROTOCOL
from kvtide.transfer.handshake import Session, Use, greet
from kvtide.transfer.wire import (
    HEAD_BYTES,
    Ask,
    Kind,
    Status,
    pack,
    pack_ask,
    unpack_head,
)

SECRET = b"the secret of this test's cluster"


def give_up() -> None:
    raise TimeoutError


class Insider:
    """A proved connection on which anything can be sent."""

    def __init__(self, owner: Endpoint) -> None:
        address = owner.address
        key = derive_key(SECRET, "authentication")
        sock = socket.create_connection((address.host, address.port))
        self.channel = Channel(sock)
        self.channel.tick(10)
        self.session: Session = greet(
            self.channel, key, ("insider", 1), address, Use.DATA, give_up
        )

    def send(self, data: bytes) -> bytes:
        """Send, and take all that comes until the owner hangs up or answers."""
        try:
            self.channel.send([data], give_up)
            return self.channel.receive(HEAD_BYTES, give_up)
        except (ChannelClosedError, ConnectionError):
            return b""
        finally:
            self.channel.close()


@pytest.fixture
async def owner() -> AsyncIterator[Endpoint]:
    logging.disable(logging.WARNING)
    async with Endpoint(
        node="owner", epoch=1, secret=SECRET, clock=SystemClock(), shm_dir=None
    ) as endpoint:
        yield endpoint
    logging.disable(logging.NOTSET)


async def works(owner: Endpoint, handle: RegionHandle) -> None:
    async with Endpoint(
        node="reader", epoch=1, secret=SECRET, clock=SystemClock(), shm_dir=None
    ) as reader:
        peer = await reader.connect(owner.address)
        into = memoryview(bytearray(4))
        await peer.read([ReadSlice(handle, 0, into)], timeout_s=10)
        assert bytes(into) == b"some"


async def test_nonsense_on_a_proved_connection(owner: Endpoint) -> None:
    region = owner.register(bytearray(b"some bytes"), name="arena")

    @settings(max_examples=60, deadline=None, database=None)
    @given(st.binary(min_size=1, max_size=200), st.integers(0, 20), st.booleans())
    def throw(data: bytes, kind: int, framed: bool) -> None:
        insider = Insider(owner)
        if framed:
            known = Kind(kind) if kind in list(Kind) else Kind.READ
            data = pack(insider.session.send_key, known, 1, data)
        # the rest of a frame that never comes is waited for only while we stay
        insider.channel.send([data], give_up)
        insider.channel.close()

    await asyncio.to_thread(throw)
    await works(owner, region.handle())


async def test_frames_that_are_refused(owner: Endpoint) -> None:
    region = owner.register(bytearray(b"some bytes"), name="arena")
    handle = region.handle(Access.WRITE)
    grant = (handle.region, handle.capability)
    good = pack_ask(Ask([grant], [(0, 0, 4)], "reuse"))

    def framed(insider: Insider, kind: Kind, body: bytes, number: int = 1) -> bytes:
        return pack(insider.session.send_key, kind, number, body)

    def head_of(kind: Kind, body: bytes) -> Status | None:
        insider = Insider(owner)
        answer = insider.send(framed(insider, kind, body))
        return unpack_head(answer).status if answer else None

    def all_of_it() -> None:
        assert head_of(Kind.READ, good) is Status.OK
        # beyond the region, and lengths that no memory has: answered, not allocated
        for piece in ((0, 8, 4), (0, 0, 2**63), (0, 2**64 - 1, 2**64 - 1)):
            body = pack_ask(Ask([grant], [piece], "reuse"))
            assert head_of(Kind.READ, body) is Status.OUT_OF_BOUNDS
        forged = pack_ask(Ask([(handle.region, bytes(25))], [(0, 0, 4)], "reuse"))
        assert head_of(Kind.READ, forged) is Status.ACCESS_DENIED
        # not a body, an answer from a client, and a number that came before
        assert head_of(Kind.READ, b"nonsense") is None
        assert head_of(Kind.ANSWER, b"") is None
        assert head_of(Kind.MAP, pack_ask(Ask([], [], ""))) is Status.REFUSED
        insider = Insider(owner)
        twice = framed(insider, Kind.PING, b"", 0)
        assert insider.send(twice) == b""
        # another connection's key
        insider, other = Insider(owner), Insider(owner)
        assert insider.send(framed(other, Kind.PING, b"")) == b""
        other.channel.close()
        # a declared length beyond the limit
        insider = Insider(owner)
        head = struct.pack("<4sBBBBIQ", b"KVT1", PROTOCOL, 1, 0, 0, 2**31, 1) + bytes(
            16
        )
        assert insider.send(head) == b""

    await asyncio.to_thread(all_of_it)
    await works(owner, handle)
