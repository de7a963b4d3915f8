"""What only a real NATS server, real threads and real processes can show."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from tests.integration.nats_server import NatsServer, nats_server

from kvtide.bus import (
    PROTOCOL,
    BusLimits,
    Codec,
    Disconnected,
    Gone,
    Handler,
    Hop,
    Identity,
    Incoming,
    Joined,
    NatsBus,
    NatsLink,
    Node,
    RosterEvent,
    decode_plain,
    open_node,
)
from kvtide.bus.link import LinkEvents
from kvtide.bus.messages import (
    Ack,
    DecodeLoad,
    Message,
    NodeState,
    Presence,
    StatusQuery,
    TokenAck,
)
from kvtide.kv import BlockKey, NodeId, NodeRef, RequestId, Role
from kvtide.runtime import ConfigError, SystemClock
from kvtide.runtime.settings import RoleSettings

LIMITS = BusLimits(reconnect_wait_s=0.02, ping_s=0.2)
WAIT_S = 20.0


@pytest.fixture
def server() -> Generator[NatsServer]:
    with nats_server() as started:
        yield started


@asynccontextmanager
async def bus_on(
    server: NatsServer, node: str, limits: BusLimits = LIMITS
) -> AsyncGenerator[NatsBus]:
    identity = Identity(NodeId(node), 1)
    async with await NatsBus.open(server.url, identity, limits=limits) as bus:
        yield bus


@asynccontextmanager
async def node_on(
    server: NatsServer, state_dir: Path, name: str, role: Role = Role.DECODE
) -> AsyncGenerator[Node]:
    settings = RoleSettings.model_validate(
        {"nats": server.url, "node": name, "state_dir": state_dir, "shm_dir": None}
    )
    async with open_node(
        settings,
        [role],
        clock=SystemClock(),
        registry=CollectorRegistry(),
        limits=LIMITS,
    ) as node:
        yield node


async def until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"not within {WAIT_S} s: {what}")


def ack(index: int) -> TokenAck:
    return TokenAck(request=RequestId("r-1"), attempt=1, choice=0, index=index)


def keeper(got: list[Message]) -> Handler:
    async def keep(incoming: Incoming) -> Message:
        got.append(incoming.message)
        return Ack()

    return keep


async def test_bytes_of_strangers_are_dropped_counted_and_harmless(
    server: NatsServer,
) -> None:
    async with bus_on(server, "right") as bus:
        got: list[Message] = []
        subject = bus.subjects.inbox(Role.STORE, NodeId("right"), Hop.POOL)
        await bus.subscribe(subject, keeper(got))
        link = await NatsLink.open(
            server.url, name="stranger", limits=LIMITS, clock=SystemClock()
        )
        codec = Codec()
        sender = NodeRef(NodeId("stranger"), 1)
        good = codec.wrap(sender, "", codec.encode_body(ack(1)))
        bad = {
            "bytes": b"\xc1 garbage",
            "protocol": Codec(PROTOCOL + 1).wrap(sender, "", b"\x81\xa1t\xa3ack"),
            "type": codec.wrap(sender, "", b"\x81\xa1t\xa7unknown"),
            "fields": codec.wrap(sender, "", b"\x81\xa1t\xa7failure"),
        }
        for data in bad.values():
            await link.send(subject, data)
        await link.send(subject, good)
        await until(lambda: got == [ack(1)], "the good one")
        registry = bus.metrics.registry
        counted = {
            reason: registry.get_sample_value(
                "kvtide_bus_dropped_total", {"reason": reason}
            )
            for reason in bad
        }
        assert counted == dict.fromkeys(bad, 1.0)
        await link.close()


async def test_one_who_looks_on_reads_all_with_plain_msgpack(
    server: NatsServer,
) -> None:
    async with bus_on(server, "right") as bus:
        subject = bus.subjects.inbox(Role.STORE, NodeId("right"), Hop.POOL)
        got: list[Message] = []
        await bus.subscribe(subject, keeper(got))
        seen: list[object] = []
        link = await NatsLink.open(
            server.url, name="tail", limits=LIMITS, clock=SystemClock()
        )
        await link.listen(
            bus.subjects.everything(),
            lambda delivery: seen.append(decode_plain(delivery.data)),
            lambda _: None,
        )
        assert await bus.request(subject, ack(3), timeout_s=WAIT_S) == Ack()
        await until(lambda: len(seen) == 2, "question and answer")
        question = {
            "t": "token_ack",
            "request": "r-1",
            "attempt": 1,
            "choice": 0,
            "index": 3,
            "finished": False,
        }
        assert seen == [
            [PROTOCOL, "right", 1, "r-1", question],
            [PROTOCOL, "right", 1, "r-1", {"t": "ack"}],
        ]
        await link.close()


async def test_a_small_max_payload_makes_blobs_of_smaller_bodies() -> None:
    with nats_server() as server:
        folder = server.folder
        (folder / "small.conf").write_text("max_payload: 8192\n")
        with nats_server("--config", str(folder / "small.conf")) as small:
            async with bus_on(small, "left") as bus:
                keys = tuple(BlockKey(i.to_bytes(16, "big")) for i in range(600))
                with pytest.raises(Exception, match="needs a transfer endpoint"):
                    await bus.publish("kvtide.local.x", Presence(keys=keys))


async def test_a_server_that_stops_answering_is_noticed(server: NatsServer) -> None:
    async with bus_on(server, "left") as bus:
        server.pause()
        try:
            await until(lambda: not bus.connected, "the silence of the server")
            with pytest.raises(Disconnected):
                await bus.publish("kvtide.local.x", StatusQuery())
        finally:
            server.resume()
        await until(lambda: bus.connected, "the return")


async def test_it_waits_for_a_server_that_is_not_there_yet(server: NatsServer) -> None:
    server.stop()
    identity = Identity(NodeId("early"), 1)
    opening = asyncio.ensure_future(NatsBus.open(server.url, identity, limits=LIMITS))
    await asyncio.sleep(0.2)
    assert not opening.done()
    await asyncio.to_thread(server.start)
    async with asyncio.timeout(WAIT_S):
        async with await opening as bus:
            assert bus.connected


async def test_one_of_several_servers_is_enough(server: NatsServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        dead = f"nats://127.0.0.1:{taken.getsockname()[1]}"
        identity = Identity(NodeId("left"), 1)
        urls = f"{dead}, {server.url}"
        async with await NatsBus.open(urls, identity, limits=LIMITS) as bus:
            assert bus.connected


@pytest.mark.parametrize("url", ["", " , ", "http://x:1", "nats://", "nats://h:port"])
async def test_a_url_that_is_none_is_an_error_that_names_the_setting(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await NatsBus.open(url, Identity(NodeId("n"), 1))
    assert caught.value.key == "nats"


async def test_a_password_in_the_url_is_used_and_never_logged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with nats_server("--user", "u", "--pass", "hidden-word") as server:
        url = server.url.replace("nats://", "nats://u:hidden-word@")
        async with await NatsBus.open(
            url, Identity(NodeId("left"), 1), limits=LIMITS
        ) as bus:
            assert bus.connected
            server.kill()
            await until(lambda: not bus.connected, "the loss")
            await asyncio.to_thread(server.start)
            await until(lambda: bus.connected, "the return")
    output = capsys.readouterr()
    assert "hidden-word" not in output.out + output.err


async def test_what_is_lost_while_slow_is_counted(server: NatsServer) -> None:
    async with bus_on(server, "left") as left, bus_on(server, "right") as right:
        lost: list[int] = []
        gate = asyncio.Event()

        entered = asyncio.Event()

        async def stuck(_: Incoming) -> None:
            entered.set()
            await gate.wait()

        subscription = await right.subscribe(
            right.subjects.all_blocks(), stuck, limit=100, on_lost=lost.append
        )
        await left.publish(left.subjects.blocks(NodeId("a")), ack(0))
        await asyncio.wait_for(entered.wait(), WAIT_S)
        for index in range(1, 1001):
            await left.publish(left.subjects.blocks(NodeId("a")), ack(index))
        await until(lambda: sum(lost) == 900, "the loss")
        assert subscription.lost == 900
        gate.set()


async def test_nodes_find_each_other_and_say_goodbye(
    server: NatsServer, tmp_path: Path
) -> None:
    async with node_on(server, tmp_path, "left") as left:
        async with node_on(server, tmp_path, "right") as right:
            right.set_state(NodeState.READY)
            await until(
                lambda: [m.node for m in left.roster.live() if m.ready] == ["right"],
                "the other one",
            )
            assert left.secret == right.secret
            member = left.roster.get(NodeId("right"))
            assert member is not None
            assert member.beat.transfer == right.endpoint.address
        await until(lambda: len(left.roster.live()) == 1, "the goodbye")
    async with node_on(server, tmp_path, "right") as again:
        assert again.ref.epoch > right.ref.epoch


async def test_a_large_message_goes_through_real_transfer(
    server: NatsServer, tmp_path: Path
) -> None:
    async with (
        node_on(server, tmp_path, "left") as left,
        node_on(server, tmp_path, "right", Role.STORE) as right,
    ):
        got: list[Message] = []
        await right.inbox(Role.STORE, Hop.QUERY, keeper(got))
        keys = tuple(BlockKey(index.to_bytes(16, "big")) for index in range(60_000))
        subject = left.subjects.inbox(Role.STORE, NodeId("right"), Hop.QUERY)
        answer = await left.bus.request(subject, Presence(keys=keys), timeout_s=WAIT_S)
        assert answer == Ack()
        assert got == [Presence(keys=keys)]


async def test_a_busy_loop_goes_on_beating(server: NatsServer, tmp_path: Path) -> None:
    async with node_on(server, tmp_path, "busy") as busy:
        await until(lambda: len(busy.roster.live()) == 1, "itself")
        beats: list[float] = []
        heard = threading.Event()
        stop = threading.Event()

        async def watch() -> None:
            link = await NatsLink.open(
                server.url, name="watch", limits=LIMITS, clock=SystemClock()
            )
            link.start(LinkEvents(lambda: None, lambda: None))

            def beat(_: object) -> None:
                beats.append(time.monotonic())  # noqa: TID251 - real threads
                if len(beats) > 4:
                    heard.set()

            await link.listen(busy.subjects.beats(), beat, lambda _: None)
            while not stop.is_set():  # noqa: ASYNC110 - another thread's
                await asyncio.sleep(0.01)
            await link.close()

        thread = threading.Thread(target=lambda: asyncio.run(watch()))
        thread.start()
        try:
            # block this loop, as a long engine call in it would
            assert heard.wait(WAIT_S), "no beats while the loop is blocked"
        finally:
            stop.set()
            await asyncio.to_thread(thread.join)
        assert busy.ref.epoch == busy.roster.epoch(NodeId("busy"))


async def test_a_node_outlives_its_server(server: NatsServer, tmp_path: Path) -> None:
    async with (
        node_on(server, tmp_path, "left") as left,
        node_on(server, tmp_path, "right") as right,
    ):
        await until(lambda: len(left.roster.live()) == 2, "both")
        gone: list[object] = []
        left.on_member(lambda event: gone.append(type(event).__name__))
        gone.clear()
        await asyncio.to_thread(server.kill)
        await until(lambda: not left.bus.connected, "the loss")
        # longer than nodes may be silent
        await asyncio.sleep(4.0)
        await asyncio.to_thread(server.start)
        await until(lambda: left.bus.connected, "the return")
        right.report(DecodeLoad(running=7))

        def told() -> bool:
            member = left.roster.get(NodeId("right"))
            return member is not None and member.beat.load == (DecodeLoad(running=7),)

        await until(told, "news after the return")
        assert "Gone" not in gone
        assert right.ref.epoch == left.roster.epoch(NodeId("right"))


async def test_a_process_that_was_stopped_begins_a_new_life(
    server: NatsServer, tmp_path: Path
) -> None:
    script = Path(__file__).with_name("bus_process.py")
    async with node_on(server, tmp_path, "left") as left:
        events: list[RosterEvent] = []
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(script),
            server.url,
            "worker",
            str(tmp_path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert process.stdin is not None
            await until(lambda: len(left.roster.live()) == 2, "the worker")
            epoch = left.roster.epoch(NodeId("worker"))
            left.on_member(events.append)
            process.send_signal(signal.SIGSTOP)
            await until(lambda: isinstance(events[-1], Gone), "its silence")
            # a little more than others wait: only then does it know itself dead
            await asyncio.sleep(0.5)
            process.send_signal(signal.SIGCONT)
            await until(lambda: isinstance(events[-1], Joined), "its return")
            assert events[-1].member.ref.epoch > epoch
            process.stdin.close()
            output, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert f"fenced {events[-2].member.ref.epoch}" in output.decode()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"transfer_engine": "nixl"}, "pip install"),
        ({"transfer_engine": "mooncake:rdma:mlx5_0"}, "pip install"),
        (
            {
                "transfer_engine": "nixl",
                **{f"transfer_{n}_file": f"/{n}" for n in ("cert", "key", "ca")},
            },
            "does not encrypt",
        ),
    ],
)
async def test_a_transfer_engine_that_cannot_be_used_is_named(
    tmp_path: Path, changes: dict[str, str], said: str
) -> None:
    settings = RoleSettings.model_validate(
        {"nats": "nats://127.0.0.1:9", "node": "n", "state_dir": tmp_path, **changes}
    )
    with pytest.raises(ConfigError, match=said) as caught:
        async with open_node(
            settings, [Role.STORE], clock=SystemClock(), registry=CollectorRegistry()
        ):
            pytest.fail("opened without its engine")
    assert caught.value.key == "transfer_engine"


async def test_a_taken_transfer_port_is_named(
    server: NatsServer, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = RoleSettings.model_validate(
            {
                "nats": server.url,
                "node": "n",
                "state_dir": tmp_path,
                "shm_dir": None,
                "transfer_port": port,
            }
        )
        with pytest.raises(ConfigError, match=str(port)) as caught:
            async with open_node(
                settings,
                [Role.STORE],
                clock=SystemClock(),
                registry=CollectorRegistry(),
            ):
                pytest.fail("opened on a port that is taken")
        assert caught.value.key == "transfer_port"
