"""The beater's thread ends when it is told, whatever its library makes of it."""

import asyncio
import threading

import pytest

from kvtide.bus import Identity, NodeTimes, ThreadBeater
from kvtide.bus.beater import Pulse
from kvtide.bus.errors import Disconnected
from kvtide.bus.link import Link
from kvtide.bus.subjects import Subjects
from kvtide.bus.vitals import Vitals
from kvtide.kv import NodeId, Role
from kvtide.runtime import SystemClock


async def no_fence() -> None:
    raise AssertionError("nobody was paused")


def make_pulse() -> Pulse:
    clock = SystemClock()
    return Pulse(
        Vitals((Role.STORE,), "host", clock.wall()),
        Identity(NodeId("node"), epoch=1),
        Subjects("local"),
        clock,
        NodeTimes(),
        no_fence,
    )


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_its_thread_ends_though_cancellations_are_lost(lost: int) -> None:
    connecting = threading.Event()

    async def connect() -> Link:
        left = lost
        connecting.set()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if left == 0:
                    raise
                left -= 1

    before = set(threading.enumerate())
    beater = ThreadBeater(connect)
    await beater.start(make_pulse())
    assert await asyncio.to_thread(connecting.wait, 10)
    async with asyncio.timeout(10):
        await beater.close()
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert "kvtide-beater" not in names


async def test_a_beater_that_cannot_connect_ends_by_itself() -> None:
    async def connect() -> Link:
        raise Disconnected("no server")

    beater = ThreadBeater(connect)
    await beater.start(make_pulse())
    async with asyncio.timeout(10):
        await beater.close()
