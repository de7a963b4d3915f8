"""Blocks on an SSD: their store is asked to bring them into its DRAM for a while."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count

import structlog

from kvtide.bus import BusError, Gone, Node, Restarted, RosterEvent
from kvtide.bus.messages import BlocksStaged, LeaseRelease, StageBlocks
from kvtide.bus.subjects import Hop
from kvtide.kv import Lease, Located, NodeRef, RequestId, Role, Tier
from kvtide.pool.ledger import Ledger
from kvtide.pool.limits import PoolLimits
from kvtide.runtime import LimitError, TaskScope

log = structlog.get_logger("kvtide.pool")

ANSWER_SHARE = 0.8
"""Of the time that is left for a wait, so that the answer is here before it is over."""


class Stager:
    """Asks stores for blocks of theirs; what they stage is held until it was read."""

    def __init__(
        self, node: Node, ledger: Ledger, tasks: TaskScope, limits: PoolLimits
    ) -> None:
        """Nothing is asked for yet. ``tasks`` outlives every read."""
        self._node = node
        self._ledger = ledger
        self._tasks = tasks
        self._limits = limits
        self._numbers = count()
        self._asking: dict[NodeRef, set[asyncio.Timeout]] = {}
        node.on_member(self._member)

    @asynccontextmanager
    async def staged(
        self, located: Sequence[Located], *, timeout_s: float
    ) -> AsyncGenerator[Sequence[Located | None]]:
        """Where each copy can be read inside the context; None: it can't be had.

        A copy in DRAM is where it was. Never raises for a store.
        """
        by_store: dict[NodeRef, list[int]] = {}
        for i, each in enumerate(located):
            if each.slot.tier is Tier.SSD:
                by_store.setdefault(each.slot.owner, []).append(i)
        if not by_store:
            yield located
            return
        there: list[Located | None] = list(located)
        name = RequestId(f"stage-{self._node.ref.node}-{next(self._numbers)}")
        lease = Lease(name, 1, self._node.ref)
        timeout_s = min(timeout_s, self._limits.stage_timeout_s)
        self._ledger.open(lease)
        try:
            for store, places in by_store.items():
                wanted = [located[i] for i in places]
                answers = await self._ask(store, lease, wanted, timeout_s)
                for i, answer in zip(places, answers, strict=True):
                    there[i] = answer
            yield there
        finally:
            self._ledger.close(lease)
            await self._end(by_store, lease)

    async def _end(self, stores: Iterable[NodeRef], lease: Lease) -> None:
        """Let go, also when cancelled; what is asked for next finds the room free."""
        with suppress(RuntimeError):  # the client is closed: its leases end too
            ends = [
                self._tasks.spawn(self._release(store, lease), name="stage end")
                for store in stores
            ]
            await asyncio.wait(ends)

    async def _ask(
        self, store: NodeRef, lease: Lease, wanted: Sequence[Located], timeout_s: float
    ) -> Sequence[Located | None]:
        none = [None] * len(wanted)
        if not self._node.roster.is_live(store):
            return none
        subject = self._node.subjects.inbox(Role.STORE, store.node, Hop.POOL)
        message = StageBlocks(
            lease=lease,
            keys=tuple(each.key for each in wanted),
            wait_ms=timeout_s * ANSWER_SHARE * 1e3,
        )
        try:
            async with asyncio.timeout(timeout_s) as limit:
                asking = self._asking.setdefault(store, set())
                asking.add(limit)
                try:
                    reply = await self._node.bus.request(
                        subject, message, timeout_s=timeout_s
                    )
                finally:
                    asking.discard(limit)
                    if not asking:
                        self._asking.pop(store, None)
        except (BusError, LimitError, TimeoutError) as error:
            log.debug("not_staged", store=store.node, error=str(error))
            return none
        if not isinstance(reply, BlocksStaged) or len(reply.located) != len(wanted):
            log.debug("not_staged", store=store.node, answer=type(reply).__name__)
            return none
        return [
            got if got is not None and _fits(got, each) else None
            for got, each in zip(reply.located, wanted, strict=True)
        ]

    def _member(self, event: RosterEvent) -> None:
        """The dead answer nobody: who waits for one goes on at once."""
        match event:
            case Gone(member) | Restarted(member, _):
                for limit in self._asking.get(member.ref, ()):
                    limit.reschedule(0.0)
            case _:
                pass

    async def _release(self, store: NodeRef, lease: Lease) -> None:
        subject = self._node.subjects.inbox(Role.STORE, store.node, Hop.POOL)
        # else the list of leases says it, or the store's patience ends
        with suppress(BusError, LimitError):
            await self._node.bus.publish(subject, LeaseRelease(lease=lease))


def _fits(got: Located, asked: Located) -> bool:
    """Whether an answer is a copy in DRAM of what was asked for."""
    return (
        got.key == asked.key
        and got.slot.owner == asked.slot.owner
        and got.slot.tier is Tier.DRAM
    )
