"""Two vLLM engines on one pool. ``make test-vllm`` runs it; elsewhere it is skipped.

A step after the other, because an engine takes a minute or two to start: each goes on
with the engines and the pool that the one before it left.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.cluster import Cluster, wait_for
from tests.vllm.vllm_engine import (
    PYTHON,
    Generated,
    VllmEngine,
    options,
    vllm_engine,
)
from tests.vllm.vllm_prompts import FAULTS, LATER, SHARED
from tests.vllm.vllm_rot import rot_all

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON, reason="make test-vllm names vLLM's Python"),
]

RESULT = os.environ.get("KVTIDE_TEST_VLLM_RESULT", "")  # noqa: TID251 - a test's own
BLOCK_TOKENS = 128


def full_tokens(prompt_tokens: int) -> int:
    """What can be reused of a prompt: whole blocks, never its last token."""
    return (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def blocks(answers: Generated) -> int:
    """How many blocks the prompts fill."""
    return sum(tokens // BLOCK_TOKENS for tokens in answers.prompt_tokens)


def test_engines_share_a_pool_and_survive_its_faults(
    folder: Path, model: Path, plain: dict[str, list[int]], cluster: Cluster
) -> None:
    seen: dict[str, object] = {}
    given = options(model, cluster)
    with vllm_engine(given, folder / "first.log") as first:
        cold = first.generate([SHARED[0]], 1)
        assert cold.cached == [0]
        made = first.generate([SHARED[1], *LATER])
        assert made.tokens == [plain[text] for text in (SHARED[1], *LATER)]
        saved = blocks(cold) + blocks(made)
        first.wait_known(saved)
        with vllm_engine(given, folder / "second.log") as second:
            second.wait_known(saved)
            reuse(second, cold.seconds, plain, seen)
            first.kill()
            later = second.generate(LATER)
            assert later.tokens == [plain[text] for text in LATER]
            assert later.cached == [full_tokens(each) for each in later.prompt_tokens]
            other = second.generate([LATER[0]], 16, salt="another tenant")
            assert other.cached == [0]
            assert other.tokens == [plain[LATER[0]]]
            renew(second, plain)
            spoil(second, cluster, plain, seen)
            lose_nats(second, cluster, plain)
            lose_store(second, cluster, plain)
            lose_blocks(second, cluster, plain)
            seen["metrics"] = second.metrics()
    if RESULT:
        Path(RESULT).write_text(json.dumps(seen, indent=1) + "\n")


def reuse(
    engine: VllmEngine,
    cold_s: float,
    plain: dict[str, list[int]],
    seen: dict[str, object],
) -> None:
    """What the first engine computed is a hit on one that has never seen it."""
    warm = engine.generate([SHARED[0]], 1)
    assert warm.cached == [full_tokens(warm.prompt_tokens[0])]
    seen["prompt_tokens"] = warm.prompt_tokens[0]
    seen["reused_tokens"] = warm.cached[0]
    seen["ttft_computed_s"] = round(cold_s, 3)
    seen["ttft_reused_s"] = round(warm.seconds, 3)
    again = engine.generate(SHARED)
    assert again.tokens == [plain[text] for text in SHARED]
    assert min(again.cached) > 0


def renew(engine: VllmEngine, plain: dict[str, list[int]]) -> None:
    """As after new weights: nothing of before is found, what is computed since is."""
    known = engine.known()
    engine.reset(pool=True)
    fresh = engine.generate([LATER[0]])
    assert (fresh.cached, fresh.tokens) == ([0], [plain[LATER[0]]])
    engine.wait_known(known + blocks(fresh))
    engine.reset()
    again = engine.generate([LATER[0]])
    assert again.cached == [full_tokens(each) for each in again.prompt_tokens]
    assert again.tokens == [plain[LATER[0]]]


def spoil(
    engine: VllmEngine,
    cluster: Cluster,
    plain: dict[str, list[int]],
    seen: dict[str, object],
) -> None:
    """All blocks in the pool rot: none is used, every answer is right."""
    before = engine.metrics().get("vllm:kvtide_missed_blocks", 0.0)
    known = engine.known()
    engine.wait_known(known + blocks(engine.generate([FAULTS[0]])))
    engine.reset()
    rot_all(cluster.shm_dir())
    answered = engine.generate([FAULTS[0], SHARED[0]])
    assert answered.tokens == [plain[FAULTS[0]], plain[SHARED[0]]]
    assert answered.reasons == ["length", "length"]
    missed = engine.metrics()["vllm:kvtide_missed_blocks"] - before
    assert missed > 0
    seen["rotten_blocks"] = missed


def lose_nats(
    engine: VllmEngine, cluster: Cluster, plain: dict[str, list[int]]
) -> None:
    engine.reset()
    cluster.nats.kill()
    answered = engine.generate([FAULTS[1]])
    assert answered.tokens == [plain[FAULTS[1]]]
    cluster.nats.start()


def lose_store(
    engine: VllmEngine, cluster: Cluster, plain: dict[str, list[int]]
) -> None:
    """Without its store the engine serves on; with a new one it shares again."""
    cluster.kill("store-0")
    engine.reset()
    before = engine.metrics()["vllm:kvtide_lookups"]
    answered = engine.generate([FAULTS[2], LATER[1]])
    assert answered.tokens == [plain[FAULTS[2]], plain[LATER[1]]]
    # what could not be loaded is computed, and not looked for over and over
    assert engine.metrics()["vllm:kvtide_lookups"] == before + 2
    cluster.restart("store-0")

    def shared() -> bool:
        engine.reset()
        engine.generate([FAULTS[3]])
        engine.reset()
        again = engine.generate([FAULTS[3]])
        assert again.tokens == [plain[FAULTS[3]]]
        return again.cached[0] > 0

    wait_for(shared, "the new store is used", 120.0)


def lose_blocks(
    engine: VllmEngine, cluster: Cluster, plain: dict[str, list[int]]
) -> None:
    """What was a hit a moment ago goes, and is computed."""
    engine.reset()
    command = (
        *(sys.executable, "-m", "kvtide.cli", "blocks", "remove", "--yes"),
        *("--tenant", "default", "--nats", cluster.nats.url),
        *("--state-dir", str(cluster.state_dir)),
    )
    gone = subprocess.run(  # noqa: S603 - ours
        command, capture_output=True, text=True, timeout=60, check=False
    )
    assert gone.returncode == 0, gone.stderr
    assert "blocks removed" in gone.stdout
    answered = engine.generate([FAULTS[3]])
    assert answered.tokens == [plain[FAULTS[3]]]
    assert answered.cached == [0]
