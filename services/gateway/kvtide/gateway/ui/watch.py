"""Feeds the pictures: from the bus, from this gateway's own requests, from the clock."""

import msgspec
import structlog

from kvtide.bus import Incoming, Node, RosterEvent
from kvtide.bus.messages import PlacementMade, RequestEnded
from kvtide.gateway.life import Event, RequestSpec
from kvtide.gateway.observing import Observer
from kvtide.gateway.ui.chains import Chains
from kvtide.gateway.ui.journal import Journal
from kvtide.gateway.ui.picture import ClusterChange, Picture
from kvtide.gateway.ui.series import Point, Series
from kvtide.kv import KeySpace, NodeId, RequestId

STEP_S = 1.0

log = structlog.get_logger("kvtide.gateway.ui")


class News(msgspec.Struct, frozen=True, kw_only=True):
    """What a page gets each second."""

    cluster: ClusterChange
    points: list[Point]


class Watch(Observer):
    """All that the pages show. Lives in the gateway's loop; costs little unwatched."""

    def __init__(self, node: Node) -> None:
        """Hears nothing before ``start``."""
        self._node = node
        self.journal = Journal()
        self.chains = Chains()
        self.picture = Picture()
        self.series = Series()

    async def start(self) -> None:
        """Listen, until the node ends."""
        node = self._node
        for subject, handler in (
            (node.subjects.all_placements(), self._on_placement),
            (node.subjects.all_ended(), self._on_ended),
        ):
            await node.bus.subscribe(subject, handler, on_lost=self._on_lost)
        node.on_member(self._on_member)
        node.tasks.spawn(self._step(), name="dashboard steps")

    # ---- this gateway's own requests

    def arrived(self, spec: RequestSpec, space: KeySpace) -> None:
        """See ``Observer``."""
        clock, block_tokens = self._node.clock, space.layout.block_tokens
        self.journal.arrived(spec, block_tokens, clock.monotonic(), clock.wall())

    def told(self, request: RequestId, event: Event) -> None:
        """See ``Observer``."""
        self.journal.told(request, event, self._node.clock.monotonic(), self._hosts)

    # ---- the pages

    def news(self, version: int, at_s: float) -> News:
        """What changed since a page was last told."""
        return News(cluster=self.picture.since(version), points=self.series.since(at_s))

    # ---- inside

    def _hosts(self, node: NodeId) -> str:
        member = self._node.roster.get(node)
        return "" if member is None else member.beat.host

    async def _on_placement(self, incoming: Incoming) -> None:
        made = incoming.message
        if isinstance(made, PlacementMade):
            clock = self._node.clock
            self.journal.placed(made, clock.monotonic(), clock.wall())
            if made.keys:
                self.chains.reused(made.tenant, made.keys, clock.monotonic())

    async def _on_ended(self, incoming: Incoming) -> None:
        record = incoming.message
        if not isinstance(record, RequestEnded):
            return
        clock = self._node.clock
        if not self.journal.ended(record, clock.monotonic(), clock.wall()):
            return
        detail = self.journal.detail(record.request)
        view = None if detail is None else detail.view
        self.series.ended(
            record,
            predicted_ttft_ms=view and view.predicted_ttft_ms,
            ttft_target_ms=view and view.ttft_target_ms,
            tbt_target_ms=view and view.tbt_target_ms,
        )

    def _on_member(self, event: RosterEvent) -> None:
        self.picture.heard(event, self._node.clock.wall())

    def _on_lost(self, count: int) -> None:
        log.warning("messages for the dashboard lost", count=count)

    async def _step(self) -> None:
        """A point each second."""
        while True:
            await self._node.clock.sleep(STEP_S)
            self.series.close_step(self._node.clock.wall(), self.picture.open_requests)
