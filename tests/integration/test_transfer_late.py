"""A write that was cut and tried again: its first bytes must not come after later ones."""

import os
import threading
from collections.abc import Sequence

import pytest
from tests.integration.transfer_proxy import Notes, make

from kvtide.transfer import Access, WriteSlice, inbound
from kvtide.transfer.channel import Channel, Check
from kvtide.transfer.hashed import receive_hashed

SIZE = 64 << 10


class Sluggish:
    """The owner's first thread that takes a write: it sleeps with the bytes unread."""

    def __init__(self) -> None:
        self.awake = threading.Event()
        self.left = threading.Event()
        self.channel: Channel | None = None

    def receive(
        self, channel: Channel, views: Sequence[memoryview], check: Check
    ) -> tuple[list[int], list[int]]:
        if self.channel is not None:
            return receive_hashed(channel, views, check)
        self.channel = channel
        self.awake.wait(30)
        try:
            return receive_hashed(channel, views, check)
        finally:
            self.left.set()


async def test_a_write_given_up_does_not_come_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sluggish, shutdown = Sluggish(), Channel.shutdown

    def wake(channel: Channel) -> None:
        shutdown(channel)
        if channel is sluggish.channel:
            sluggish.awake.set()

    monkeypatch.setattr(inbound, "receive_hashed", sluggish.receive)
    monkeypatch.setattr(Channel, "shutdown", wake)
    notes = Notes()
    async with make("owner") as owner, make("writer", notes) as writer:
        region = owner.register(bytearray(SIZE), name="arena")
        handle = region.handle(Access.WRITE)
        peer = await writer.connect(owner.address)
        old, new = memoryview(os.urandom(SIZE)), memoryview(os.urandom(SIZE))
        try:
            # silence of a quarter of this is too long
            await peer.write([WriteSlice(handle, 0, old)], timeout_s=8)
            assert notes.retries
            await peer.write([WriteSlice(handle, 0, new)], timeout_s=8)
        finally:
            sluggish.awake.set()
        assert sluggish.left.wait(20)
        assert region.view == new
