"""``serve`` as a process runs it: settings in, real NATS, a clean end."""

import asyncio
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from tests.integration.nats_server import NatsServer, nats_server
from tests.unit.gateway_models import byte_level, write_model

from kvtide.bus import Gone, Identity, NatsBus, Node, RosterEvent
from kvtide.bus.messages import GatewayLoad
from kvtide.gateway.app import serve
from kvtide.gateway.errors import ModelTextError
from kvtide.gateway.settings import GatewaySettings
from kvtide.kv import NodeId, Role
from kvtide.runtime import SystemClock, TaskScope

LIMIT_S = 40.0


@pytest.fixture
def nats(tmp_path: Path) -> Generator[NatsServer]:
    with nats_server() as server:
        yield server


def make_settings(tmp_path: Path, nats: NatsServer) -> GatewaySettings:
    return GatewaySettings(
        model=write_model(tmp_path / "tiny", byte_level()),
        nats=nats.url,
        node="gateway-1",
        state_dir=tmp_path,
        drain_s=1,
    )


async def test_it_serves_on_nats_and_ends_cleanly(
    tmp_path: Path, nats: NatsServer
) -> None:
    clock, stop = SystemClock(), asyncio.Event()
    settings = make_settings(tmp_path, nats)
    seen: asyncio.Queue[RosterEvent] = asyncio.Queue()
    identity = Identity(NodeId("watcher"), epoch=1)
    async with (
        # around all of it: an end that hangs is a failure too
        asyncio.timeout(LIMIT_S),
        await NatsBus.open(nats.url, identity, cluster="local", clock=clock) as bus,
        Node(
            roles=(Role.CONDUCTOR,),
            bus=bus,
            identity=identity,
            clock=clock,
            secret=b"s" * 32,
        ) as watcher,
        TaskScope() as scope,
    ):
        watcher.on_member(seen.put_nowait)
        serving = scope.spawn(
            serve(settings, stop=stop, registry=CollectorRegistry(), clock=clock),
            name="gateway",
        )
        url = ""
        while not url:
            event = await seen.get()
            member = watcher.roster.get(NodeId("gateway-1"))
            url = member.beat.http if member is not None and member.ready else ""
            assert not isinstance(event, Gone)
        # its load is known before anybody has asked it
        member = watcher.roster.get(NodeId("gateway-1"))
        assert member is not None
        assert member.beat.load == (GatewayLoad(open_requests=0),)
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            ready = await http.get("/readyz")
            assert ready.json()["missing"] == [
                "conductor",  # the watcher never says that it is ready
                "store",
                "prefill",
                "decode",
            ]
            metrics = await http.get("/metrics")
            assert "kvtide_gateway_requests" in metrics.text
        stop.set()
        await serving
        while not isinstance(await seen.get(), Gone):
            pass


async def test_a_model_folder_without_a_tokenizer_stops_it(
    tmp_path: Path, nats: NatsServer
) -> None:
    settings = make_settings(tmp_path, nats)
    (settings.model / "tokenizer.json").unlink()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(ModelTextError, match=r"tokenizer\.json"):
            await serve(
                settings,
                stop=asyncio.Event(),
                registry=CollectorRegistry(),
                clock=SystemClock(),
            )
