"""vLLM as a kvtide worker behind gateway and conductor: in one process, and in two."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.oracle.reference import Oracle
from tests.integration.cluster import Cluster, RoleProcess, wait_for
from tests.vllm.vllm_engine import PYTHON, vllm_environment
from tokenizers import Tokenizer

from kvtide.cli.explanations import Explanation, find_explanation
from kvtide.runtime.settings import RoleSettings

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON, reason="make test-vllm names vLLM's Python"),
]

START_LIMIT_S = 900.0
OPTIONS = {"max_model_len": 4096, "enforce_eager": True, "max_num_seqs": 4}
LENGTHS = (20, 128, 300, 700)
NEW_TOKENS = 24
LONG_TOKENS = 60
REUSED_TOKENS = 512
ASKS = 8


class VllmWorker(RoleProcess):
    """A worker in vLLM's own environment."""

    @property
    def command(self) -> list[str]:
        flags = [f"--{key.replace('_', '-')}={v}" for key, v in self.settings.items()]
        return ["nice", "-n", "5", PYTHON, "-m", "kvtide.cli", "worker", *flags]


@dataclass(frozen=True)
class Served:
    """One answer of the gateway. ``request`` is its name in the cluster."""

    ids: list[int]
    finish: str
    cached: int
    request: str


@contextmanager
def serving(folder: Path, model: Path, roles: Sequence[str]) -> Generator[Cluster]:
    """Gateway, conductor, store, and a vLLM worker for each of ``roles``."""
    settings: dict[str, Mapping[str, object]] = {
        "store": {"dram_bytes": 1 << 30, "slab_bytes": 64 << 20},
        "gateway": {"model": str(model)},
    }
    cluster = Cluster(
        folder, conductors=1, gateways=1, prefill=0, decode=0, settings=settings
    )
    with cluster:
        for number, names in enumerate(roles):
            start_worker(cluster, number, model, names)
        cluster.wait_ready(START_LIMIT_S)
        yield cluster
        for process in cluster.processes.values():
            assert process.alive, cluster.tail(process)


def start_worker(cluster: Cluster, number: int, model: Path, roles: str) -> None:
    store = cluster["store-0"].settings
    name = f"vllm-{number}"
    port = free_port()
    worker = VllmWorker(
        name,
        "worker",
        {
            "engine": "vllm",
            "roles": roles,
            "nats": store["nats"],
            "node": name,
            "state_dir": store["state_dir"],
            "shm_dir": store["shm_dir"],
            "log_format": "json",
            "http_port": port,
            "model": str(model),
            "threads": 2,
            "handover_wait_s": 20.0,
            "load_timeout_s": 20.0,
            "save_timeout_s": 10.0,
            "vllm_options": json.dumps(OPTIONS),
        },
        cluster.folder / f"{name}.log",
        f"http://127.0.0.1:{port}",
    )
    worker.start(vllm_environment())
    cluster.processes[name] = worker


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def post(cluster: Cluster, body: Mapping[str, object]) -> dict[str, Any]:
    """A completion; an error's body where it is refused."""
    gateway = cluster["gateway-0"]
    asked = urllib.request.Request(  # noqa: S310 - our own address
        f"{gateway.http_url}/v1/completions",
        json.dumps({"model": "smollm2-135m-instruct", **body}).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(asked, timeout=600) as answer:  # noqa: S310 - as above
            name = answer.headers.get("x-request-id", "")
            return {"request": name, **json.loads(answer.read())}
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.loads(error.read())}


def ask(cluster: Cluster, prompt: Sequence[int], **more: object) -> Served:
    body = {
        "prompt": list(prompt),
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
        **more,
    }
    answer = post(cluster, body)
    assert "choices" in answer, answer
    choice: dict[str, Any] = answer["choices"][0]
    details: dict[str, int] = answer["usage"].get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens", 0)
    return Served(
        choice["token_ids"], choice["finish_reason"], cached, answer["request"]
    )


async def why(cluster: Cluster, request: str) -> Explanation:
    """What the conductor said of a request."""
    settings = RoleSettings(nats=cluster.nats.url, state_dir=cluster.state_dir)
    return await find_explanation(settings, request)


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
        await counted_on(cluster, oracle, prompts[-1], "vllm-0")
        drawn = ask(cluster, prompts[0], temperature=0.8, seed=7, logprobs=2)
        assert drawn.ids == ask(cluster, prompts[0], temperature=0.8, seed=7).ids
        refusals(cluster, prompts[0])
        hang_up(cluster, prompts[1])
        nothing_runs(cluster, "vllm-0")


async def counted_on(
    cluster: Cluster, oracle: Oracle, prompt: list[int], decode: str
) -> None:
    """The conductor knows what vLLM has saved, and vLLM reuses it.

    Asked again, since a busy machine may have dropped a save. Who computes the little that
    is left is the conductor's choice.
    """
    seen: list[tuple[int, int]] = []
    while len(seen) < ASKS:
        again = ask(cluster, prompt)
        assert oracle.check(prompt, again.ids).right
        best = (await why(cluster, again.request)).candidates[0]
        assert best.decode == decode
        seen.append((again.cached, best.hit_tokens))
        if min(seen[-1]) >= REUSED_TOKENS:
            return
    raise AssertionError(f"tokens reused, and counted on: {seen}")


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
        await counted_on(cluster, oracle, prompts[-1], "vllm-1")
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
    asked = urllib.request.Request(  # noqa: S310 - our own address
        f"{cluster['gateway-0'].http_url}/v1/completions",
        json.dumps(
            {
                "model": "smollm2-135m-instruct",
                "prompt": list(prompt),
                "max_tokens": 3000,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=600) as answer:  # noqa: S310 - as above
        assert answer.readline()


def runs(cluster: Cluster, name: str) -> bool:
    """Whether a request is there, or may be: a busy process answers late."""
    try:
        now = cluster[name].metrics()
    except OSError:
        return True
    loads = ("running", "waiting")
    return any(now[f'kvtide_decode_load{{what="{one}"}}'] for one in loads)


def nothing_runs(cluster: Cluster, name: str) -> None:
    wait_for(lambda: not runs(cluster, name), "nothing runs at vLLM any more", 60.0)
