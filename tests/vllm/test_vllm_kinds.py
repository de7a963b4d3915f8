"""Models of other kinds on the pool: windows beside full attention, and experts."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integration.cluster import Cluster
from tests.vllm.conftest import STORE
from tests.vllm.vllm_engine import PYTHON, VllmEngine, options, vllm_engine
from tests.vllm.vllm_models import WINDOW_TOKENS, expert_model, grown, sliding_model
from tests.vllm.vllm_prompts import prompt
from tests.vllm.vllm_rot import rot_all

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON, reason="make test-vllm names vLLM's Python"),
]

BLOCK_TOKENS = 128
STEP_TOKENS = 512
WHOLE = prompt(1, 60)
BEGUN = prompt(1, 45)
"""Begins as the whole one does: two blocks fewer."""
OTHER = prompt(2, 60)
HANDED = prompt(3, 40)
EDGE_TOKENS = 6 * BLOCK_TOKENS - 1
"""The window of what comes after so many begins with a block."""
TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True)
class Kind:
    """A kind of model, and its cache groups."""

    make: Callable[[Path, Path], Path]
    full_groups: int
    windows: int

    def loaded(self, blocks: int) -> int:
        """How many are loaded of so many blocks of a prompt that goes on after them."""
        unseen = max(0, blocks * BLOCK_TOKENS - WINDOW_TOKENS + 1) // BLOCK_TOKENS
        return self.full_groups * blocks + self.windows * (blocks - unseen)


SLIDING = Kind(sliding_model, full_groups=1, windows=2)
EXPERTS = Kind(expert_model, full_groups=1, windows=0)


@pytest.fixture
def pool(tmp_path: Path) -> Generator[Cluster]:
    with Cluster(tmp_path / "pool", prefill=0, decode=0, settings=STORE) as made:
        made.wait_ready()
        yield made


@pytest.mark.parametrize("kind", [SLIDING, EXPERTS], ids=["sliding", "experts"])
def test_a_model_of_another_kind_reuses_what_a_gone_engine_computed(
    kind: Kind, tmp_path: Path, model: Path, pool: Cluster
) -> None:
    made = kind.make(tmp_path / "model", model)
    # a prompt takes two steps: windows leave blocks behind while it is computed
    edge = grown(prompt(4, 45), EDGE_TOKENS, model)
    asked = [BEGUN, WHOLE, OTHER, HANDED, edge]
    more = {"max_num_batched_tokens": STEP_TOKENS}
    with vllm_engine(options(made, None) | more, tmp_path / "plain.log") as plain:
        right = {text: plain.generate([text]).tokens[0] for text in asked}
    assert len({tuple(tokens) for tokens in right.values()}) == len(asked)
    given = options(made, pool, handover_wait_s=20.0) | more
    groups = kind.full_groups + kind.windows
    with vllm_engine(given, tmp_path / "first.log") as first:
        assert first.groups() == groups
        cold = [first.generate([text]) for text in (WHOLE, OTHER)]
        assert [each.tokens[0] for each in cold] == [right[WHOLE], right[OTHER]]
        saved = groups * sum(each.prompt_tokens[0] // BLOCK_TOKENS for each in cold)
        first.wait_known(saved)
        handed = [handed_over(first, text) for text in (HANDED, edge)]
    with vllm_engine(given, tmp_path / "second.log") as second:
        second.wait_known(saved)
        reuses(second, kind, right)
        takes_over(second, HANDED, handed[0], right[HANDED])
        taken = takes_over(second, edge, handed[1], right[edge])
        assert taken == EDGE_TOKENS - (kind.windows > 0)
        rot_all(pool.shm_dir())
        second.reset()
        spoiled = second.generate([OTHER])
        assert spoiled.tokens == [right[OTHER]]
        assert second.metrics()["vllm:kvtide_missed_blocks"] > 0


def reuses(engine: VllmEngine, kind: Kind, right: dict[str, list[int]]) -> None:
    """A part of a prompt, and the rest of it beside what the engine then has itself."""
    begun = engine.generate([BEGUN])
    assert begun.tokens == [right[BEGUN]]
    blocks = begun.cached[0] // BLOCK_TOKENS
    assert blocks > WINDOW_TOKENS // BLOCK_TOKENS
    assert loaded(engine) == kind.loaded(blocks)
    whole = engine.generate([WHOLE])
    assert whole.tokens == [right[WHOLE]]
    full = (whole.prompt_tokens[0] - 1) // BLOCK_TOKENS
    assert full > blocks
    assert whole.cached == [full * BLOCK_TOKENS]
    assert loaded(engine) > kind.loaded(blocks)
    assert engine.metrics().get("vllm:kvtide_missed_blocks", 0.0) == 0


def handed_over(engine: VllmEngine, text: str) -> dict[str, object]:
    params = engine.generate([text], 1, params=TO_DECODE).params[0]
    assert params is not None
    return params


def takes_over(
    engine: VllmEngine, text: str, params: dict[str, object], right: list[int]
) -> int:
    """All of a prompt that was handed over, the pages that are not full too."""
    before = hits(engine)
    answered = engine.generate([text], params=params)
    assert answered.tokens == [right]
    loaded = hits(engine) - before
    assert answered.prompt_tokens[0] - loaded <= 1
    return loaded


def hits(engine: VllmEngine) -> int:
    return int(engine.metrics()["vllm:external_prefix_cache_hits"])


def loaded(engine: VllmEngine) -> int:
    return int(engine.metrics()["vllm:kvtide_loaded_blocks"])
