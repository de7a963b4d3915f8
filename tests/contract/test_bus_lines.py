"""A body that can't be fetched holds up its own sender and nobody else."""

from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import cycle

import pytest
from tests.contract.bus_rig import (
    LIMITS,
    Inbox,
    Rig,
    ack,
    counted,
    keys,
    pool_of,
    rig_on,
    until,
)
from tests.integration.nats_server import NatsServer, nats_server

from kvtide.bus.messages import AnyMessage, Presence
from kvtide.transfer import Fault, FaultPlan, Operation

LARGE = Presence(keys=keys(40_000))
SLOW = replace(LIMITS, fetch_timeout_s=30.0)


@pytest.fixture(params=["memory", "nats"])
def server(request: pytest.FixtureRequest) -> Generator[NatsServer | None]:
    if request.param == "memory":
        yield None
        return
    with nats_server() as started:
        yield started


def from_stopped(fault: Fault) -> FaultPlan:
    """Whatever is fetched of the node ``stopped`` fares so."""

    def plan(source: str, target: str, operation: Operation, nbytes: int) -> Fault:
        del source, operation, nbytes
        return fault if target == "stopped" else Fault()

    return plan


def said_by(inbox: Inbox, node: str) -> list[AnyMessage]:
    return [each.message for each in inbox.got if each.sender.node == node]


async def publish(rig: Rig, inbox: Inbox) -> None:
    """``stopped`` sends a large body between others, then ``left`` sends, too."""
    stopped, left = await rig.bus("stopped"), await rig.bus("left")
    right = await rig.bus("right", limits=SLOW)
    await right.subscribe(pool_of(right, "right"), inbox)
    subject = pool_of(left, "right")
    for message in (ack(0), LARGE, ack(1), ack(2)):
        await stopped.publish(subject, message)
    await until(lambda: len(inbox.got) == 1, "the first one")
    await left.publish(subject, ack(100))
    await left.publish(subject, LARGE)
    await left.publish(subject, ack(101))


async def test_a_stuck_body_delays_no_other_sender_and_keeps_its_own_in_order(
    server: NatsServer | None,
) -> None:
    async with rig_on(server) as rig:
        rig.fabric.faults = from_stopped(Fault(delay_s=3.0))
        inbox = Inbox()
        await publish(rig, inbox)
        await until(lambda: len(inbox.got) == 7, "all of them")
        first = [each.sender.node for each in inbox.got[:4]]
        assert first == ["stopped", "left", "left", "left"]
        assert said_by(inbox, "left") == [ack(100), LARGE, ack(101)]
        assert said_by(inbox, "stopped") == [ack(0), LARGE, ack(1), ack(2)]


async def test_after_a_body_that_never_comes_its_sender_is_heard_again(
    server: NatsServer | None,
) -> None:
    async with rig_on(server) as rig:
        rig.fabric.faults = from_stopped(Fault(drop=True))
        stopped = await rig.bus("stopped")
        quick = replace(LIMITS, fetch_timeout_s=0.2)
        right = await rig.bus("right", limits=quick)
        inbox = Inbox()
        subscription = await right.subscribe(pool_of(right, "right"), inbox)
        for message in (LARGE, ack(1), LARGE, ack(2)):
            await stopped.publish(pool_of(stopped, "right"), message)
        await until(lambda: len(inbox.got) == 2, "the others")
        assert inbox.messages == [ack(1), ack(2)]
        assert counted(right, "dropped", reason="blob") == 2
        await until(lambda: subscription.waiting == 0, "nothing is left in line")


async def test_handlers_run_one_at_a_time_and_each_sender_stays_in_order(
    server: NatsServer | None,
) -> None:
    delays: Iterator[float] = cycle([0.03, 0.0, 0.001, 0.02])

    def plan(source: str, target: str, operation: Operation, nbytes: int) -> Fault:
        del source, target, operation, nbytes
        return Fault(delay_s=next(delays))

    async with rig_on(server) as rig:
        rig.fabric.faults = plan
        senders = [await rig.bus(name) for name in ("a", "b", "c")]
        right = await rig.bus("right", limits=SLOW)
        inbox = Inbox()
        await right.subscribe(pool_of(right, "right"), inbox)
        sent: list[AnyMessage] = []
        for number in range(12):
            large = Presence(keys=keys(17_000 + number))
            sent.append(large if number % 3 == 0 else ack(number))
            for bus in senders:
                await bus.publish(pool_of(bus, "right"), sent[-1])
        await until(lambda: len(inbox.got) == 36, "all of them")
        for name in ("a", "b", "c"):
            assert said_by(inbox, name) == sent


async def test_a_stuck_sender_may_fill_half_of_a_subscription(
    server: NatsServer | None,
) -> None:
    async with rig_on(server) as rig:
        rig.fabric.faults = from_stopped(Fault(drop=True))
        stopped, left = await rig.bus("stopped"), await rig.bus("left")
        right = await rig.bus("right", limits=SLOW)
        inbox, lost = Inbox(), list[int]()
        subscription = await right.subscribe(
            pool_of(right, "right"), inbox, limit=8, on_lost=lost.append
        )
        subject = pool_of(left, "right")
        await stopped.publish(subject, LARGE)
        for number in range(6):
            await stopped.publish(subject, ack(number))
        await until(lambda: sum(lost) == 3, "half is held, and the rest lost")
        assert (subscription.waiting, subscription.lost) == (4, 3)
        await left.publish(subject, ack(100))
        await until(lambda: inbox.messages == [ack(100)], "another's passes")
        await subscription.close()
        assert subscription.waiting == 0
