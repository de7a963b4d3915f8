"""The outbox that workers publish through: order, bounds, losses."""

import asyncio

import pytest

from kvtide.bus import Disconnected
from kvtide.bus.messages import HandoverTaken, Message
from kvtide.bus.outbox import Outbox
from kvtide.kv import RequestId
from kvtide.runtime import TaskScope


class SlowBus:
    """Publishes when its gate is open; refuses what a test names."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.gate = asyncio.Event()
        self.refused: set[str] = set()

    async def publish(self, subject: str, message: Message) -> None:
        del message
        await self.gate.wait()
        if subject in self.refused:
            raise Disconnected("no connection")
        self.sent.append(subject)


MESSAGE = HandoverTaken(request=RequestId("r"), attempt=1)


async def test_messages_go_out_in_the_order_in_which_they_were_posted() -> None:
    bus = SlowBus()
    outbox = Outbox(bus)
    async with TaskScope() as tasks:
        tasks.spawn(outbox.run(), name="outbox")
        for number in range(20):
            outbox.post(str(number), MESSAGE)
        bus.gate.set()
        assert await outbox.flushed(timeout_s=5)
    assert bus.sent == [str(number) for number in range(20)]
    assert outbox.lost == 0


async def test_what_cannot_be_sent_is_counted_and_the_rest_goes_on() -> None:
    bus = SlowBus()
    bus.gate.set()
    bus.refused = {"b"}
    outbox = Outbox(bus)
    async with TaskScope() as tasks:
        tasks.spawn(outbox.run(), name="outbox")
        for subject in "abc":
            outbox.post(subject, MESSAGE)
        assert await outbox.flushed(timeout_s=5)
    assert (bus.sent, outbox.lost) == (["a", "c"], 1)


@pytest.mark.parametrize("limit", [1, 3])
async def test_a_full_line_drops_the_newest(limit: int) -> None:
    bus = SlowBus()
    outbox = Outbox(bus, limit=limit)
    for number in range(5):
        outbox.post(str(number), MESSAGE)
    assert outbox.lost == 5 - limit
    assert not await outbox.flushed(timeout_s=0.01)
    bus.gate.set()
    async with TaskScope() as tasks:
        tasks.spawn(outbox.run(), name="outbox")
        assert await outbox.flushed(timeout_s=5)
    assert bus.sent == [str(number) for number in range(limit)]
