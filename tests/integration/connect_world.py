"""What a foreign engine would be, on a real NATS server and a real store process."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from tests.integration.cluster import Cluster, wait_for

from kvtide.connect import (
    BlockShape,
    ConnectSettings,
    EngineClient,
    EngineSpace,
    ForeignSpace,
)

SHAPE = BlockShape(pieces=4, piece_bytes=8192)
ENGINE = EngineSpace("test 1", "d1", "bytes")


def names(count: int, first: int = 0) -> list[bytes]:
    return [f"block {first + i}".encode() for i in range(count)]


def content(name: bytes) -> bytes:
    """What the engine computed for a block."""
    return b"".join(
        blake2b(name + i.to_bytes(4, "little")).digest()
        for i in range(SHAPE.nbytes // 64)
    )


@dataclass
class Engine:
    """A client and the memory of an engine."""

    client: EngineClient
    space: ForeignSpace

    def save(self, chain: Sequence[bytes], limit_s: float = 5.0) -> int:
        blocks = [SHAPE.cut(memoryview(content(name))) for name in chain]
        return self.client.save(
            self.space, self.space.keys(chain), blocks.__getitem__, limit_s=limit_s
        )

    def load(self, chain: Sequence[bytes], limit_s: float = 5.0) -> list[bytes | None]:
        had: list[bytes | None] = [None] * len(chain)

        def deliver(i: int, pieces: Sequence[memoryview]) -> None:
            had[i] = b"".join(map(bytes, pieces))

        outcomes = self.client.load(
            self.space, self.space.keys(chain), deliver, limit_s=limit_s
        )
        assert outcomes == tuple(each is not None for each in had)
        return had

    def hits(self, chain: Sequence[bytes]) -> int:
        return self.client.exists(self.space.keys(chain))

    def known(self, chain: Sequence[bytes]) -> int:
        """Hits, whether or not loads rest."""
        index = self.client._index  # pyright: ignore[reportPrivateUsage]
        return index.prefix(self.space.keys(chain))

    def sees(self, chain: Sequence[bytes]) -> None:
        """Wait until the gossip came."""
        wait_for(lambda: self.hits(chain) == len(chain), "the blocks are known")


def settings(cluster: Cluster, **values: object) -> ConnectSettings:
    given: dict[str, object] = {
        "nats": cluster.nats.url,
        "state_dir": cluster.state_dir,
        "shm_dir": cluster.shm_dir(),
        "rest_s": 0.2,
        "rest_limit_s": 0.4,
        **values,
    }
    return ConnectSettings.model_validate(given)


def engine(cluster: Cluster, **values: object) -> Engine:
    """An engine that is not joined yet; its client must be closed."""
    client = EngineClient(settings(cluster, **values))
    return Engine(client, client.space(ENGINE, SHAPE))


def joined(cluster: Cluster, **values: object) -> Engine:
    """An engine that has found the store on its host."""
    made = engine(cluster, **values)
    wait_for(lambda: made.client.takes_blocks, "the engine found its store")
    return made
