"""The simulated bus says what the real one says."""

from dataclasses import dataclass, field

import pytest

from kvtide.bus import (
    BusTimeout,
    FaultyNetwork,
    Handler,
    Identity,
    Incoming,
    NetworkFaults,
    NoResponder,
)
from kvtide.bus.messages import Ack, AnyMessage, Message, TokenAck
from kvtide.kv import NodeId, NodeRef, RequestId
from kvtide.sim import Kernel, Life, SimBus, SimNet

SUBJECT = "kvtide.sim.inbox.store.right.pool"


def ack(index: int) -> TokenAck:
    return TokenAck(request=RequestId("r"), attempt=1, choice=0, index=index)


@dataclass
class World:
    """Two processes on one network."""

    network: FaultyNetwork = field(default_factory=lambda: FaultyNetwork(1))

    def __post_init__(self) -> None:
        self.kernel = Kernel()
        self.net = SimNet(self.kernel, self.network)
        self.left = self.bus("left")
        self.right = self.bus("right")
        self.got: list[Incoming] = []
        self.result: AnyMessage | Exception | None = None

    def bus(self, name: str, epoch: int = 1) -> SimBus:
        return SimBus(self.net, Identity(NodeId(name), epoch), Life(name))

    def listen(self, answer: Message | None) -> None:
        async def handler(incoming: Incoming) -> Message | None:
            self.got.append(incoming)
            return answer

        self.subscribe(handler)

    def subscribe(self, handler: Handler) -> None:
        self.kernel.spawn(self.right.subscribe(SUBJECT, handler), self.right.life)

    def publish(self, bus: SimBus, message: Message) -> None:
        self.kernel.spawn(bus.publish(SUBJECT, message), bus.life)

    def ask(self, timeout_s: float = 1.0) -> None:
        async def asks() -> None:
            try:
                self.result = await self.left.request(
                    SUBJECT, ack(0), timeout_s=timeout_s
                )
            except (BusTimeout, NoResponder) as error:
                self.result = error

        self.kernel.spawn(asks(), self.left.life)


def test_messages_arrive_with_their_sender() -> None:
    world = World()
    world.listen(None)
    world.publish(world.left, ack(1))
    world.kernel.run(1.0)
    (incoming,) = world.got
    assert incoming.message == ack(1)
    assert incoming.sender == NodeRef(NodeId("left"), 1)
    assert incoming.trace == "r"
    assert not incoming.wants_reply


def test_a_request_gets_its_reply_a_timeout_or_nobody() -> None:
    world = World()
    world.ask()
    world.kernel.run(2.0)
    assert isinstance(world.result, NoResponder)
    world.listen(Ack())
    world.ask()
    world.kernel.run(2.0)
    assert world.result == Ack()
    world.network.faults = NetworkFaults(loss=1.0)
    world.ask()
    world.kernel.run(2.0)
    assert isinstance(world.result, BusTimeout)


def test_handlers_of_one_subscription_run_one_at_a_time() -> None:
    world = World()
    done: list[tuple[Message, float]] = []

    async def slow(incoming: Incoming) -> None:
        await world.kernel.sleep(1.0)
        done.append((incoming.message, round(world.kernel.now_s, 3)))

    world.subscribe(slow)
    start_s = world.kernel.now_s
    for index in range(3):
        world.publish(world.left, ack(index))
    world.kernel.run(10.0)
    assert done == [(ack(index), start_s + index + 1) for index in range(3)]


def test_the_dead_hear_nothing_and_their_late_words_are_not_lost() -> None:
    world = World(FaultyNetwork(1, NetworkFaults(delay_min_s=1.0, delay_max_s=1.0)))
    world.listen(None)
    world.publish(world.left, ack(1))
    world.left.life.alive = False
    world.kernel.run(2.0)
    assert [incoming.message for incoming in world.got] == [ack(1)]
    again = world.bus("left", epoch=2)
    world.publish(again, ack(2))
    world.right.life.alive = False
    world.net.forget(world.right.life)
    world.kernel.run(2.0)
    assert len(world.got) == 1


def test_a_fenced_sender_is_not_heard() -> None:
    world = World()
    world.listen(None)
    world.right.fence(lambda ref: ref.epoch > 1)
    world.publish(world.left, ack(1))
    world.publish(world.bus("left", epoch=2), ack(2))
    world.kernel.run(1.0)
    assert [incoming.message for incoming in world.got] == [ack(2)]


@pytest.mark.parametrize("repeat", [0.0, 1.0])
def test_a_message_comes_as_often_as_the_network_says(repeat: float) -> None:
    world = World(FaultyNetwork(1, NetworkFaults(duplicate=repeat)))
    world.listen(None)
    for index in range(10):
        world.publish(world.left, ack(index))
    world.kernel.run(1.0)
    assert len(world.got) == 10 * (1 + repeat)
