"""Prefill on one vLLM, decode on another, through ``kv_transfer_params``."""

from pathlib import Path

import pytest
from tests.integration.cluster import Cluster, wait_for
from tests.vllm.vllm_engine import PYTHON, VllmEngine, options, vllm_engine
from tests.vllm.vllm_prompts import APART, SHORT

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON, reason="make test-vllm names vLLM's Python"),
]

LEASE_S = 20.0
TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


def test_a_prompt_is_made_by_one_engine_and_answered_by_another(
    folder: Path, model: Path, plain: dict[str, list[int]], cluster: Cluster
) -> None:
    given = options(model, cluster, "kv_producer", lease_s=LEASE_S)
    taken = options(model, cluster, "kv_consumer", handover_wait_s=20.0)
    with (
        vllm_engine(given, folder / "prefill.log") as prefill,
        vllm_engine(taken, folder / "decode.log") as decode,
    ):
        params = {text: handed_over(prefill, text) for text in APART}
        wait_for(lambda: soft_pins(cluster) > 0, "the store keeps what was handed over")
        for text in APART:
            before = loaded_tokens(decode)
            answered = decode.generate([text], params=params[text])
            assert answered.tokens == [plain[text]]
            # the whole prompt came, the page that is not full too
            assert loaded_tokens(decode) - before == answered.prompt_tokens[0]
        foreign(decode, params, plain)
        nothing_is_held(prefill, decode, params)
        wait_for(lambda: soft_pins(cluster) == 0, "the leases have ended", 60.0)


def handed_over(engine: VllmEngine, text: str) -> dict[str, object]:
    answered = engine.generate([text], 1, params=TO_DECODE)
    params = answered.params[0]
    assert params is not None
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert params["remote_num_tokens"] == answered.prompt_tokens[0]
    return params


def foreign(
    decode: VllmEngine,
    params: dict[str, dict[str, object]],
    plain: dict[str, list[int]],
) -> None:
    """Params of another prompt, or none at all: computed, and nobody waits."""
    decode.reset()
    for wrong in (params[APART[0]], {"do_remote_prefill": True}):
        assert decode.generate([SHORT], params=wrong).tokens == [plain[SHORT]]


def nothing_is_held(
    prefill: VllmEngine, decode: VllmEngine, params: dict[str, dict[str, object]]
) -> None:
    """Requests that are aborted in mid-prefill, in mid-load, and while they wait."""
    prefill.reset()
    decode.reset()
    made = prefill.abort(APART[0], TO_DECODE, 1)
    loading = decode.abort(APART[0], params[APART[0]], 1)
    assert loading.state == ["WAITING_FOR_REMOTE_KVS"]
    decode.reset()
    unknown = params[APART[0]] | {"remote_digest": "00"}
    computing = decode.abort(APART[1], unknown, 1)
    for one in (made, loading, computing):
        assert (one.requests, one.used_blocks, one.followed) == (0, 0, 0)


def loaded_tokens(engine: VllmEngine) -> int:
    return int(engine.metrics()["vllm:external_prefix_cache_hits"])


def soft_pins(cluster: Cluster) -> int:
    """Slots that the store keeps for a time."""
    return int(cluster.processes["store-0"].metrics()["kvtide_store_soft_pins"])
