"""The store on this host: found through the roster, its arenas mapped for writing."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from kvtide.bus import BusError, Gone, Member, Node, Restarted, RosterEvent
from kvtide.bus.messages import ArenaGrant, ArenaRequest
from kvtide.bus.subjects import Hop
from kvtide.kv import NodeRef, Role
from kvtide.pool.limits import PoolLimits
from kvtide.runtime import LimitError, TaskScope
from kvtide.transfer import TransferError

log = structlog.get_logger("kvtide.pool")


@dataclass(frozen=True, slots=True)
class LocalStore:
    """One life of the store on this host, with its arenas as writable memory."""

    ref: NodeRef
    arenas: tuple[memoryview, ...] = field(repr=False)


class StoreLink:
    """Keeps ``local`` up to date: a store that lives, or None.

    ``on_lost`` is called in the loop when a store's life ends that was linked.
    """

    def __init__(
        self, node: Node, limits: PoolLimits, on_lost: Callable[[NodeRef], None]
    ) -> None:
        """Nothing is linked before ``start``."""
        self.local: LocalStore | None = None
        self._node = node
        self._limits = limits
        self._on_lost = on_lost
        self._changed = asyncio.Event()
        self._said = ""

    def start(self, tasks: TaskScope) -> None:
        """Follow the roster in a task of ``tasks``."""
        self._node.on_member(self._heard)
        tasks.spawn(self._follow(), name="pool link")

    def drop(self, reason: str) -> None:
        """Forget the store; it is linked anew if it lives."""
        local, self.local = self.local, None
        self._changed.set()
        if local is not None:
            log.info("pool_lost", store=local.ref.node, reason=reason)
            self._on_lost(local.ref)

    def _heard(self, event: RosterEvent) -> None:
        local = self.local
        ended: NodeRef | None = None
        if isinstance(event, Gone):
            ended = event.member.ref
        elif isinstance(event, Restarted):
            ended = event.before.ref
        if local is not None and ended == local.ref:
            self.drop("its life has ended")
        self._changed.set()

    def _candidate(self) -> Member | None:
        host = self._node.host
        if not host:
            return None
        for member in self._node.roster.live(Role.STORE):
            beat = member.beat
            if beat.host == host and beat.arenas and beat.transfer is not None:
                return member
        return None

    async def _follow(self) -> None:
        while True:
            self._changed.clear()
            if self.local is None:
                member = self._candidate()
                if member is not None and not await self._link(member):
                    await self._node.clock.sleep(self._limits.arena_retry_s)
                    continue
            await self._changed.wait()

    async def _link(self, member: Member) -> bool:
        """Ask for the arenas and map them; false: try again."""
        try:
            arenas = await self._map(member)
        except (BusError, LimitError, TransferError, TimeoutError) as error:
            if str(error) != self._said:
                self._said = str(error)
                log.warning("pool_not_linked", store=member.node, reason=self._said)
            return False
        if not arenas or not self._node.roster.is_live(member.ref):
            return False
        self._said = ""
        self.local = LocalStore(member.ref, arenas)
        log.info("pool_linked", store=member.node, epoch=member.ref.epoch)
        return True

    async def _map(self, member: Member) -> tuple[memoryview, ...]:
        node = self._node
        address = member.beat.transfer
        if address is None:
            return ()
        subject = node.subjects.inbox(Role.STORE, member.node, Hop.QUERY)
        asked = ArenaRequest(worker=node.ref, host=node.host)
        timeout_s = self._limits.arena_timeout_s
        reply = await node.bus.request(subject, asked, timeout_s=timeout_s)
        if not isinstance(reply, ArenaGrant) or reply.store != member.ref:
            log.debug("arena_refused", store=member.node, answer=repr(reply))
            return ()
        peer = await node.endpoint.connect(address, timeout_s=timeout_s)
        return tuple([await peer.map_async(handle) for handle in reply.arenas])
