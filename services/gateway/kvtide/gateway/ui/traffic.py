"""The links between nodes: what moves now, by purpose, from the nodes' own metrics."""

import asyncio
from dataclasses import dataclass, field

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvtide.bus import Node

SCRAPE_LIMIT_S = 2.0
SCRAPE_EVERY_S = 4.0
STALE_S = 20.0
"""What moved since an older reading is not what moves now."""

SCRAPED_NODES = 64
_BYTES = "kvtide_transfer_bytes_total"


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a second that a node moved for a purpose over a path."""

    node: str
    purpose: str
    path: str
    bytes_per_s: float


class TrafficView(msgspec.Struct, frozen=True, kw_only=True):
    """The links, over the last ``over_s`` seconds; ``left_out`` nodes were not asked.

    ``flows`` are counted where they were asked for; ``served`` is the other end, where a
    process has a part in it: shared memory and RDMA have none.
    """

    flows: list[Flow]
    served: list[Flow]
    over_s: float
    left_out: int
    silent: list[str]


Totals = dict[tuple[str, str, str], float]
"""Bytes by node, purpose and path."""


@dataclass(frozen=True, slots=True)
class _Scrape:
    at_s: float
    left_out: int
    asked: Totals = field(default_factory=Totals)
    served: Totals = field(default_factory=Totals)
    silent: list[str] = field(default_factory=list[str])


class Traffic:
    """Bytes by node, purpose and path, read on demand.

    However many pages look, a node is asked at most once in ``SCRAPE_EVERY_S``.
    """

    def __init__(self, node: Node) -> None:
        """Asks nobody before ``view``."""
        self._node = node
        self._before: _Scrape | None = None
        self._last: _Scrape | None = None
        self._asking = asyncio.Lock()

    async def view(self) -> TrafficView:
        """Rates between the two newest readings; none after the first."""
        async with self._asking:
            now_s = self._node.clock.monotonic()
            last = self._last
            if last is None or now_s - last.at_s >= SCRAPE_EVERY_S:
                old = last is None or now_s - last.at_s > STALE_S
                self._before = None if old else last
                last = self._last = await self._scrape()
            before = self._before or last
        over_s = last.at_s - before.at_s
        return TrafficView(
            flows=_rates(before.asked, last.asked, over_s),
            served=_rates(before.served, last.served, over_s),
            over_s=over_s,
            left_out=last.left_out,
            silent=last.silent,
        )

    async def _scrape(self) -> _Scrape:
        members = [m for m in self._node.roster.live() if m.beat.http]
        asked = members[:SCRAPED_NODES]
        async with httpx.AsyncClient(timeout=SCRAPE_LIMIT_S) as http:
            texts = await asyncio.gather(
                *(_metrics_text(http, m.beat.http) for m in asked)
            )
        at_s = self._node.clock.monotonic()
        found = _Scrape(at_s, len(members) - len(asked))
        for member, text in zip(asked, texts, strict=True):
            if text is None:
                found.silent.append(member.node)
                continue
            for side, totals in (("client", found.asked), ("server", found.served)):
                for (purpose, path), total in bytes_moved(text, side).items():
                    totals[member.node, purpose, path] = total
        return found


def bytes_moved(text: str, side: str = "client") -> dict[tuple[str, str], float]:
    """Bytes that a process moved on one side, by purpose and path. Pure."""
    wanted = [
        line
        for line in text.splitlines()
        if line.startswith(_BYTES) and f'side="{side}"' in line
    ]
    totals: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families("\n".join([*wanted, ""])):
        for sample in family.samples:
            key = (sample.labels["purpose"], sample.labels["path"])
            totals[key] = totals.get(key, 0.0) + sample.value
    return totals


def _rates(before: Totals, last: Totals, over_s: float) -> list[Flow]:
    """The largest first; what is new or began anew is left out once."""
    flows = [
        Flow(node=node, purpose=purpose, path=path, bytes_per_s=moved / over_s)
        for (node, purpose, path), total in last.items()
        if (moved := total - before.get((node, purpose, path), total)) > 0
        and over_s > 0
    ]
    return sorted(flows, key=lambda flow: -flow.bytes_per_s)


async def _metrics_text(http: httpx.AsyncClient, url: str) -> str | None:
    try:
        reply = await http.get(f"{url.rstrip('/')}/metrics")
    except httpx.HTTPError:
        return None
    return reply.text if reply.is_success else None
