"""The two public traces, replayed through the store's own eviction code."""

from pathlib import Path

import pytest

from kvtide.kv import BlockKey, NodeId, NodeRef, SpaceTags
from kvtide.sim.hit_rates import TraceError, TraceRequest, read_trace, replay
from kvtide.store.eviction import Policy
from kvtide.store.inventory import Inventory
from kvtide.store.slot_states import TableRules
from kvtide.store.slots import SlotTable
from kvtide.store.spaces import Space
from kvtide.store.tally import Tally

TRACES = Path(__file__).parents[2] / "examples" / "traces"
SLOT_BYTES = 1024
TOKENS = (10**5, 10**6, 3 * 10**6, 10**7, 5 * 10**7)
PLAIN_LRU = {
    "conversation": (0.042, 0.053, 0.136, 0.285, 0.364),
    "synthetic": (0.017, 0.142, 0.309, 0.567, 0.640),
}


def of(*chains: tuple[int, ...]) -> list[TraceRequest]:
    return [TraceRequest(0.0, 512 * len(ids), 1, ids) for ids in chains]


@pytest.mark.parametrize("name", PLAIN_LRU)
def test_plain_lru_gives_the_known_hit_rates(name: str) -> None:
    requests = read_trace(TRACES / f"{name}.jsonl.gz")
    found = [replay(requests, tokens // 512, Policy.LRU) for tokens in TOKENS]
    assert tuple(round(each.hit_rate, 3) for each in found) == PLAIN_LRU[name]


@pytest.mark.parametrize("policy", Policy)
def test_with_room_for_all_each_policy_hits_all_that_came_before(
    policy: Policy,
) -> None:
    requests = read_trace(TRACES / "synthetic.jsonl.gz")
    found = replay(requests, 43_924, policy)
    assert (found.blocks, found.hits) == (121_877, 121_877 - 43_924)
    assert found.prefix_hits == found.hits


def test_tail_first_keeps_the_head_of_a_chain() -> None:
    requests = of((1, 2, 3, 4), (9,), (1, 2, 3, 4))
    plain = replay(requests, 4, Policy.LRU)
    assert (plain.hits, plain.prefix_hits) == (3, 0)
    tail_first = replay(requests, 4, Policy.LRU, tail_first=True)
    assert (tail_first.hits, tail_first.prefix_hits) == (3, 3)


def test_length_aware_evicts_what_is_late_in_its_chain() -> None:
    requests = of((1, 2, 3), (7, 8), (1, 2), (7,))
    assert replay(requests, 4, Policy.LENGTH_AWARE).hits == 3
    assert replay(requests, 4, Policy.LRU).hits == 2


@pytest.mark.parametrize("policy", [Policy.LRU, Policy.S3_FIFO])
def test_a_stores_slot_table_hits_as_the_replay_does(policy: Policy) -> None:
    requests = read_trace(TRACES / "synthetic.jsonl.gz")[:400]
    blocks = 2000
    table = SlotTable(
        blocks * SLOT_BYTES, TableRules(policy=policy), slab_bytes=blocks * SLOT_BYTES
    )
    inventory = Inventory(NodeRef(NodeId("store"), 1), table, Tally())
    space = Space(SpaceTags(0, bytes(16), bytes(16), bytes(16)), SLOT_BYTES, 64)
    hits = 0
    for request in requests:
        keys = [BlockKey(each.to_bytes(8, "big") * 2) for each in request.hash_ids]
        hits += sum(inventory.index.get(key) is not None for key in keys)
        for key in keys:
            if inventory.index.get(key) is not None:
                inventory.warm([key], 0.0, 0.0)
                continue
            slot = inventory.reserve(space, key, 512, 0.0)
            assert slot is not None
            inventory.admit(slot, 1, 0.0)
    assert hits == replay(requests, blocks, policy).hits


def test_a_trace_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0}\n')
    with pytest.raises(TraceError, match="line 1"):
        read_trace(bad)
    with pytest.raises(TraceError, match="missing"):
        read_trace(tmp_path / "missing.jsonl.gz")
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(TraceError, match="cut"):
        read_trace(tmp_path / "cut.jsonl.gz")
