"""What a bus in memory and a bus on a real NATS server must both do."""

import asyncio
from collections.abc import Generator

import pytest
from tests.contract.bus_rig import (
    WAIT_S,
    Inbox,
    ack,
    counted,
    keys,
    pool_of,
    retried,
    rig_on,
    until,
)
from tests.integration.nats_server import NatsServer, nats_server

from kvtide.bus import (
    BusClosed,
    BusTimeout,
    Disconnected,
    Incoming,
    Later,
    NoResponder,
)
from kvtide.bus.messages import (
    Ack,
    AnyMessage,
    Failure,
    LeaseRelease,
    Message,
    Presence,
    PresenceReply,
    StatusQuery,
    TokenAck,
)
from kvtide.kv import (
    Lease,
    NodeId,
    NodeRef,
    RequestId,
)
from kvtide.runtime import LimitError


@pytest.fixture(params=["memory", "nats"])
def server(request: pytest.FixtureRequest) -> Generator[NatsServer | None]:
    if request.param == "memory":
        yield None
        return
    with nats_server() as started:
        yield started


async def test_what_is_published_arrives_with_its_sender(
    server: NatsServer | None,
) -> None:
    async with rig_on(server) as rig:
        left, right = await rig.bus("left", epoch=7), await rig.bus("right")
        inbox = Inbox()
        await right.subscribe(pool_of(right, "right"), inbox)
        await left.publish(pool_of(left, "right"), ack(3))
        await until(lambda: len(inbox.got) == 1, "the message")
        (incoming,) = inbox.got
        assert incoming == Incoming(
            message=ack(3),
            sender=NodeRef(NodeId("left"), 7),
            trace="r-1",
            wants_reply=False,
            subject="kvtide.test.inbox.store.right.pool",
        )


async def test_messages_of_one_sender_stay_in_order(server: NatsServer | None) -> None:
    async with rig_on(server) as rig:
        left, right = await rig.bus("left"), await rig.bus("right")
        inbox = Inbox()
        await right.subscribe(pool_of(right, "right"), inbox)
        sent = [ack(index) for index in range(500)]
        for message in sent:
            await left.publish(pool_of(left, "right"), message)
        await until(lambda: len(inbox.got) == len(sent), "all messages")
        assert inbox.messages == sent


async def test_a_wildcard_hears_all_and_another_cluster_nothing(
    server: NatsServer | None,
) -> None:
    async with rig_on(server) as rig:
        left, right = await rig.bus("left"), await rig.bus("right")
        stranger = await rig.bus("stranger", cluster="other")
        inbox, other = Inbox(), Inbox()
        await right.subscribe(right.subjects.all_blocks(), inbox)
        await stranger.subscribe(stranger.subjects.everything(), other)
        await left.publish(left.subjects.blocks(NodeId("a")), ack(1))
        await left.publish(left.subjects.blocks(NodeId("b")), ack(2))
        await until(lambda: len(inbox.got) == 2, "both")
        assert inbox.messages == [ack(1), ack(2)]
        assert other.got == []


async def test_a_request_gets_its_reply(server: NatsServer | None) -> None:
    async with rig_on(server) as rig:
        left, right = await rig.bus("left"), await rig.bus("right")

        def echo(incoming: Incoming) -> Message:
            assert isinstance(incoming.message, TokenAck)
            return Failure(code=str(incoming.message.index), reason="")

        inbox = Inbox(echo)
        await right.subscribe(pool_of(right, "right"), inbox)
        replies = await asyncio.gather(
            *(
                left.request(pool_of(left, "right"), ack(index), timeout_s=WAIT_S)
                for index in range(50)
            )
        )
        assert replies == [Failure(code=str(index), reason="") for index in range(50)]
        assert all(incoming.wants_reply for incoming in inbox.got)


async def test_a_late_answer_does_not_hold_up_the_next_message(
    server: NatsServer | None,
) -> None:
    async with rig_on(server) as rig:
        left, right = await rig.bus("left"), await rig.bus("right")
        gate = asyncio.Event()

        async def slow() -> Message:
            await gate.wait()
            return Failure(code="slow", reason="")

        def answer(incoming: Incoming) -> Message | Later:
            return Ack() if incoming.message == ack(1) else Later(slow())

        await right.subscribe(pool_of(right, "right"), Inbox(answer))
        subject = pool_of(left, "right")
        async with asyncio.TaskGroup() as tasks:
            late = tasks.create_task(left.request(subject, ack(0), timeout_s=WAIT_S))
            assert await left.request(subject, ack(1), timeout_s=WAIT_S) == Ack()
            assert not late.done()
            gate.set()
        assert late.result() == Failure(code="slow", reason="")


async def test_nobody_listening_is_told_at_once(server: NatsServer | None) -> None:
    async with rig_on(server) as rig:
        left = await rig.bus("left")
        with pytest.raises(NoResponder) as caught:
            await left.request(pool_of(left, "gone"), ack(0), timeout_s=60.0)
        assert caught.value.subject == pool_of(left, "gone")


async def test_no_reply_is_a_timeout(server: NatsServer | None) -> None:
    async with rig_on(server) as rig:
        left, right = await rig.bus("left"), await rig.bus("right")
        await right.subscribe(pool_of(right, "right"), Inbox())
        with pytest.raises(BusTimeout) as caught:
            await left.request(pool_of(left, "right"), ack(0), timeout_s=0.05)
        assert caught.value.timeout_s == 0.05


async def test_a_handler_that_raises_answers_and_goes_on(
    server: NatsServer | None,
) -> None:
    async with rig_on(server) as rig:
        left, right = await rig.bus("left"), await rig.bus("right")

        def answer(incoming: Incoming) -> Message:
            if incoming.message == ack(0):
                raise ZeroDivisionError("a bug")
            return Ack()

        await right.subscribe(pool_of(right, "right"), Inbox(answer))
        subject = pool_of(left, "right")
        failure = await left.request(subject, ack(0), timeout_s=WAIT_S)
        assert failure == Failure(code="internal", reason="ZeroDivisionError: a bug")
        assert await left.request(subject, ack(1), timeout_s=WAIT_S) == Ack()
        assert counted(right, "handler_failures", type="token_ack") == 1


async def test_a_full_subscription_loses_counts_and_tells(
    server: NatsServer | None,
) -> None:
    async with rig_on(server) as rig:
        left, right = await rig.bus("left"), await rig.bus("right")
        inbox = Inbox(closed_gate=True)
        lost: list[int] = []
        subscription = await right.subscribe(
            pool_of(right, "right"), inbox, limit=5, on_lost=lost.append
        )
        await left.publish(pool_of(left, "right"), ack(0))
        await until(lambda: len(inbox.got) == 1, "the first")
        for index in range(1, 11):
            await left.publish(pool_of(left, "right"), ack(index))
        await until(lambda: sum(lost) == 5, "the loss")
        assert subscription.lost == 5
        assert subscription.waiting == 5
        inbox.gate.set()
        await until(lambda: len(inbox.got) == 6, "those that fit")
        assert inbox.messages == [ack(index) for index in range(6)]


async def test_a_large_message_and_a_large_reply_go_by_reference(
    server: NatsServer | None,
) -> None:
    async with rig_on(server) as rig:
        left, right = await rig.bus("left"), await rig.bus("right")
        large = Presence(keys=keys(40_000))

        def answer(incoming: Incoming) -> Message:
            assert isinstance(incoming.message, Presence)
            return Presence(keys=incoming.message.keys[::-1])

        await right.subscribe(pool_of(right, "right"), Inbox(answer))
        reply = await left.request(pool_of(left, "right"), large, timeout_s=WAIT_S)
        assert reply == Presence(keys=keys(40_000)[::-1])


async def test_a_large_message_without_an_endpoint_is_refused(
    server: NatsServer | None,
) -> None:
    async with rig_on(server) as rig:
        left = await rig.bus("left", blobs=False)
        with pytest.raises(LimitError) as caught:
            await left.publish(pool_of(left, "x"), Presence(keys=keys(40_000)))
        assert caught.value.limit == "inline_bytes"


async def test_a_reference_that_can_not_be_fetched_is_dropped(
    server: NatsServer | None,
) -> None:
    async with rig_on(server) as rig:
        left, right = await rig.bus("left"), await rig.bus("right", blobs=False)
        inbox = Inbox(lambda _: PresenceReply(located=()))
        await right.subscribe(pool_of(right, "right"), inbox)
        with pytest.raises(BusTimeout):
            await left.request(
                pool_of(left, "right"), Presence(keys=keys(40_000)), timeout_s=0.3
            )
        assert inbox.got == []
        assert counted(right, "dropped", reason="blob") == 1


async def test_an_older_life_of_the_sender_is_fenced(server: NatsServer | None) -> None:
    async with rig_on(server) as rig:
        old, right = await rig.bus("left", epoch=1), await rig.bus("right")
        new = await rig.bus("left", epoch=2)
        known: dict[NodeId, int] = {}

        def current(ref: NodeRef) -> bool:
            known[ref.node] = max(ref.epoch, known.get(ref.node, 0))
            return ref.epoch == known[ref.node]

        right.fence(current)
        inbox = Inbox()
        await right.subscribe(pool_of(right, "right"), inbox)
        await old.publish(pool_of(old, "right"), ack(0))
        await until(lambda: len(inbox.got) == 1, "the old one, while it is current")
        await new.publish(pool_of(new, "right"), ack(1))
        await until(lambda: len(inbox.got) == 2, "the new one")
        await old.publish(pool_of(old, "right"), ack(2))
        await until(lambda: counted(right, "dropped", reason="stale") == 1, "the drop")
        assert inbox.messages == [ack(0), ack(1)]


async def test_a_closed_subscription_hears_nothing(server: NatsServer | None) -> None:
    async with rig_on(server) as rig:
        left, right = await rig.bus("left"), await rig.bus("right")
        inbox, other = Inbox(), Inbox()
        subscription = await right.subscribe(pool_of(right, "right"), inbox)
        await subscription.close()
        await subscription.close()
        await right.subscribe(pool_of(right, "right"), other)
        await left.publish(pool_of(left, "right"), ack(0))
        await until(lambda: len(other.got) == 1, "the other one")
        assert inbox.got == []


async def test_a_handler_may_close_its_own_subscription(
    server: NatsServer | None,
) -> None:
    async with rig_on(server) as rig:
        left, right = await rig.bus("left"), await rig.bus("right")
        got: list[AnyMessage] = []

        async def once(incoming: Incoming) -> Message:
            got.append(incoming.message)
            await subscription.close()
            return Ack()

        subscription = await right.subscribe(pool_of(right, "right"), once)
        subject = pool_of(left, "right")
        assert await left.request(subject, ack(0), timeout_s=WAIT_S) == Ack()
        await until(lambda: subscription.waiting == 0, "nothing waiting")
        assert got == [ack(0)]


async def test_away_and_back(server: NatsServer | None) -> None:
    async with rig_on(server) as rig:
        left, right = await rig.bus("left"), await rig.bus("right")
        inbox = Inbox(lambda _: Ack())
        lost: list[int] = []
        subject = pool_of(right, "right")
        await right.subscribe(subject, inbox, on_lost=lost.append)
        await rig.go_away()
        await until(lambda: not left.connected and not right.connected, "the loss")
        with pytest.raises(Disconnected):
            await left.publish(subject, ack(0))
        with pytest.raises(Disconnected):
            await left.request(subject, ack(1), timeout_s=WAIT_S)
        during = Inbox()
        await right.subscribe(right.subjects.all_blocks(), during)
        await rig.come_back()
        await until(lambda: left.connected and right.connected, "the return")
        reply = await retried(lambda: left.request(subject, ack(2), timeout_s=WAIT_S))
        assert reply == Ack()
        # what could not be sent is never sent later
        assert inbox.messages == [ack(2)]
        assert lost == [0]
        await left.publish(left.subjects.blocks(NodeId("a")), ack(3))
        await until(lambda: during.messages == [ack(3)], "the one subscribed meanwhile")


async def test_a_request_under_way_fails_when_the_way_breaks(
    server: NatsServer | None,
) -> None:
    async with rig_on(server) as rig:
        left, right = await rig.bus("left"), await rig.bus("right")
        inbox = Inbox()
        await right.subscribe(pool_of(right, "right"), inbox)

        async def ask() -> None:
            with pytest.raises(Disconnected):
                await left.request(pool_of(left, "right"), ack(0), timeout_s=60.0)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask())
            await until(lambda: len(inbox.got) == 1, "the request")
            await rig.go_away()
        await rig.come_back()


async def test_a_closed_bus_says_so(server: NatsServer | None) -> None:
    async with rig_on(server) as rig:
        left = await rig.bus("left")
        await left.close()
        await left.close()
        assert not left.connected
        with pytest.raises(BusClosed):
            await left.publish(pool_of(left, "x"), StatusQuery())
        with pytest.raises(BusClosed):
            await left.request(pool_of(left, "x"), StatusQuery(), timeout_s=1.0)
        with pytest.raises(BusClosed):
            await left.subscribe(pool_of(left, "x"), Inbox())


async def test_closing_sends_what_was_published(server: NatsServer | None) -> None:
    async with rig_on(server) as rig:
        left, right = await rig.bus("left"), await rig.bus("right")
        inbox = Inbox()
        await right.subscribe(pool_of(right, "right"), inbox)
        for index in range(100):
            await left.publish(pool_of(left, "right"), ack(index))
        await left.close()
        await until(lambda: len(inbox.got) == 100, "all of them")


async def test_a_lease_keeps_its_types(server: NatsServer | None) -> None:
    async with rig_on(server) as rig:
        left, right = await rig.bus("left"), await rig.bus("right")
        inbox = Inbox()
        await right.subscribe(pool_of(right, "right"), inbox)
        lease = Lease(RequestId("r"), 2, NodeRef(NodeId("left"), 1))
        await left.publish(pool_of(left, "right"), LeaseRelease(lease=lease))
        await until(lambda: len(inbox.got) == 1, "the message")
        assert inbox.messages == [LeaseRelease(lease=lease)]
