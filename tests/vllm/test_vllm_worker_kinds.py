"""vLLM workers of models of other kinds: windows beside full attention, and experts.

Greedy tokens are those of vLLM alone, whoever of the workers makes them.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.cluster import Cluster, wait_for
from tests.vllm.vllm_engine import PYTHON, options, vllm_engine, vllm_environment
from tests.vllm.vllm_models import expert_model, sliding_model
from tests.vllm.vllm_prompts import prompt
from tests.vllm.vllm_workers import (
    START_LIMIT_S,
    ask,
    counted_on,
    runs,
    serving,
    streaming,
    why,
)

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON, reason="make test-vllm names vLLM's Python"),
]

BOTH_ROLES = "prefill,decode"
ONE, OTHER, LONG = prompt(1, 60), prompt(2, 60), prompt(3, 60)
SHORT_TOKENS, LONG_TOKENS = 16, 200
REUSED_TOKENS = 640
"""More than twice the window: what is left of a prompt is less than a block."""


def alone(made: Path, folder: Path, asked: dict[str, int]) -> dict[str, list[int]]:
    """What vLLM alone answers: so many tokens to each prompt."""
    with vllm_engine(options(made, None), folder / "alone.log") as engine:
        found = {
            text: engine.generate([text], n).tokens[0] for text, n in asked.items()
        }
    assert len({tuple(tokens[:SHORT_TOKENS]) for tokens in found.values()}) == len(
        asked
    )
    return found


def wanted(tokens: int) -> dict[str, object]:
    return {"max_tokens": tokens, "ignore_eos": True}


async def counts(
    cluster: Cluster, text: str, worker: str, right: dict[str, list[int]]
) -> None:
    """The conductor counts on the prompt's blocks, and the worker reuses them."""
    await counted_on(
        cluster,
        text,
        worker,
        REUSED_TOKENS,
        lambda ids: ids == right[text],
        **wanted(SHORT_TOKENS),
    )


@pytest.mark.parametrize("make", [sliding_model, expert_model])
async def test_a_worker_of_another_kind_of_model_is_counted_on(
    make: Callable[[Path, Path], Path], tmp_path: Path, model: Path
) -> None:
    made = make(tmp_path / "another", model)
    right = alone(made, tmp_path, dict.fromkeys((ONE, OTHER), SHORT_TOKENS))
    with serving(tmp_path / "pool", made, [BOTH_ROLES]) as cluster:
        for text in (ONE, OTHER):
            first = ask(cluster, text, **wanted(SHORT_TOKENS))
            assert first.ids == right[text]
            assert first.finish == "length"
        await counts(cluster, ONE, "vllm-0", right)


async def test_one_worker_of_a_model_with_windows_goes_on_for_another(
    tmp_path: Path, model: Path
) -> None:
    made = sliding_model(tmp_path / "another", model)
    right = alone(made, tmp_path, {ONE: SHORT_TOKENS, LONG: LONG_TOKENS})
    with serving(tmp_path / "pool", made, [BOTH_ROLES, BOTH_ROLES]) as cluster:
        assert ask(cluster, ONE, **wanted(SHORT_TOKENS)).ids == right[ONE]
        body = {"prompt": LONG, "temperature": 0, **wanted(LONG_TOKENS)}
        with streaming(cluster, body) as (name, pieces):
            told = list(next(pieces))
            (lost,) = [one for one in ("vllm-0", "vllm-1") if runs(cluster, one)]
            kill(cluster, lost)
            told += [token for piece in pieces for token in piece]
        assert told == right[LONG]
        left = "vllm-1" if lost == "vllm-0" else "vllm-0"
        decision = await why(cluster, name)
        assert decision.attempt > 1
        best = decision.candidates[0]
        assert best.decode == left
        assert best.hit_tokens >= REUSED_TOKENS
        # one that has just come has nothing itself: it loads what the two have saved
        cluster[lost].start(vllm_environment())
        cluster.wait_ready(START_LIMIT_S)
        kill(cluster, left)
        del cluster.processes[left]
        again = ask(cluster, ONE, **wanted(SHORT_TOKENS))
        assert again.ids == right[ONE]
        assert again.cached >= REUSED_TOKENS
        await counts(cluster, LONG, lost, {LONG: right[LONG][:SHORT_TOKENS]})


def kill(cluster: Cluster, worker: str) -> None:
    """A worker; the processes of its engine, which are of its group, end with it."""
    process = cluster[worker]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not group_lives(process.pid), "the engine ends", 30.0)


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
