"""A real nats-server with keys and TLS: each node may do what its role needs, no more."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
from tests.integration.nats_server import NatsServer

from kvtide.bus import Hop, Identity, Incoming, NatsBus, NatsPass, Subjects
from kvtide.bus.errors import BusError, Disconnected
from kvtide.bus.limits import BusLimits
from kvtide.bus.messages import Ack, Goodbye, Message
from kvtide.bus.nats_client import NatsConnection
from kvtide.cli.nats_access import authorization, make_certificates
from kvtide.cli.nats_keys import OPERATOR, Keys
from kvtide.cli.supervisor.nats_server import write_config
from kvtide.kv import NodeId, NodeRef, Role

SUBJECTS = Subjects("local")
NODES = [(str(role), f"{role}-0") for role in Role] + [("decode", "decode-1")]
WORD = Goodbye(node=NodeRef(NodeId("somebody"), 1))
HEARD_S = 20.0
LIMITS = BusLimits(drain_timeout_s=0.1, connect_timeout_s=2.0)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def server(
    keys: Keys, tmp_path_factory: pytest.TempPathFactory
) -> Generator[NatsServer]:
    folder = tmp_path_factory.mktemp("nats")
    make_certificates(keys, ("127.0.0.1",))
    access = authorization(keys, "local", NODES)
    config = write_config(folder, host="127.0.0.1", port=-1, access=access)
    server = NatsServer(folder, f"--config={config}")
    server.start()
    try:
        yield server
    finally:
        server.stop()


class Line:
    """One node's connection, and what it is refused."""

    def __init__(self, server: NatsServer, keys: Keys, name: str) -> None:
        self.url = f"tls://127.0.0.1:{server.port}"
        self.entry = NatsPass(keys.key_file(name), keys.ca_file)
        self.identity = Identity(NodeId(name), 1)

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[NatsBus]:
        bus = await NatsBus.open(
            self.url, self.identity, entry=self.entry, limits=LIMITS
        )
        async with bus:
            yield bus


@pytest.fixture
def refused() -> Generator[list[str]]:
    """What the server refused, as it is logged."""
    said: list[str] = []

    def note(_: object, __: str, event: structlog.typing.EventDict) -> str:
        if event["event"] == "NATS refuses":
            said.append(str(event["error"]))
        return ""

    structlog.configure(
        processors=[note, structlog.processors.KeyValueRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.ReturnLoggerFactory(),
    )
    yield said
    structlog.reset_defaults()


async def until(condition: list[str]) -> None:
    async with asyncio.timeout(HEARD_S):
        while not condition:  # noqa: ASYNC110 - another library's callback
            await asyncio.sleep(0.01)


def inbox(role: Role, hop: Hop, number: int = 0) -> str:
    return SUBJECTS.inbox(role, NodeId(f"{role}-{number}"), hop)


SAYS_NOT = [
    ("store-0", inbox(Role.CONDUCTOR, Hop.ADMIT)),
    ("store-0", inbox(Role.DECODE, Hop.WORK)),
    ("store-0", SUBJECTS.placements(NodeId("store-0"))),
    ("prefill-0", inbox(Role.CONDUCTOR, Hop.ADMIT)),
    ("prefill-0", SUBJECTS.blocks(NodeId("store-0"))),
    ("decode-0", inbox(Role.DECODE, Hop.WORK, 1)),
    ("decode-0", inbox(Role.CONDUCTOR, Hop.ADMIT)),
    ("decode-0", SUBJECTS.beat(NodeId("decode-1"))),
    ("decode-0", SUBJECTS.ended(NodeId("gateway-0"))),
    ("conductor-0", inbox(Role.DECODE, Hop.WORK)),
    ("conductor-0", inbox(Role.GATEWAY, Hop.TOKENS)),
    ("gateway-0", inbox(Role.STORE, Hop.POOL)),
    ("gateway-0", SUBJECTS.placements(NodeId("conductor-0"))),
    ("gateway-0", SUBJECTS.reply(NodeId("store-0"), "abc", 1)),
    (OPERATOR, Subjects("another").beat(NodeId("store-0"))),
]


@pytest.mark.parametrize(("name", "subject"), SAYS_NOT)
async def test_a_node_can_not_say_what_is_not_its_to_say(
    server: NatsServer, keys: Keys, refused: list[str], name: str, subject: str
) -> None:
    async with Line(server, keys, name).open() as bus:
        await bus.publish(subject, WORD)
        await until(refused)
    assert subject in refused[0]


HEARS_NOT = [
    ("decode-0", inbox(Role.DECODE, Hop.WORK, 1)),
    ("decode-0", SUBJECTS.any_inbox(Role.DECODE, Hop.WORK)),
    ("decode-0", inbox(Role.PREFILL, Hop.WORK)),
    ("decode-0", inbox(Role.GATEWAY, Hop.TOKENS)),
    ("decode-0", SUBJECTS.everything()),
    ("decode-0", SUBJECTS.all_placements()),
    ("decode-0", SUBJECTS.all_replies(NodeId("gateway-0"))),
    ("prefill-0", inbox(Role.GATEWAY, Hop.TOKENS)),
    ("store-0", inbox(Role.CONDUCTOR, Hop.ADMIT)),
    ("store-0", SUBJECTS.everything()),
    ("gateway-0", inbox(Role.DECODE, Hop.WORK)),
    ("conductor-0", inbox(Role.GATEWAY, Hop.TOKENS)),
]


@pytest.mark.parametrize(("name", "subject"), HEARS_NOT)
async def test_a_node_can_not_hear_what_is_not_for_it(
    server: NatsServer, keys: Keys, refused: list[str], name: str, subject: str
) -> None:
    async def hear(_: Incoming) -> None:
        raise AssertionError

    async with Line(server, keys, name).open() as bus:
        await bus.subscribe(subject, hear)
        await until(refused)
    assert subject in refused[0]


async def test_a_question_is_heard_and_its_answer_comes_back(
    server: NatsServer, keys: Keys, refused: list[str]
) -> None:
    async def answer(_: Incoming) -> Message:
        return Ack()

    subject = inbox(Role.DECODE, Hop.WORK)
    async with (
        Line(server, keys, "decode-0").open() as decode,
        Line(server, keys, "gateway-0").open() as gateway,
    ):
        await decode.subscribe(subject, answer)
        assert await gateway.request(subject, WORD, timeout_s=HEARD_S) == Ack()
    assert refused == []


@pytest.mark.parametrize("entry", ["no key", "another key", "no TLS"])
async def test_who_has_no_key_of_the_cluster_is_not_let_in(
    server: NatsServer, keys: Keys, tmp_path: Path, entry: str
) -> None:
    url = f"tls://127.0.0.1:{server.port}"
    stranger = Keys(tmp_path)
    make_certificates(stranger, ("127.0.0.1",))
    authorization(stranger, "local", [("store", "store-0")])
    shown = NatsPass(None, keys.ca_file)
    if entry == "another key":
        shown = NatsPass(stranger.key_file("store-0"), keys.ca_file)
    if entry == "no TLS":
        url = f"nats://127.0.0.1:{server.port}"
        shown = NatsPass(keys.key_file("store-0"))
    with pytest.raises(Disconnected):
        await NatsConnection.dial(url, "x", LIMITS, shown)


async def test_a_server_with_a_foreign_certificate_learns_nothing(
    server: NatsServer, keys: Keys, tmp_path: Path
) -> None:
    stranger = Keys(tmp_path)
    make_certificates(stranger, ("127.0.0.1",))
    entry = NatsPass(keys.key_file("store-0"), stranger.ca_file)
    url = f"tls://127.0.0.1:{server.port}"
    with pytest.raises(BusError, match="certificate"):
        await NatsConnection.dial(url, "x", LIMITS, entry)


def test_keys_are_private_and_stay_when_a_node_is_added(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    make_certificates(keys, ("127.0.0.1", "nats.example"))
    authorization(keys, "local", [("store", "store-0")])
    before = {path.name: path.read_bytes() for path in keys.folder.iterdir()}
    make_certificates(keys, ("127.0.0.1",))
    text = authorization(keys, "local", [("store", "store-0"), ("decode", "decode-9")])
    after = {path.name: path.read_bytes() for path in keys.folder.iterdir()}
    assert set(after) - set(before) == {"decode-9.seed"}
    assert before.items() <= after.items()
    assert all(path.stat().st_mode & 0o077 == 0 for path in keys.folder.iterdir())
    # the server knows public keys only
    assert not [seed for seed in after.values() if seed.decode().strip() in text]
