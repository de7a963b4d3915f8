"""vLLM as a kvtide worker behind a gateway, for tests."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.cluster import Cluster, RoleProcess
from tests.vllm.vllm_engine import PYTHON, vllm_environment

from kvtide.cli.explanations import Explanation, find_explanation
from kvtide.runtime.settings import RoleSettings

START_LIMIT_S = 900.0
OPTIONS = {"max_model_len": 4096, "enforce_eager": True, "max_num_seqs": 4}
COMPLETIONS = "/v1/completions"
NEW_TOKENS = 24
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


def start_worker(
    cluster: Cluster, number: int, model: Path, roles: str, **more: object
) -> None:
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
            **more,
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


def asked(
    cluster: Cluster, body: Mapping[str, object], route: str = COMPLETIONS
) -> urllib.request.Request:
    """A completion of the one model that the gateway serves."""
    gateway = cluster["gateway-0"]
    model = Path(str(gateway.settings["model"])).name
    return urllib.request.Request(  # noqa: S310 - our own address
        f"{gateway.http_url}{route}",
        json.dumps({"model": model, **body}).encode(),
        {"content-type": "application/json"},
    )


def post(
    cluster: Cluster, body: Mapping[str, object], route: str = COMPLETIONS
) -> dict[str, Any]:
    """A completion; an error's body where it is refused."""
    request = asked(cluster, body, route)
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310 - as above
            name = answer.headers.get("x-request-id", "")
            return {"request": name, **json.loads(answer.read())}
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.loads(error.read())}


@contextmanager
def streaming(
    cluster: Cluster, body: Mapping[str, object]
) -> Generator[tuple[str, Iterator[list[int]]]]:
    """A completion's name in the cluster, and its tokens as they come."""
    wanted = {**body, "stream": True, "return_token_ids": True}
    with urllib.request.urlopen(asked(cluster, wanted), timeout=600) as answer:  # noqa: S310 - as above
        yield answer.headers["x-request-id"], _pieces(answer)


def _pieces(answer: Iterable[bytes]) -> Iterator[list[int]]:
    for line in answer:
        if line.startswith(b"data: {"):
            chunk = json.loads(line.removeprefix(b"data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                if choice.get("token_ids"):
                    yield choice["token_ids"]


def ask(cluster: Cluster, prompt: Sequence[int] | str, **more: object) -> Served:
    body = {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
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


async def counted_on(
    cluster: Cluster,
    prompt: Sequence[int] | str,
    decode: str,
    least_tokens: int,
    right: Callable[[list[int]], bool],
    **more: object,
) -> None:
    """The conductor knows what vLLM has saved, and vLLM reuses it.

    Asked again, since a busy machine may have dropped a save. Who computes the little that
    is left is the conductor's choice.
    """
    seen: list[tuple[int, int]] = []
    while len(seen) < ASKS:
        again = ask(cluster, prompt, **more)
        assert right(again.ids)
        best = (await why(cluster, again.request)).candidates[0]
        assert best.decode == decode
        seen.append((again.cached, best.hit_tokens))
        if min(seen[-1]) >= least_tokens:
            return
    raise AssertionError(f"tokens reused, and counted on: {seen}")


def runs(cluster: Cluster, name: str) -> bool:
    """Whether a request is there, or may be: a busy process answers late."""
    try:
        now = cluster[name].metrics()
    except OSError:
        return True
    loads = ("running", "waiting")
    return any(now[f'kvtide_decode_load{{what="{one}"}}'] for one in loads)
