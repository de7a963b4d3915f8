"""The pure parts of the connectors' client."""

from dataclasses import asdict

import pytest
from hypothesis import given, strategies as st
from prometheus_client import CollectorRegistry

from kvtide.bus.messages import Dropped
from kvtide.connect import BlockShape, ClientCounts, EngineSpace, ForeignSpace
from kvtide.connect.connector_metrics import ConnectorMetrics
from kvtide.connect.counts import FIELDS
from kvtide.connect.index import BlockIndex
from kvtide.connect.rest import Rest
from kvtide.connect.settings import ConnectSettings, connect_settings
from kvtide.connect.staging import Staging
from kvtide.kv import BlockKey, Located, NodeId, NodeRef, SlotRef, TenantId, Tier
from kvtide.runtime import ConfigError

SECRET = b"a secret of this test's cluster!"
ENGINE = EngineSpace("vllm 0.32.0", "d1", "float32/block 128", "tp0/1")
SHAPE = BlockShape(pieces=3, piece_bytes=64)


def space(
    engine: EngineSpace = ENGINE,
    shape: BlockShape = SHAPE,
    tenant: str = "t",
    **more: str,
) -> ForeignSpace:
    return ForeignSpace(SECRET, engine, shape, TenantId(tenant), **more)


def located(
    key: BlockKey, store: str = "s", tier: Tier = Tier.DRAM, generation: int = 1
) -> Located:
    slot = SlotRef(NodeId(store), 1, tier, 0, 0, 4096, generation)
    return Located(key, slot, 7)


# ---- shapes


def test_a_shape_holds_exactly_its_pieces() -> None:
    layout = SHAPE.layout
    assert layout.slot_bytes - layout.header_bytes == SHAPE.nbytes == 192
    assert layout.parts == 6
    assert layout.part_bytes == 32
    block = memoryview(bytearray(range(192)))
    assert b"".join(map(bytes, SHAPE.cut(block))) == bytes(block)
    assert [piece.nbytes for piece in SHAPE.cut(block)] == [64, 64, 64]


@pytest.mark.parametrize(("pieces", "nbytes"), [(0, 64), (32_768, 64), (1, 0), (1, 33)])
def test_what_no_slot_can_hold_is_refused(pieces: int, nbytes: int) -> None:
    with pytest.raises(ConfigError, match="can't be pooled"):
        BlockShape(pieces, nbytes)


# ---- keys


def test_keys_differ_in_all_that_changes_the_bytes() -> None:
    spaces = [
        space(),
        space(EngineSpace("vllm 0.33.0", "d1", "float32/block 128", "tp0/1")),
        space(EngineSpace("vllm 0.32.0", "d2", "float32/block 128", "tp0/1")),
        space(EngineSpace("vllm 0.32.0", "d1", "float32/block 64", "tp0/1")),
        space(EngineSpace("vllm 0.32.0", "d1", "float32/block 128", "tp0/2")),
        space(shape=BlockShape(3, 32)),
        space(shape=BlockShape(6, 32)),
        space(tenant="u"),
        space(salt="s"),
        space(adapter="s"),
    ]
    keys = [each.key(b"name") for each in spaces]
    assert len(set(keys)) == len(keys)
    assert space().key(b"name") == keys[0]
    assert spaces[7].tags.tenant != spaces[0].tags.tenant


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_two_names_have_two_keys(one: bytes, other: bytes) -> None:
    made = space()
    assert (made.key(one) == made.key(other)) == (one == other)


# ---- the index


def keys(count: int) -> list[BlockKey]:
    return list(space().keys([bytes([i]) for i in range(count)]))


def test_the_nearest_copy_is_found_first() -> None:
    index = BlockIndex(100)
    (key,) = keys(1)
    far, near, slow = (
        located(key, "far"),
        located(key, "near"),
        located(key, "near", Tier.SSD, generation=2),
    )
    index.apply(NodeRef(NodeId("near"), 1), [slow], [])
    index.prefer(NodeId("near"))
    assert index.find(key) == slow
    index.apply(NodeRef(NodeId("far"), 1), [far], [])
    assert index.find(key) == far
    index.apply(NodeRef(NodeId("near"), 1), [near], [])
    assert index.find(key) == near
    index.apply(NodeRef(NodeId("near"), 1), [], [Dropped(key, 1)])
    assert index.find(key) == far
    index.forget(NodeId("far"))
    assert index.find(key) == slow
    index.apply(NodeRef(NodeId("near"), 1), [], [Dropped(key, 2)])
    assert index.find(key) is None
    assert index.blocks == 0


def test_a_prefix_ends_at_the_first_hole_and_the_index_at_its_limit() -> None:
    index = BlockIndex(3)
    chain = keys(6)
    store = NodeRef(NodeId("s"), 1)
    index.apply(store, [located(key) for key in (*chain[:2], *chain[3:])], [])
    assert index.prefix(chain) == 2
    assert index.prefix(chain[3:]) == 1
    assert index.blocks == 3
    # one that is known may be known better
    index.apply(store, [located(chain[0], generation=5)], [])
    assert index.find(chain[0]) == located(chain[0], generation=5)
    assert index.blocks == 3


# ---- waits


def test_a_rest_doubles_up_to_its_limit_and_ends_with_success() -> None:
    rest = Rest(1.0, 4.0)
    assert rest.over(0.0)
    for failure, length_s in enumerate((1.0, 2.0, 4.0, 4.0)):
        now_s = failure * 100.0
        rest.failed(now_s)
        assert not rest.over(now_s + length_s * 0.99)
        assert rest.over(now_s + length_s)
    rest.worked()
    rest.failed(1000.0)
    assert rest.over(1001.0)


def test_staging_is_used_again_and_bounded() -> None:
    staging = Staging(256)
    first = staging.take(3, 100)
    first[0][:] = b"x" * 100
    staging.give_back(first)
    again = staging.take(3, 100)
    assert sum(bytes(each) == b"x" * 100 for each in again) == 1
    assert [each.nbytes for each in staging.take(2, 50)] == [50, 50]


def test_counts_add_up() -> None:
    one = ClientCounts(*range(1, len(FIELDS) + 1))
    assert one.plus(one).minus(one) == one


# ---- settings


def test_a_setting_that_is_unknown_is_named() -> None:
    with pytest.raises(ConfigError, match=r"load_timeout.*did you mean load_timeout_s"):
        connect_settings({"load_timeout": 3})


def test_a_connector_makes_no_secret(tmp_path: object) -> None:
    settings = ConnectSettings.model_validate({"state_dir": tmp_path})
    with pytest.raises(ConfigError, match="start kvtide here once"):
        settings.secret_path()


def test_a_workers_metrics_add_up_what_a_connector_did() -> None:
    registry = CollectorRegistry()
    metrics = ConnectorMetrics(registry)
    metrics.add(asdict(ClientCounts(loaded_blocks=3, load_s=0.5)))
    metrics.add({"loaded_blocks": 2, "unheard_of": 7})

    def seen(name: str) -> float | None:
        return registry.get_sample_value(f"kvtide_connector_{name}_total")

    assert (seen("loaded_blocks"), seen("load_s"), seen("away")) == (5, 0.5, 0)
    assert seen("unheard_of") is None
