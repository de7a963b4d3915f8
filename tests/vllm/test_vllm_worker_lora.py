"""A LoRA adapter that one of two vLLM workers has: a model of its own, on the base's weights."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.integration.cluster import Cluster, wait_for
from tests.vllm.vllm_engine import PYTHON, options, vllm_engine
from tests.vllm.vllm_models import adapter
from tests.vllm.vllm_prompts import prompt
from tests.vllm.vllm_workers import (
    START_LIMIT_S,
    ask,
    counted_on,
    post,
    serving,
    start_worker,
    why,
)

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON, reason="make test-vllm names vLLM's Python"),
]

BOTH_ROLES = "prefill,decode"
NAME = "tuned"
TEXTS = [prompt(number, 40) for number in range(1, 5)]
TOKENS = 16
REUSED_TOKENS = 384
WANTED = {"max_tokens": TOKENS, "ignore_eos": True}


async def test_an_adapter_is_a_model_of_its_own(tmp_path: Path, model: Path) -> None:
    made = adapter(tmp_path / NAME, model)
    given = options(model, None) | {"enable_lora": True}
    with vllm_engine(given, tmp_path / "alone.log") as engine:
        base = {text: engine.generate([text], TOKENS).tokens[0] for text in TEXTS}
        tuned = {
            text: engine.generate([text], TOKENS, lora=made).tokens[0] for text in TEXTS
        }
    assert all(tuned[text] != base[text] for text in TEXTS)
    with serving(tmp_path / "pool", model, [BOTH_ROLES]) as cluster:
        first = ask(cluster, TEXTS[0], **WANTED)
        assert first.ids == base[TEXTS[0]]
        refused = post(cluster, {"model": NAME, "prompt": TEXTS[0]})
        assert refused["status"] == 404, refused
        lora = json.dumps({NAME: str(made)})
        start_worker(cluster, 1, model, BOTH_ROLES, lora=lora)
        cluster.wait_ready(START_LIMIT_S)
        wait_for(lambda: len(models(cluster)) > 1, "the gateway has heard of it", 60.0)
        assert models(cluster) == {model.name: None, NAME: model.name}
        # the base's blocks of the same tokens are in the pool
        assert ask(cluster, TEXTS[0], model=NAME, **WANTED).cached == 0
        await only_by_who_has_it(cluster, tuned)
        await counted_on(
            cluster,
            TEXTS[0],
            "vllm-1",
            REUSED_TOKENS,
            lambda ids: ids == tuned[TEXTS[0]],
            model=NAME,
            **WANTED,
        )
        assert [ask(cluster, text, **WANTED).ids for text in TEXTS] == [*base.values()]


async def only_by_who_has_it(cluster: Cluster, tuned: dict[str, list[int]]) -> None:
    """All at once, though another worker has nothing to do."""
    with ThreadPoolExecutor(len(TEXTS)) as threads:
        asked = [
            threads.submit(ask, cluster, text, model=NAME, **WANTED) for text in TEXTS
        ]
        answers = [one.result() for one in asked]
    assert [answer.ids for answer in answers] == [tuned[text] for text in TEXTS]
    for answer in answers:
        candidates = (await why(cluster, answer.request)).candidates
        assert {each.decode for each in candidates} == {"vllm-1"}


def models(cluster: Cluster) -> dict[str, str | None]:
    """What the gateway serves, and what each is an adapter for."""
    url = f"{cluster['gateway-0'].http_url}/v1/models"
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - our own address
        listed: list[dict[str, Any]] = json.loads(answer.read())["data"]
    return {each["id"]: each["parent"] for each in listed}
