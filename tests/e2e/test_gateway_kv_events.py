# pyright: reportUnknownMemberType=false
"""A router of others hears from a real gateway what a real pool holds, in vLLM's format."""

import subprocess
import sys
from collections.abc import Collection, Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.chaos.model import chaos_model
from tests.e2e.system import Client, wait_for
from tests.integration.cluster import Cluster
from tests.unit.test_connect_pool_events import THEIRS, TheirRemoved, TheirStored
from tests.vllm.vllm_workers import free_port

pytestmark = pytest.mark.timeout(300)

TOKENS = 24
PROMPT = [500 + 7 * at for at in range(200)]
END_NUMBER = -1
LIMIT_MS = 30_000


@dataclass
class Router:
    """What a subscriber knows: each block's tokens from the prompt's start, by hash."""

    socket: Any
    numbers: list[int] = field(default_factory=list[int])
    payloads: list[bytes] = field(default_factory=list[bytes])
    known: dict[bytes | int, list[int]] = field(
        default_factory=dict[bytes | int, list[int]]
    )
    extra: dict[bytes | int, Any] = field(default_factory=dict[bytes | int, Any])

    def hear(self) -> None:
        """Take all that has come."""
        while self.socket.poll(200):
            topic, number, payload = self.socket.recv_multipart()
            assert topic == b"pool"
            self.numbers.append(int.from_bytes(number, "big", signed=True))
            self.payloads.append(payload)
            for event in THEIRS.decode(payload).events:
                self._take(event)

    def _take(self, event: object) -> None:
        match event:
            case TheirStored():
                start = event.parent_block_hash
                before = [] if start is None else self.known[start]
                size = event.block_size
                extras = event.extra_keys or [None] * len(event.block_hashes)
                for at, (name, extra) in enumerate(
                    zip(event.block_hashes, extras, strict=True)
                ):
                    before = [*before, *event.token_ids[at * size : (at + 1) * size]]
                    self.known[name] = before
                    self.extra[name] = extra
            case TheirRemoved():
                for name in event.block_hashes:
                    del self.known[name]
            case _:
                raise AssertionError(event)

    def has(
        self,
        tokens: Sequence[int],
        count: int,
        but: Collection[bytes | int] = (),
    ) -> bool:
        """Whether it has a chain of so many of these tokens, by another name."""
        self.hear()
        wanted = list(tokens[:count])
        return any(
            chain == wanted for name, chain in self.known.items() if name not in but
        )


@contextmanager
def subscribed(address: str) -> Generator[Router]:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(address)
        yield Router(socket)


def repeated(address: str, start: int) -> list[tuple[int, bytes]]:
    """As vLLM's own example of a subscriber asks for what it has missed."""
    found: list[tuple[int, bytes]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, LIMIT_MS)
        socket.connect(address)
        socket.send_multipart((b"", start.to_bytes(8, "big")))
        while True:
            _, _, number, payload = socket.recv_multipart()
            told = int.from_bytes(number, "big", signed=True)
            if told == END_NUMBER:
                return found
            found.append((told, payload))


def removed(cluster: Cluster) -> None:
    command = (
        *(sys.executable, "-m", "kvtide.cli", "blocks", "remove", "--yes"),
        *("--tenant", "default", "--nats", cluster.nats.url),
        *("--state-dir", str(cluster.state_dir)),
    )
    gone = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False
    )
    assert gone.returncode == 0, gone.stderr


def test_a_router_hears_what_the_pool_has(tmp_path: Path) -> None:
    model = str(chaos_model(tmp_path / "model"))
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    worker = {"model": model, "threads": 1}
    told = {"kv_events": events, "kv_events_replay": replay, "kv_events_topic": "pool"}
    settings = {
        "prefill": worker,
        "decode": worker,
        "gateway": {"model": model, **told},
    }
    with (
        Cluster(tmp_path / "c", conductors=1, gateways=1, settings=settings) as cluster,
        subscribed(events) as router,
    ):
        cluster.wait_ready()
        with closing(Client(cluster["gateway-0"].http_url)) as client:
            answer = client.complete(PROMPT, TOKENS, ignore_eos=True)
            whole = [*PROMPT, *answer.ids]
            wait_for(lambda: router.has(whole, 192), 60, "the prompt's blocks are told")
            # vLLM and its routers know no salt where a client has sent none
            assert set(router.extra.values()) == {None}
            plain = set(router.known)
            client.complete(PROMPT, TOKENS, ignore_eos=True, cache_salt="mine")
            wait_for(
                lambda: router.has(whole, 192, but=plain), 60, "salted ones are told"
            )
            # as vLLM has it: of a chain the first block says the salt
            salts = [extra for extra in router.extra.values() if extra]
            assert salts == [("default/mine",)]
            removed(cluster)
            wait_for(lambda: router.hear() or not router.known, 60, "all are gone")
        found = repeated(replay, router.numbers[0])
        assert found == list(zip(router.numbers, router.payloads, strict=True))
        assert router.numbers == list(range(router.numbers[0], router.numbers[-1] + 1))
        assert repeated(replay, router.numbers[-1] + 1) == []
