import gc
import itertools
import weakref
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, strategies as st

from kvtide.engine.errors import RunClosed
from kvtide.engine.facts import ModelFacts
from kvtide.engine.memory import KEY, VALUE, KvRun

FACTS = ModelFacts(
    name="m",
    digest="",
    layers=3,
    kv_heads=2,
    head_dim=4,
    kv_dtype="float32",
    vocab_size=10,
    max_tokens=1 << 20,
    eos_token_ids=(),
    numerics="",
)
TOKEN_BYTES = 32


def test_a_part_is_token_then_head_then_number():
    run = KvRun(FACTS, 10)
    run.values(1)[4:7] = torch.arange(24.0).view(3, 2, 4)
    part = run.part(1, VALUE, 4, 7)

    assert (part.format, part.contiguous, part.readonly) == ("B", True, False)
    assert bytes(part) == torch.arange(24.0).numpy().tobytes()
    assert not any(run.part(1, KEY, 0, 10))
    assert not any(run.part(1, VALUE, 7, 10))


@given(
    layer=st.integers(0, 2),
    kind=st.sampled_from((KEY, VALUE)),
    ends=st.tuples(st.integers(0, 10), st.integers(0, 10)),
)
def test_bytes_written_to_a_part_are_read_by_its_view_alone(
    layer: int, kind: int, ends: tuple[int, int]
):
    start, end = sorted(ends)
    run = KvRun(FACTS, 10)
    ones = torch.ones(end - start, 2, 4)
    run.part(layer, kind, start, end)[:] = ones.numpy().tobytes()

    total = sum(
        float(view(i).sum()) for view in (run.keys, run.values) for i in range(3)
    )
    view = run.values if kind == VALUE else run.keys
    assert bool((view(layer)[start:end] == 1).all())
    assert total == 8 * (end - start)
    run.close()


@pytest.mark.parametrize(
    ("layer", "kind", "start", "end"),
    [
        (3, 0, 0, 1),
        (-1, 0, 0, 1),
        (0, 2, 0, 1),
        (0, 0, -1, 1),
        (0, 0, 2, 1),
        (0, 1, 0, 11),
    ],
)
def test_no_part_outside_of_the_run(layer: int, kind: int, start: int, end: int):
    with pytest.raises(IndexError):
        KvRun(FACTS, 10).part(layer, kind, start, end)


def test_length_stays_within_capacity():
    run = KvRun(FACTS, 10)
    run.length = 10
    with pytest.raises(ValueError, match="11"):
        run.length = 11
    with pytest.raises(ValueError, match="-1"):
        run.length = -1

    assert run.length == 10


def test_no_run_without_room():
    with pytest.raises(ValueError, match="0"):
        KvRun(FACTS, 0)


def test_a_closed_run_refuses_and_close_may_be_repeated():
    run = KvRun(FACTS, 10)
    run.close()
    run.close()

    assert run.closed
    with pytest.raises(RunClosed):
        run.part(0, KEY, 0, 1)
    with pytest.raises(RunClosed):
        run.keys(0)


def test_a_view_outlives_the_close():
    """A slow reader or writer must find its own bytes, not another run's."""
    run = KvRun(FACTS, 10)
    run.keys(0).fill_(2.0)
    part = run.part(0, KEY, 0, 10)
    mapping = weakref.ref(part.obj)
    run.close()
    gc.collect()

    assert bytes(part) == torch.full((80,), 2.0).numpy().tobytes()
    assert mapping() is not None
    del part
    gc.collect()
    assert mapping() is None


def _resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def test_capacity_costs_nothing_until_it_is_written():
    facts = replace(FACTS, kv_heads=8, head_dim=64)  # 12 KiB a token
    before = _resident_bytes()
    runs = [KvRun(facts, 1 << 15) for _ in range(16)]  # 6 GiB of address space
    reserved = _resident_bytes()
    for run in runs:
        for layer in range(3):
            run.keys(layer)[:64] = 1.0
            run.values(layer)[:64] = 1.0
    written = _resident_bytes()
    mine = 16 * 64 * 12288  # 12 MiB
    for run in runs:
        run.close()
    gc.collect()
    closed = _resident_bytes()

    assert reserved - before < 4 << 20
    assert mine <= written - reserved + (1 << 20)
    assert written - reserved < 2 * mine
    assert written - closed > mine / 2


def test_huge_pages_are_off_for_runs():
    """With them a handful of tokens would commit 2 MiB per layer and kind."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists():
        pytest.skip("no transparent huge pages here")
    run = KvRun(replace(FACTS, kv_heads=8, head_dim=64), 1 << 15)
    address = f"{run.keys(0).data_ptr():x}"
    blocks = Path("/proc/self/smaps").read_text().split("VmFlags:")
    [flags] = [
        after.split("\n")[0]
        for before, after in itertools.pairwise(blocks)
        if any(line.startswith(address) for line in before.split("\n"))
    ]
    assert "nh" in flags.split()
