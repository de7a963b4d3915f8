"""Loads for the simulator: streams, gateway logs, and runs that are kept."""

import gzip
import subprocess
import sys
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvtide.bus.messages import DecodeLoad
from kvtide.kv import BlockIds, BlockKey, LoggedRequest
from kvtide.runtime import ConfigError
from kvtide.sim.hit_rates import TraceRequest, read_trace
from kvtide.sim.kernel import Kernel
from kvtide.sim.perf.decoding import DecodeWorker
from kvtide.sim.perf.outcomes import Report, Sample
from kvtide.sim.perf.reproduction.bench import Bench, shuffled
from kvtide.sim.perf.reproduction.oscillation import Swing
from kvtide.sim.perf.reproduction.report import assemble
from kvtide.sim.perf.reproduction.seeds import interval
from kvtide.sim.perf.running import simulate
from kvtide.sim.perf.shapes import ClusterShape, read_cluster
from kvtide.sim.perf.workload import (
    Synthetic,
    SyntheticText,
    of_trace,
    read_workload,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
SECRET = b"s" * 32
CHAT = SyntheticText(
    requests=40,
    requests_per_s=2.0,
    prompt_tokens=3000,
    output_tokens=20,
    shared_prefixes=3,
    shared_tokens=1024,
    turns=4,
)


def pair() -> ClusterShape:
    shape = read_cluster(EXAMPLES / "clusters" / "a800-llama3-70b.toml")
    return ClusterShape(msgspec.structs.replace(shape.text, prefills=1, decodes=1))


def keys_of(*names: int) -> list[BlockKey]:
    return [BlockKey(name.to_bytes(16, "big")) for name in names]


# ---- streams


@pytest.mark.parametrize("system", ["best", "coupled-cached"])
def test_a_stream_is_simulated_as_a_list_is(system: str) -> None:
    load = Synthetic(CHAT, 512, 1.0, 5)
    streamed = simulate(pair(), iter(load), system)
    assert streamed == simulate(pair(), list(load), system)
    assert streamed.requests == CHAT.requests


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.floats(0.1, 50.0))
def test_synthetic_requests_come_in_order(
    requests: int, turns: int, rate: float
) -> None:
    text = msgspec.structs.replace(CHAT, requests=requests, turns=turns)
    load = Synthetic(text, 512, rate, 1)
    made = list(load)
    assert [each.number for each in made] == list(range(requests))
    assert all(a.at_s <= b.at_s for a, b in pairwise(made))
    assert made == list(load)


def test_a_load_of_millions_begins_at_once() -> None:
    text = msgspec.structs.replace(CHAT, requests=10**9)
    assert len(list(islice(Synthetic(text, 512, 1.0, 1), 100))) == 100


# ---- gateway logs


def test_a_gateways_log_is_a_workload(tmp_path: Path) -> None:
    ids = BlockIds(SECRET)
    first = ids.of(keys_of(1, 2, 3, 4, 5))
    later = ids.of(keys_of(1, 2, 9))
    lines = [
        LoggedRequest(2500.0, 50, 7, later, 16, "demo"),
        LoggedRequest(1000.0, 90, 3, first, 16, "demo"),
    ]
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(each.line() for each in lines)))
    one, two = list(read_workload(path, 32))
    assert (one.at_s, two.at_s) == (0.0, 1.5)
    assert (one.prompt_tokens, one.output_tokens) == (90, 3)
    # two of the log's blocks make one here, named by the chain's id at its end
    assert one.blocks == (first[1], first[3])
    assert two.blocks == (later[1],)
    assert one.blocks[0] == two.blocks[0]


def test_ids_of_a_log_tell_nothing_without_the_secret() -> None:
    keys = keys_of(*range(100))
    ids = BlockIds(SECRET).of(keys)
    assert ids == BlockIds(SECRET).of(keys)
    assert len(set(ids)) == len(ids)
    assert not set(ids) & set(BlockIds(b"t" * 32).of(keys))
    assert all(0 <= each < 1 << 63 for each in ids)
    raw = {int.from_bytes(key[part], "big") for key in keys for part in HALVES}
    assert not set(ids) & raw


HALVES = (slice(0, 8), slice(8, 16))


def test_blocks_that_do_not_make_up_the_clusters_are_refused() -> None:
    trace = [TraceRequest(0.0, 100, 1, (1, 2), 48)]
    with pytest.raises(ConfigError, match="blocks of 48 tokens"):
        of_trace(trace, 512)


# ---- the same bits


RUN = """
import sys
from pathlib import Path
from kvtide.sim.perf.running import simulate
from kvtide.sim.perf.rules import Rules
from kvtide.sim.perf.shapes import read_cluster
from kvtide.sim.perf.workload import read_workload
import msgspec
shape = read_cluster(Path(sys.argv[1]))
load = read_workload(Path(sys.argv[2]), shape.text.model.block_tokens, seed=4)
rules = Rules(reject=True, sample_s=5.0)
sys.stdout.buffer.write(msgspec.json.encode(simulate(shape, list(load), "best", rules)))
"""


def test_another_process_gives_the_same_bits(tmp_path: Path) -> None:
    workload = tmp_path / "chat.toml"
    lines = (f"{name} = {value}" for name, value in msgspec.to_builtins(CHAT).items())
    workload.write_text("\n".join(lines))
    cluster = EXAMPLES / "clusters" / "a800-llama3-70b.toml"
    found = [
        subprocess.run(  # noqa: S603 - our own program
            [
                *("/usr/bin/env", f"PYTHONHASHSEED={seed}"),
                *(sys.executable, "-c", RUN, str(cluster), str(workload)),
            ],
            capture_output=True,
            check=True,
            timeout=50,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]
    assert msgspec.json.decode(found[0], type=Report).requests == CHAT.requests


# ---- the report


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """The examples with the first requests of each trace."""
    (tmp_path / "traces").mkdir()
    (tmp_path / "clusters").symlink_to(EXAMPLES / "clusters")
    for name in ("conversation", "synthetic"):
        path = f"traces/{name}.jsonl.gz"
        lines = gzip.decompress((EXAMPLES / path).read_bytes()).splitlines(True)
        (tmp_path / path).write_bytes(gzip.compress(b"".join(lines[:12])))
    return tmp_path


def test_a_kept_run_is_not_made_again(few: Path, tmp_path: Path) -> None:
    made: list[Report] = []
    bench = Bench(few, tmp_path / "kept", made.append)
    found = bench.run(bench.trace("synthetic"), "best")
    again = Bench(few, tmp_path / "kept", made.append)
    assert again.run(again.trace("synthetic"), "best") == found
    assert len(made) == 1
    other = again.run(again.trace("synthetic", rate=2.0), "best")
    assert other != found
    assert len(made) == 2


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_section_is_made(few: Path, tmp_path: Path) -> None:
    made: list[Report] = []
    text = assemble(Bench(few, tmp_path / "kept", made.append))
    runs = len(made)
    assert runs > 100
    assert text == assemble(Bench(few, tmp_path / "kept", made.append))
    assert len(made) == runs
    for title in ("Figure 5", "Figures 6 to 8", "Overload", "Oscillation", "seeds"):
        assert title in text


def test_a_seed_moves_arrivals_and_nothing_else() -> None:
    trace = read_trace(EXAMPLES / "traces" / "synthetic.jsonl.gz")
    requests = of_trace(trace, 512)[:200]
    moved = shuffled(requests, 3)
    assert moved != requests
    assert [replace(m, at_s=0.0) for m in moved] == [
        replace(r, at_s=0.0) for r in requests
    ]
    gaps = [
        np.sort(np.diff([each.at_s for each in some])) for some in (moved, requests)
    ]
    assert gaps[0] == pytest.approx(gaps[1], abs=1e-6)
    assert moved == shuffled(requests, 3)


def test_swings_are_variances_of_both_loads() -> None:
    report = simulate(pair(), list(Synthetic(CHAT, 512, 1.0, 1)), "best")
    samples = tuple(
        Sample(180.0 + n, 0.0, 1.0 + n % 2, 2.0 - n % 2, 0) for n in range(100)
    )
    report = msgspec.structs.replace(report, samples=samples, virtual_s=1e6)
    swing = Swing.of(report)
    assert swing.prefill == pytest.approx(0.25)
    assert swing.decode == pytest.approx(0.25)
    assert swing.together == pytest.approx(-1.0)


def test_an_interval_is_students() -> None:
    assert interval([1.0, 2.0, 3.0, 4.0]) == "+2.50 ± 2.05"


def test_decode_that_is_not_told_reports_what_it_has() -> None:
    shape = pair()
    loads: list[DecodeLoad] = []
    for told in (True, False):
        worker = DecodeWorker(
            Kernel(),
            shape.step,
            batch=8,
            capacity_tokens=10_000,
            first=lambda number, at_s: None,
            told=told,
        )
        worker.promise(1, 500, lambda: None)
        loads.append(worker.load())
    assert (loads[0].waiting, loads[0].kv_tokens_promised) == (1, 500)
    assert (loads[1].waiting, loads[1].kv_tokens_promised) == (0, 0)
