"""Two plain vLLM servers behind kvtide's gateway. ``make test-vllm`` runs it."""

import json
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.cluster import Cluster, wait_for
from tests.vllm.vllm_engine import PYTHON
from tests.vllm.vllm_server import (
    BLOCK_TOKENS,
    NAME_THERE,
    VllmServer,
    vllm_servers,
)

from kvtide.cli.explanations import Explanation, find_explanation
from kvtide.engine.demo import default_cache_dir, ensure_demo_model
from kvtide.runtime.settings import RoleSettings

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON, reason="make test-vllm names vLLM's Python"),
]

WORDS = " ".join(f"item {n} costs {n * 7 % 97} coins;" for n in range(60))


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure_demo_model(default_cache_dir())


@pytest.fixture(scope="module")
def servers(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[list[VllmServer]]:
    folder = tmp_path_factory.mktemp("servers")
    with vllm_servers(model, 2, folder) as made:
        yield made


@pytest.fixture
def cluster(
    tmp_path: Path, model: Path, servers: list[VllmServer]
) -> Generator[Cluster]:
    settings = {"gateway": {"model": str(model), "model_name": "demo"}}
    with Cluster(
        tmp_path / "router",
        prefill=0,
        decode=0,
        conductors=1,
        gateways=1,
        settings=settings,
    ) as made:
        for number, server in enumerate(servers):
            given = server.ports.given(model)
            made.add("router", number, model_name="demo", **given)
        made.wait_ready()
        yield made


def post(url: str, body: dict[str, object]) -> tuple[dict[str, Any], str]:
    """The answer and the request's name."""
    request = urllib.request.Request(  # noqa: S310 - our own address
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310 - our own address
        return json.loads(answer.read()), answer.headers.get("x-request-id", "")


def ask(cluster: Cluster, prompt: str, **more: object) -> tuple[dict[str, Any], str]:
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 12}
    return post(cluster["gateway-0"].http_url, {**body, **more})


def alone(server: VllmServer, prompt: str) -> str:
    """What the server answers without us."""
    body: dict[str, object] = {"model": NAME_THERE, "prompt": prompt}
    answer, _ = post(server.ports.url, {**body, "temperature": 0, "max_tokens": 12})
    return answer["choices"][0]["text"]


def blocks(cluster: Cluster, number: int) -> float:
    return cluster[f"router-{number}"].metrics().get("kvtide_router_blocks", 0.0)


def indexed(cluster: Cluster) -> float:
    """Blocks that the conductor knows of."""
    metrics = cluster["conductor-0"].metrics()
    return metrics.get("kvtide_conductor_indexed_blocks", 0.0)


async def why(cluster: Cluster, request: str) -> Explanation:
    settings = RoleSettings(nats=cluster.nats.url, state_dir=cluster.state_dir)
    return await find_explanation(settings, request)


async def test_a_prefix_goes_to_the_engine_that_has_it(
    cluster: Cluster, servers: list[VllmServer]
) -> None:
    places: set[str] = set()
    for topic in ("harbours", "orchards", "glaciers"):
        prompt = f"A list of {topic}: {WORDS} In short, {topic} are"
        before = [blocks(cluster, number) for number in range(2)]
        known = indexed(cluster)
        first, name = ask(cluster, prompt)
        assert first["choices"][0]["text"] == alone(servers[0], prompt)
        decision = await why(cluster, name)
        placed = decision.candidates[0].decode
        assert decision.candidates[0].hit_tokens == 0
        number = int(placed.removeprefix("router-"))
        wait_for(
            lambda n=number, had=before: blocks(cluster, n) > had[n],
            "the index has the prompt",
        )
        wait_for(lambda had=known: indexed(cluster) > had, "the conductor knows of it")
        second, name = ask(cluster, prompt + " well known, and")
        decision = await why(cluster, name)
        best = decision.candidates[0]
        assert (best.prefill, best.decode) == (placed, placed)
        assert best.hit_tokens >= 2 * BLOCK_TOKENS
        assert "from the pool" in decision.reason
        details = second["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == best.hit_tokens
        places.add(placed)
    assert places


async def test_another_tenants_prefix_is_no_hit(cluster: Cluster) -> None:
    prompt = f"A secret list: {WORDS}"
    ask(cluster, prompt)
    wait_for(lambda: blocks(cluster, 0) + blocks(cluster, 1) > 0, "the index has it")
    answer, _ = ask(cluster, prompt, cache_salt="somebody else")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_wrong_model_or_address_is_said_at_once(
    cluster: Cluster, model: Path, servers: list[VllmServer]
) -> None:
    given = servers[0].ports.given(model)
    wrong = cluster.add("router", 8, **{**given, "engine_model": "other"})
    assert wrong.wait(60) != 0
    assert f"serves {NAME_THERE}" in cluster.tail(wrong)
    gateway = cluster["gateway-0"].http_url
    other = cluster.add("router", 9, **{**given, "url": f"{gateway}/nothing"})
    assert other.wait(60) != 0
    assert "answers 404" in cluster.tail(other)
    for name in ("router-8", "router-9"):
        del cluster.processes[name]


async def test_an_engine_that_dies_is_left_out(
    cluster: Cluster, servers: list[VllmServer]
) -> None:
    """The last test: it leaves one engine."""
    servers[1].kill()
    wait_for(lambda: not cluster["router-1"].ready(), "the router says so")
    assert blocks(cluster, 1) == 0
    for number in range(3):
        answer, _ = ask(cluster, f"Request {number} goes to")
        assert answer["choices"][0]["finish_reason"] == "length"
