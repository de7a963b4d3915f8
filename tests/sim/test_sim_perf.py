"""The performance simulator: exact where it can be, the same for the same seed."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvtide.policy import StepCurve
from kvtide.policy.analytic import break_even_bytes_per_s
from kvtide.runtime import ConfigError
from kvtide.sim.kernel import Kernel
from kvtide.sim.perf.decoding import DecodeWorker
from kvtide.sim.perf.links import Network
from kvtide.sim.perf.pool import Store
from kvtide.sim.perf.rules import Rules
from kvtide.sim.perf.running import SYSTEMS, simulate
from kvtide.sim.perf.shapes import ClusterShape, read_cluster
from kvtide.sim.perf.steps import Row
from kvtide.sim.perf.workload import SimRequest, SyntheticText, synthetic
from kvtide.store.eviction import Policy

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
MIX = SyntheticText(
    requests=150,
    requests_per_s=4.0,
    prompt_tokens=6000,
    output_tokens=120,
    shared_prefixes=8,
    shared_tokens=4096,
    turns=3,
)


def small(**changes: int) -> ClusterShape:
    shape = read_cluster(CLUSTERS / "a800-llama3-70b.toml")
    text = msgspec.structs.replace(shape.text, prefills=2, decodes=2)
    node = msgspec.structs.replace(text.node, **changes)
    return ClusterShape(msgspec.structs.replace(text, node=node))


def mix(seed: int = 1) -> list[SimRequest]:
    return list(synthetic(MIX, 512, rate=1.0, seed=seed))


def test_the_shipped_clusters_give_the_papers_break_even() -> None:
    a800 = read_cluster(CLUSTERS / "a800-llama3-70b.toml")
    h800 = read_cluster(CLUSTERS / "h800-llama3-70b.toml")
    for shape, published in ((a800, 6e9), (h800, 19e9)):
        found = break_even_bytes_per_s(shape.model, shape.node, 8192)
        assert round(found / 1e9) == round(published / 1e9)
    assert a800.model.kv_bytes == 320 * 1024
    assert a800.prefill.ms(8192, 0) == pytest.approx(1000, rel=0.02)
    assert a800.prefill.ms(131_072, 0) == pytest.approx(27_500, rel=0.02)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_same_seed_gives_the_same_bits(system: str) -> None:
    first = simulate(small(), mix(), system, seed=1)
    again = simulate(small(), mix(), system, seed=1)
    assert msgspec.json.encode(first) == msgspec.json.encode(again)
    assert first.served == MIX.requests
    assert first.hit_share <= 1


def test_another_seed_gives_another_load() -> None:
    assert mix(1) != mix(2)


def test_a_request_alone_takes_what_its_parts_take() -> None:
    shape = small()
    one = SimRequest(0, 0.0, 8192, 2, tuple(range(16)))
    found = simulate(shape, [one], "algorithm1")
    step_ms = shape.step.ms(1, 8192)
    expected = shape.prefill.ms(8191, 0) + shape.text.engine.handover_ms + step_ms
    assert found.ttft_mean_ms == pytest.approx(expected, rel=1e-4)
    assert found.tbt_mean_ms == pytest.approx(shape.step.ms(1, 8193), rel=1e-4)
    assert found.hit_share == 0


def test_a_repeated_prompt_is_loaded_and_not_computed() -> None:
    shape = small()
    prompts = [SimRequest(n, 60.0 * n, 8200, 2, tuple(range(16))) for n in range(2)]
    found = simulate(shape, prompts, "local_cache_aware")
    assert found.hit_tokens_local == 8192
    twice_s = (shape.prefill.ms(8199, 0) + shape.prefill.ms(7, 8192)) / 1000
    least_s = 16 * shape.block_bytes / shape.text.node.host_bytes_per_s
    assert found.prefill_gpu_s <= twice_s + least_s
    assert found.prefill_gpu_s >= twice_s


def test_a_repeat_waits_for_what_is_being_computed_and_loads_it() -> None:
    blocks = tuple(range(40))
    pair = [SimRequest(n, 0.1 * n, 40 * 512 + 100, 10, blocks) for n in range(2)]
    shape = small()
    text = msgspec.structs.replace(shape.text, prefills=1)
    found = simulate(ClusterShape(text), pair, "best", Rules())
    assert found.hit_tokens_local == 40 * 512
    alone = shape.prefill.ms(40 * 512 + 99, 0) / 1000
    assert found.prefill_gpu_s < 1.2 * alone
    assert found.predicted_ttft_error is not None
    assert found.predicted_ttft_error < 0.05


def test_what_dram_lets_go_is_found_on_the_ssd() -> None:
    requests = mix()
    less = simulate(small(pool_tokens=40_960), requests, "best")
    more = simulate(small(pool_tokens=40_960, ssd_tokens=10**7), requests, "best")
    assert more.hit_tokens_ssd > 0
    assert more.hit_share > less.hit_share
    assert more.ssd_written_bytes > 0 == less.ssd_written_bytes


def test_what_would_miss_its_target_is_rejected() -> None:
    rules = Rules(reject=True, ttft_ms=800.0)
    found = simulate(small(), mix(), "algorithm1", rules)
    assert 0 < found.rejected_early < MIX.requests
    assert found.served + found.rejected_early == MIX.requests


def test_decode_alone_refuses_late_and_wastes_the_prefill() -> None:
    rules = Rules(reject=True, early=False, recheck=True, ttft_ms=1e9, tbt_ms=20.6)
    found = simulate(small(), mix(), "algorithm1", rules)
    assert found.rejected_late > 0 == found.rejected_early
    early = simulate(small(), mix(), "algorithm1", replace(rules, early=True))
    assert early.rejected_early > 0


def test_flows_share_a_link_and_no_byte_is_lost() -> None:
    kernel = Kernel(0.0)
    network = Network(kernel, 100.0)
    ends: dict[str, float] = {}
    for name, source, target, size in (
        ("a", 0, 1, 100.0),
        ("b", 0, 2, 200.0),
        ("own", 3, 3, 1e9),
    ):
        network.send(
            source, target, size, lambda name=name: ends.update({name: kernel.now_s})
        )
    kernel.run(10.0)
    # both halve the link until a has its 100 bytes; then b has it alone
    assert ends["own"] == 0
    assert ends["a"] == pytest.approx(2.0)
    assert ends["b"] == pytest.approx(3.0)


def test_a_batch_steps_as_one_step_at_a_time_would() -> None:
    curve = StepCurve(10.0, 1.0, 0.01)
    kernel = Kernel(0.0)
    firsts: dict[int, float] = {}
    worst: dict[int, float] = {}
    worker = DecodeWorker(
        kernel,
        curve,
        batch=8,
        capacity_tokens=10_000,
        first=lambda number, at_s: firsts.update({number: at_s}),
    )
    arrivals = {1: (0.0, 100, 30), 2: (0.1, 200, 15)}
    for number, (at_s, kv, output) in arrivals.items():
        row = Row(number, kv, output, lambda ms, n=number: worst.update({n: ms}))

        def come(row: Row = row) -> None:
            tokens = row.kv_tokens + row.output_tokens
            worker.promise(row.number, tokens, lambda: worker.join(row))

        kernel.at(at_s, come)
    kernel.run(10.0)

    now_s = 0.0
    rows: dict[int, int] = {}
    gaps: dict[int, list[float]] = {1: [], 2: []}
    began: dict[int, float] = {}
    left = {n: output for n, (_, _, output) in arrivals.items()}
    while any(left.values()):
        for number, (at_s, kv, _) in arrivals.items():
            if at_s <= now_s and number not in began:
                rows[number], began[number] = kv, now_s
        ms = curve.ms(len(rows), sum(rows.values()))
        now_s += ms / 1000
        for number in list(rows):
            if left[number] == arrivals[number][2]:
                assert firsts[number] == pytest.approx(now_s)
            else:
                gaps[number].append(ms)
            rows[number] += 1
            left[number] -= 1
            if not left[number]:
                del rows[number]
    for number, own in gaps.items():
        count = -(-len(own) // 10)
        assert worst[number] == pytest.approx(sum(sorted(own)[-count:]) / count)


def test_a_store_keeps_the_head_of_a_chain_longer_than_its_tail() -> None:
    store = Store(4, 0, Policy.LRU)
    store.put((1, 2, 3))
    change = store.put((7, 8))
    assert [held.block for held, _ in change.dropped] == [3]
    assert store.dram.prefix((1, 2, 3)) == 2


def test_a_cluster_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    text = (CLUSTERS / "a800-llama3-70b.toml").read_text()
    path.write_text(text.replace("prefills = 8 ", "prefills = 0 "))
    with pytest.raises(ConfigError, match="prefills must be above zero"):
        read_cluster(path)
    path.write_text(text.replace("prefills = 8 ", "prefils = 8 "))
    with pytest.raises(ConfigError, match="prefils"):
        read_cluster(path)
