"""vLLM as a kvtide worker behind gateway and conductor: in one process, and in two."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.oracle.reference import Oracle
from tests.integration.cluster import Cluster, wait_for
from tests.vllm.vllm_engine import PYTHON, vllm_environment
from tests.vllm.vllm_workers import (
    ASKS,
    NEW_TOKENS,
    START_LIMIT_S,
    Served,
    ask,
    counted_on,
    post,
    runs,
    serving,
    streaming,
)
from tokenizers import Tokenizer

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON, reason="make test-vllm names vLLM's Python"),
]

LENGTHS = (20, 128, 300, 700)
LONG_TOKENS = 60
REUSED_TOKENS = 512


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text).ids

    return [
        text_tokens(encode, length, 30 * number)
        for number, length in enumerate(LENGTHS)
    ]


def judge(cluster: Cluster, oracle: Oracle, prompts: list[list[int]]) -> list[Served]:
    """Ask all at once; each answer is what the reference allows."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        asked = [threads.submit(ask, cluster, prompt) for prompt in prompts]
        served = [one.result() for one in asked]
    for prompt, answer in zip(prompts, served, strict=True):
        assert oracle.check(prompt, answer.ids).right
        assert answer.finish in ("length", "stop")
    return served


async def test_vllm_is_a_worker_of_both_roles(
    tmp_path: Path, model: Path, oracle: Oracle, prompts: list[list[int]]
) -> None:
    with serving(tmp_path, model, ["prefill,decode"]) as cluster:
        judge(cluster, oracle, prompts)
        await reuses(cluster, oracle, prompts[-1], "vllm-0")
        drawn = ask(cluster, prompts[0], temperature=0.8, seed=7, logprobs=2)
        assert drawn.ids == ask(cluster, prompts[0], temperature=0.8, seed=7).ids
        refusals(cluster, prompts[0])
        hang_up(cluster, prompts[1])
        nothing_runs(cluster, "vllm-0")


async def reuses(
    cluster: Cluster, oracle: Oracle, prompt: list[int], decode: str
) -> None:
    def right(ids: list[int]) -> bool:
        return oracle.check(prompt, ids).right

    await counted_on(cluster, prompt, decode, REUSED_TOKENS, right)


def refusals(cluster: Cluster, prompt: list[int]) -> None:
    """What vLLM can't do is said with what to do, and nothing is lost by it."""
    lark = {"grammar": 'start: "yes" | "no"'}
    refused = post(cluster, {"prompt": prompt, "structured_outputs": lark})
    assert refused["status"] == 400, refused
    assert refused["error"]["code"] == "unsupported_option"
    assert "JSON schema" in refused["error"]["message"]
    held = ask(cluster, prompt, structured_outputs={"regex": "(yes|no)"})
    assert held.ids


async def test_one_vllm_prefills_for_another(
    tmp_path: Path, model: Path, oracle: Oracle, prompts: list[list[int]]
) -> None:
    with serving(tmp_path, model, ["prefill", "decode"]) as cluster:
        judge(cluster, oracle, prompts)
        prefilled(cluster, oracle, prompts[-1], "done")
        await reuses(cluster, oracle, prompts[-1], "vllm-1")
        loads(cluster, oracle, prompts[-1])
        outlives(cluster, oracle, prompts[1], lose_store)
        prefilled(cluster, oracle, prompts[-1][::-1], "no_store")
        for fault in (lose_conductor, lose_nats):
            outlives(cluster, oracle, prompts[1], fault)
        nothing_runs(cluster, "vllm-1")


def prefilled(
    cluster: Cluster, oracle: Oracle, prompt: list[int], outcome: str
) -> None:
    """The one is to prefill for the other, at the latest when prompts come that are new.

    Short ones and those that are cached are left to decode, and so is what prefill is too
    busy for.
    """
    ended = f'kvtide_prefill_ended_total{{outcome="{outcome}"}}'
    for turn in range(1, ASKS):
        if cluster["vllm-0"].metrics().get(ended, 0.0) > 0:
            return
        other = [*prompt[turn * 50 :], *prompt[: turn * 50]]
        assert oracle.check(other, ask(cluster, other).ids).right
    raise AssertionError(f"no prefill ended with {outcome}")


def loads(cluster: Cluster, oracle: Oracle, prompt: list[int]) -> None:
    """A new life of decode has nothing: what of a prompt counts as cached, it loaded."""
    cluster.kill("vllm-1")
    cluster["vllm-1"].start(vllm_environment())
    cluster.wait_ready(START_LIMIT_S)
    longer = [*prompt, *prompt[:300]]
    answer = ask(cluster, longer)
    assert oracle.check(longer, answer.ids).right
    assert answer.cached >= REUSED_TOKENS
    seen = cluster["vllm-1"].metrics()
    assert seen["kvtide_connector_loaded_blocks_total"] > 0
    assert seen["kvtide_connector_loaded_bytes_total"] > 0


def outlives(
    cluster: Cluster,
    oracle: Oracle,
    prompt: list[int],
    fault: Callable[[Cluster], None],
) -> None:
    """An answer under way, and one that comes after it, are right all the same."""
    more = {"max_tokens": LONG_TOKENS, "ignore_eos": True}
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(ask, cluster, prompt, **more)
        wait_for(lambda: running.done() or runs(cluster, "vllm-1"), "it decodes", 120.0)
        fault(cluster)
        assert oracle.check(prompt, running.result().ids).right
    other = prompt[: len(prompt) // 2]
    answers: list[Served] = []

    def answered() -> bool:
        """Members may yet have to find each other again."""
        body = {"prompt": other, "max_tokens": NEW_TOKENS, "temperature": 0}
        if "choices" in post(cluster, body):
            answers.append(ask(cluster, other))
        return bool(answers)

    wait_for(answered, f"answers come after {fault.__name__}", 600.0)
    assert oracle.check(other, answers[0].ids).right


def lose_store(cluster: Cluster) -> None:
    """The pool is gone, and stays away."""
    cluster.kill("store-0")
    del cluster.processes["store-0"]


def lose_conductor(cluster: Cluster) -> None:
    cluster.kill("conductor-0")
    cluster.restart("conductor-0")


def lose_nats(cluster: Cluster) -> None:
    cluster.nats.kill()
    cluster.nats.start()


def hang_up(cluster: Cluster, prompt: Sequence[int]) -> None:
    """Go away in mid-answer."""
    body = {"prompt": list(prompt), "max_tokens": 3000, "ignore_eos": True}
    with streaming(cluster, body) as (_, pieces):
        assert next(pieces)


def nothing_runs(cluster: Cluster, name: str) -> None:
    wait_for(lambda: not runs(cluster, name), "nothing runs at vLLM any more", 60.0)
