"""What a connector does in its own loop, once it is a node of the cluster."""

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry

from kvtide.bus import BlockFollower, BusError, Node, open_node
from kvtide.bus.messages import (
    BlocksDone,
    BlockSelector,
    BlockState,
    NodeState,
    PinBlocks,
    PutBlock,
)
from kvtide.bus.subjects import Hop
from kvtide.connect.index import BlockIndex
from kvtide.connect.settings import ConnectSettings
from kvtide.connect.space import ForeignSpace
from kvtide.kv import BlockKey, Lease, Located, RequestId, Role
from kvtide.pool import PartSink, PoolClient, PoolError, Put, ReadOutcome
from kvtide.runtime import Clock, LimitError

log = structlog.get_logger("kvtide.connect")

PIN_PAGE = 1000


class Session:
    """One stay in the cluster. For the loop that opened it."""

    def __init__(self, node: Node, pool: PoolClient, settings: ConnectSettings) -> None:
        """Made by ``open_session``."""
        self._node = node
        self._pool = pool
        self._settings = settings
        self._numbers = count()

    @property
    def takes_blocks(self) -> bool:
        """Whether a store on this host takes blocks now."""
        return self._pool.ready

    async def read(
        self,
        space: ForeignSpace,
        located: Sequence[Located],
        sinks: Sequence[PartSink],
        timeout_s: float,
    ) -> Sequence[ReadOutcome]:
        """Verified copies into private memory; see ``PoolClient.read_blocks``."""
        return await self._pool.read_blocks(
            located,
            space.tags,
            space.layout,
            sinks,
            timeout_s=timeout_s,
            purpose="connect",
        )

    def lease(self) -> Lease:
        """A lease for one save."""
        name = RequestId(f"save-{self._node.ref.node}-{next(self._numbers)}")
        return Lease(name, 1, self._node.ref)

    async def begin(
        self,
        lease: Lease,
        space: ForeignSpace,
        keys: Sequence[BlockKey],
        timeout_s: float,
    ) -> Put:
        """Slots for these blocks; see ``PoolClient.begin``."""
        tokens = space.layout.block_tokens
        wanted = [PutBlock(key, tokens) for key in keys]
        return await self._pool.begin(
            lease, space.tags, space.layout, wanted, timeout_s=timeout_s
        )

    async def finish(self, put: Put) -> int:
        """Have the store check and publish what was written; how many it took."""
        try:
            states = await put.commit(timeout_s=self._settings.commit_timeout_s)
        except PoolError as error:
            log.info("not_saved", error=str(error))
            return 0
        finally:
            await put.release()
        taken = (BlockState.STORED, BlockState.DUPLICATE)
        return sum(state in taken for state in states)

    async def abandon(self, lease: Lease) -> None:
        """End whatever became of a ``begin`` that nobody waits for any more."""
        await self._pool.release(lease)

    async def pin(self, keys: Sequence[BlockKey], seconds: float) -> int:
        """Ask every store to keep these; how many copies are kept."""
        kept = 0
        for member in self._node.roster.live(Role.STORE):
            subject = self._node.subjects.inbox(Role.STORE, member.node, Hop.QUERY)
            for start in range(0, len(keys), PIN_PAGE):
                page = BlockSelector(keys=tuple(keys[start : start + PIN_PAGE]))
                question = PinBlocks(select=page, seconds=seconds, limit=PIN_PAGE)
                try:
                    answer = await self._node.bus.request(
                        subject, question, timeout_s=self._settings.pin_timeout_s
                    )
                except (BusError, LimitError) as error:
                    log.info("not_pinned", store=member.node, error=str(error))
                    break
                if isinstance(answer, BlocksDone):
                    kept += answer.matched - answer.refused
        return kept


@asynccontextmanager
async def open_session(
    settings: ConnectSettings, state_dir: Path, index: BlockIndex, clock: Clock
) -> AsyncGenerator[Session]:
    """Join the cluster with no role, so that nobody gives this node any work.

    Waits for the NATS server for as long as it takes. ``state_dir`` is this process's
    own: an engine's node has a new name in each life.

    Raises:
        ConfigError: the secret, the node's name or the transfer port can't be used.
    """
    own = settings.model_copy(
        update={
            "node": settings.node or f"engine-{secrets.token_hex(4)}",
            "secret_file": settings.secret_path(),
            "state_dir": state_dir,
        }
    )
    registry = CollectorRegistry()
    async with open_node(own, (), clock=clock, registry=registry) as node:
        node.set_state(NodeState.READY)
        async with PoolClient(node, registry=registry) as pool:
            follower = BlockFollower(node, index)
            await follower.start()
            node.tasks.spawn(_prefer(pool, index, clock), name="nearest store")
            try:
                yield Session(node, pool, settings)
            finally:
                await follower.close()


async def _prefer(pool: PoolClient, index: BlockIndex, clock: Clock) -> None:
    while True:
        index.prefer(None if pool.store is None else pool.store.node)
        await clock.sleep(0.5)
