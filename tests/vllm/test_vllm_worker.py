"""vLLM as a kvtide worker behind gateway and conductor: in one process, and in two."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
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

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not PYTHON, reason="make test-vllm names vLLM's Python"),
]

START_LIMIT_S = 480.0
OPTIONS = {"max_model_len": 4096, "enforce_eager": True, "max_num_seqs": 4}
LENGTHS = (20, 128, 300, 700)
NEW_TOKENS = 24


class VllmWorker(RoleProcess):
    """A worker in vLLM's own environment."""

    @property
    def command(self) -> list[str]:
        flags = [f"--{key.replace('_', '-')}={v}" for key, v in self.settings.items()]
        return ["nice", "-n", "5", PYTHON, "-m", "kvtide.cli", "worker", *flags]


@dataclass(frozen=True)
class Served:
    """One answer of the gateway."""

    ids: list[int]
    finish: str
    cached: int


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
        with urllib.request.urlopen(asked, timeout=240) as answer:  # noqa: S310 - as above
            return json.loads(answer.read())
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
    return Served(choice["token_ids"], choice["finish_reason"], cached)


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


def test_vllm_is_a_worker_of_both_roles(
    tmp_path: Path, model: Path, oracle: Oracle, prompts: list[list[int]]
) -> None:
    with serving(tmp_path, model, ["prefill,decode"]) as cluster:
        judge(cluster, oracle, prompts)
        again = ask(cluster, prompts[-1])
        assert oracle.check(prompts[-1], again.ids).right
        assert again.cached >= 512
        drawn = ask(cluster, prompts[0], temperature=0.8, seed=7, logprobs=2)
        assert drawn.ids == ask(cluster, prompts[0], temperature=0.8, seed=7).ids
        refused = post(
            cluster,
            {
                "prompt": prompts[0],
                "structured_outputs": {"grammar": 'start: "yes" | "no"'},
            },
        )
        assert refused["status"] == 400
        assert refused["error"]["code"] == "unsupported_option"
        assert "JSON schema" in refused["error"]["message"]
        hang_up(cluster, prompts[1])
        nothing_runs(cluster, "vllm-0")


def test_one_vllm_prefills_for_another(
    tmp_path: Path, model: Path, oracle: Oracle, prompts: list[list[int]]
) -> None:
    with serving(tmp_path, model, ["prefill", "decode"]) as cluster:
        judge(cluster, oracle, prompts)
        made = cluster["vllm-0"].metrics()
        assert made['kvtide_prefill_ended_total{outcome="done"}'] == len(prompts)
        nothing_runs(cluster, "vllm-1")


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
    with urllib.request.urlopen(asked, timeout=240) as answer:  # noqa: S310 - as above
        assert answer.readline()


def nothing_runs(cluster: Cluster, name: str) -> None:
    def idle() -> bool:
        now = cluster[name].metrics()
        loads = ("running", "waiting")
        return not any(now[f'kvtide_decode_load{{what="{one}"}}'] for one in loads)

    wait_for(idle, "nothing runs at vLLM any more", 60.0)
