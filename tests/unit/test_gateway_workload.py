"""The gateway's log of its load: read back as a workload, bounded, and without text."""

from pathlib import Path

import pytest

from kvtide.bus.messages import Outcome, RequestEnded, SamplingSpec
from kvtide.gateway.life import RequestSpec
from kvtide.gateway.workload import WorkloadLog
from kvtide.kv import (
    BlockIds,
    KeySpace,
    ModelFacts,
    NodeId,
    NodeRef,
    RequestId,
    SpaceId,
    TenantId,
)
from kvtide.runtime import SystemClock
from kvtide.sim.perf.workload import read_workload

SECRET = b"k" * 32
GATEWAY = NodeRef(NodeId("gateway"), 1)
TENANT = TenantId("acme")
FACTS = ModelFacts(
    name="demo",
    digest="0" * 64,
    layers=2,
    kv_heads=2,
    head_dim=16,
    kv_dtype="float32",
    vocab_size=1000,
    max_tokens=4096,
    eos_token_ids=(),
    numerics="test",
    block_tokens=16,
)
SPACE = KeySpace(SECRET, SpaceId(TENANT, FACTS))


def spec(name: str, prompt: list[int]) -> RequestSpec:
    return RequestSpec(
        request=RequestId(name),
        gateway=GATEWAY,
        tenant=TENANT,
        salt="",
        model="demo",
        prompt=tuple(prompt),
        keys=SPACE.chain(prompt),
        sampling=SamplingSpec(),
        max_new_tokens=8,
    )


def ended(name: str, prompt_tokens: int) -> RequestEnded:
    return RequestEnded(
        request=RequestId(name),
        attempt=1,
        gateway=GATEWAY,
        tenant=TENANT,
        model="demo",
        outcome=Outcome.FINISHED,
        code="",
        prompt_tokens=prompt_tokens,
        cached_tokens=0,
        output_tokens=5,
        ttft_ms=1.0,
        total_ms=9.0,
    )


def log_at(path: Path, most_bytes: int = 1 << 20) -> WorkloadLog:
    return WorkloadLog(path, BlockIds(SECRET), SystemClock(), most_bytes=most_bytes)


async def serve(log: WorkloadLog, name: str, prompt: list[int]) -> None:
    log.arrived(spec(name, prompt), SPACE)
    log.ended(ended(name, len(prompt)))
    await log.flush()


def sizes_in(folder: Path) -> dict[str, int]:
    return {each.name: each.stat().st_size for each in folder.iterdir()}


async def test_what_was_served_is_a_workload(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    log = log_at(path)
    shared = list(range(32))
    await serve(log, "one", [*shared, *range(100, 140)])
    await serve(log, "two", [*shared, *range(200, 240)])
    one, two = list(read_workload(path, 16))
    assert (one.prompt_tokens, one.output_tokens) == (72, 5)
    assert len(one.blocks) == len(two.blocks) == 4
    assert one.blocks[:2] == two.blocks[:2]
    assert not set(one.blocks[2:]) & set(two.blocks[2:])
    assert path.stat().st_mode & 0o077 == 0


async def test_no_name_tenant_or_token_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    await serve(log_at(path), "request-77", [123456, 123457] * 16)
    text = path.read_text()
    for secret in ("request-77", "acme", "123456"):
        assert secret not in text


async def test_a_full_file_makes_room_for_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    log = log_at(path, most_bytes=600)
    for number in range(20):
        await serve(log, f"r{number}", list(range(number, number + 64)))
    sizes = sizes_in(tmp_path)
    assert sorted(sizes) == ["load.jsonl", "load.jsonl.1"]
    assert max(sizes.values()) <= 600
    assert list(read_workload(path, 16))


async def test_a_file_that_cannot_be_written_costs_lines_alone(tmp_path: Path) -> None:
    log = log_at(tmp_path / "nowhere" / "load.jsonl")
    await serve(log, "one", list(range(64)))
    assert log.lost == 1


async def test_a_request_ends_once(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    log = log_at(path)
    await serve(log, "one", list(range(64)))
    log.ended(ended("one", 64))
    log.ended(ended("unknown", 64))
    await log.flush()
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize("tokens", [0, 15])
async def test_a_prompt_without_a_full_block_has_no_ids(
    tmp_path: Path, tokens: int
) -> None:
    path = tmp_path / "load.jsonl"
    await serve(log_at(path), "one", list(range(tokens)))
    (only,) = list(read_workload(path, 16))
    assert only.blocks == ()
