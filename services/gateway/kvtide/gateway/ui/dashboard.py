"""The dashboard's parts, put together for one gateway."""

from pathlib import Path

from fastapi import APIRouter

from kvtide.catalog import Catalog
from kvtide.gateway.shell import Gateway
from kvtide.gateway.ui.answers import Answers
from kvtide.gateway.ui.plan_routes import plan_routes
from kvtide.gateway.ui.planner import Planner
from kvtide.gateway.ui.routes import asked_routes, live_routes, page_routes
from kvtide.gateway.ui.traffic import Traffic
from kvtide.gateway.ui.watch import Watch


class Dashboard:
    """Watches from ``start`` on; its routes may be asked at any time."""

    def __init__(
        self,
        gateway: Gateway,
        catalog: Catalog,
        *,
        workload_log: Path | None,
    ) -> None:
        """Both are the owner's. Plans are made of ``workload_log``, if it is kept."""
        self._gateway = gateway
        self.watch = Watch(gateway.node)
        self._answers = Answers(gateway.node, catalog)
        self._traffic = Traffic(gateway.node)
        self._planner = Planner(
            workload_log, gateway.node.clock, lambda: gateway.draining
        )

    async def start(self) -> None:
        """Begin to watch, until the node ends."""
        await self.watch.start()
        self._gateway.observe(self.watch)

    def routes(self) -> tuple[APIRouter, ...]:
        """For the application."""
        clock = self._gateway.node.clock
        return (
            page_routes(),
            live_routes(self.watch, self._answers, self._gateway),
            asked_routes(self.watch, self._answers, self._traffic, clock),
            plan_routes(self._planner),
        )
