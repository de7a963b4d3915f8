"""A bus that refuses a message is a pool that is not there now."""

import pytest
from prometheus_client import CollectorRegistry
from tests.unit.shell_world import OTHER, SPACE, WORKER, Model, Pool, world_of

from kvtide.bus.messages import AnyMessage, PutBlock
from kvtide.kv import Lease, RequestId, Role
from kvtide.pool import PoolClient, PoolUnavailable
from kvtide.pool.link import LocalStore
from kvtide.runtime import LimitError


async def test_a_message_over_the_bus_limit_is_no_room_in_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world_of(Role.PREFILL, Pool(), Model()) as world:

        async def request(*_: object, **__: object) -> AnyMessage:
            raise LimitError("the message is too large", limit="blob_bytes")

        monkeypatch.setattr(world.node.bus, "request", request)
        registry = CollectorRegistry()
        client = PoolClient(world.node, registry=registry)
        local = LocalStore(OTHER, ())
        monkeypatch.setattr(client, "_link", type("Link", (), {"local": local})())
        lease = Lease(RequestId("a"), 1, WORKER)
        with pytest.raises(PoolUnavailable) as refused:
            await client.begin(lease, SPACE.tags, SPACE.layout, [PutBlock(None, 16)])
        assert refused.value.code == "no_answer"
        assert registry.get_sample_value("kvtide_pool_open_puts") == 0
