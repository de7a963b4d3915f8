"""Garbage is counted each time, and told of a few times a minute."""

import asyncio

from structlog.testing import capture_logs

from kvtide.bus import Identity, Incoming, MemoryBus, MemoryHub
from kvtide.bus.complaints import MINUTE_S, Complaints
from kvtide.kv import NodeId
from kvtide.runtime import ManualClock


def test_a_kind_is_told_of_so_often_a_minute() -> None:
    complaints = Complaints(most_a_min=3)
    told = [complaints.of("garbage", 0.1 * number) for number in range(10)]
    assert told == [0, 0, 0] + [None] * 7


def test_the_next_minute_says_how_many_were_left_out() -> None:
    complaints = Complaints(most_a_min=3)
    for number in range(10):
        complaints.of("garbage", 0.1 * number)
    assert complaints.of("garbage", MINUTE_S) == 7
    assert complaints.of("garbage", MINUTE_S + 1) == 0
    assert complaints.of("garbage", 2 * MINUTE_S) == 0, "those were told of"


def test_kinds_do_not_hide_each_other() -> None:
    complaints = Complaints(most_a_min=1)
    assert complaints.of("garbage", 0.0) == 0
    assert complaints.of("garbage", 0.0) is None
    assert complaints.of("protocol", 0.0) == 0


async def test_a_flood_of_garbage_is_counted_and_hardly_logged() -> None:
    clock = ManualClock()
    hub = MemoryHub(clock)
    identity = Identity(NodeId("conductor-0"), 1)
    flood = 200

    async def heard(incoming: Incoming) -> None:
        raise AssertionError(incoming)

    async with MemoryBus(hub, identity) as bus:
        subject = "kvtide.local.anything"
        await bus.subscribe(subject, heard)
        stranger = hub.link(NodeId("stranger"))
        with capture_logs() as lines:
            for _ in range(flood):
                await stranger.send(subject, b"\xdd\xff\xff\xff\xff")
                await asyncio.sleep(0)
            await asyncio.sleep(0)
        labels = {"reason": "bytes"}
        registry = bus.metrics.registry
        counted = registry.get_sample_value("kvtide_bus_dropped_total", labels)
    assert counted == flood
    assert len([line for line in lines if line["event"] == "message dropped"]) == 10
