"""What the pages ask for that is not in this process: conductors, the catalog, traffic."""

import asyncio
from dataclasses import dataclass

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvtide.bus import BusError, Hop, Node
from kvtide.bus.messages import (
    ActualTimes,
    CandidateEstimate,
    Explained,
    ExplainQuery,
)
from kvtide.catalog import (
    BlockCount,
    BlockQuery,
    BlockRow,
    Catalog,
    CatalogError,
    DecisionRow,
    HitQuery,
    HitRate,
    RemovalCount,
    RequestRow,
    TenantHits,
    Verdict,
)
from kvtide.gateway.ui.chains import ChainView
from kvtide.kv import BlockKey, NodeId, RequestId, Role

ASK_LIMIT_S = 1.0
CATALOG_LIMIT_S = 5.0
SCRAPE_LIMIT_S = 2.0
SCRAPE_EVERY_S = 4.0
SCRAPED_NODES = 64
SHOWN_COPIES = 40
_BYTES = "kvtide_transfer_bytes_total"


class Unknown(Exception):  # noqa: N818 - an answer, not a fault
    """Why there is no answer, in a sentence."""


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of a block: where it lies, its bytes and how often it was hit."""

    node: str
    tier: str
    bytes: int
    hits: int


class CacheView(msgspec.Struct, frozen=True, kw_only=True):
    """The cache page. ``copies`` are those of the last block of each chain.

    ``missing`` says why parts of it are empty; "" if nothing is missing.
    """

    chains: list[ChainView]
    copies: list[list[Copy]]
    hit_rates: tuple[HitRate, ...]
    tenants: tuple[TenantHits, ...]
    block_counts: tuple[BlockCount, ...]
    removals: tuple[RemovalCount, ...]
    missing: str


class TargetsView(msgspec.Struct, frozen=True, kw_only=True):
    """Recent decisions: counts by verdict or code, and (predicted, actual) pairs in ms."""

    decisions: dict[str, int]
    reasons: dict[str, int]
    ttft_pairs: list[tuple[float, float]]
    tbt_pairs: list[tuple[float, float]]
    missing: str


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a second that a node moved for a purpose over a path, as its client."""

    node: str
    purpose: str
    path: str
    bytes_per_s: float


class TrafficView(msgspec.Struct, frozen=True, kw_only=True):
    """The links, over the last ``over_s`` seconds; ``left_out`` nodes were not asked."""

    flows: list[Flow]
    over_s: float
    left_out: int
    silent: list[str]


class Answers:
    """Asks others for a page, each with a limit on the wait."""

    def __init__(self, node: Node, catalog: Catalog) -> None:
        """Both are the owner's."""
        self._node = node
        self._catalog = catalog

    async def explanation(self, request: str) -> Explained:
        """The newest decision on a request: from a conductor, else from the catalog.

        Raises:
            Unknown: neither knows it.
        """
        conductors = [m.node for m in self._node.roster.live(Role.CONDUCTOR)]
        asked = [self._ask(node, RequestId(request)) for node in conductors]
        answers = [each for each in await asyncio.gather(*asked) if each is not None]
        if answers:
            return max(answers, key=lambda each: each.attempt)
        try:
            async with asyncio.timeout(CATALOG_LIMIT_S):
                rows = await self._catalog.decisions(RequestId(request))
                ended = await self._catalog.request(RequestId(request))
        except (CatalogError, TimeoutError) as error:
            raise Unknown(_no_catalog(error)) from error
        if not rows:
            raise Unknown("no conductor remembers a decision, nor does the catalog")
        return _explained(rows[-1], ended)

    async def _ask(self, conductor: NodeId, request: RequestId) -> Explained | None:
        subject = self._node.subjects.inbox(Role.CONDUCTOR, conductor, Hop.QUERY)
        try:
            reply = await self._node.bus.request(
                subject, ExplainQuery(request=request), timeout_s=ASK_LIMIT_S
            )
        except BusError:
            return None
        return reply if isinstance(reply, Explained) else None

    async def cache(
        self, chains: list[ChainView], *, since_s: float, until_s: float, step_s: float
    ) -> CacheView:
        """The cache page; parts that the catalog can't give are empty, with the reason."""
        catalog = self._catalog
        query = HitQuery(since_s=since_s, until_s=until_s, step_s=step_s)
        try:
            async with asyncio.timeout(CATALOG_LIMIT_S):
                rates = await catalog.hit_rates(query)
                tenants = await catalog.tenant_hits(query)
                counts = await catalog.block_counts()
                removals = await catalog.removal_counts(since_s=since_s)
                copies = [
                    [_copy(row) for row in await self._copies(chain)]
                    for chain in chains[:SHOWN_COPIES]
                ]
        except (CatalogError, TimeoutError) as error:
            return CacheView(
                chains=chains, copies=[], hit_rates=(), tenants=(), block_counts=(),
                removals=(), missing=_no_catalog(error),
            )  # fmt: skip
        return CacheView(
            chains=chains,
            copies=copies,
            hit_rates=rates,
            tenants=tenants,
            block_counts=counts,
            removals=removals,
            missing="",
        )

    async def _copies(self, chain: ChainView) -> tuple[BlockRow, ...]:
        key = BlockKey(bytes.fromhex(chain.last_key))
        return await self._catalog.blocks(BlockQuery(key=key, limit=16))

    async def targets(self, limit: int) -> TargetsView:
        """What recent decisions said, and what came."""
        try:
            async with asyncio.timeout(CATALOG_LIMIT_S):
                rows = await self._catalog.recent_decisions(limit)
        except (CatalogError, TimeoutError) as error:
            return TargetsView(
                decisions={}, reasons={}, ttft_pairs=[], tbt_pairs=[],
                missing=_no_catalog(error),
            )  # fmt: skip
        return targets_of(rows)


def targets_of(rows: tuple[DecisionRow, ...]) -> TargetsView:
    """Decisions as counts and pairs. Pure."""
    decisions: dict[str, int] = {}
    reasons: dict[str, int] = {}
    ttft: list[tuple[float, float]] = []
    tbt: list[tuple[float, float]] = []
    for row in rows:
        name = row.verdict.value
        decisions[name] = decisions.get(name, 0) + 1
        if row.verdict is Verdict.REJECTED:
            reasons[row.code] = reasons.get(row.code, 0) + 1
        outcome = row.outcome
        if outcome is None or not row.candidates:
            continue
        chosen = row.candidates[0]
        if outcome.ttft_ms is not None:
            ttft.append((chosen.ttft_ms, outcome.ttft_ms))
        if outcome.tbt_ms is not None:
            tbt.append((chosen.tbt_ms, outcome.tbt_ms))
    return TargetsView(
        decisions=decisions,
        reasons=reasons,
        ttft_pairs=ttft,
        tbt_pairs=tbt,
        missing="",
    )


@dataclass(frozen=True, slots=True)
class _Scrape:
    at_s: float
    totals: dict[tuple[str, str, str], float]
    silent: list[str]
    left_out: int


class Traffic:
    """Bytes by node, purpose and path, read from the nodes' own metrics on demand.

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
            if self._last is None or now_s - self._last.at_s >= SCRAPE_EVERY_S:
                self._before, self._last = self._last, await self._scrape()
        before, last = self._before, self._last
        if before is None:
            return TrafficView(
                flows=[], over_s=0.0, left_out=last.left_out, silent=last.silent
            )
        over_s = last.at_s - before.at_s
        flows = [
            Flow(node=node, purpose=purpose, path=path, bytes_per_s=moved / over_s)
            for (node, purpose, path), total in last.totals.items()
            if (moved := total - before.totals.get((node, purpose, path), total)) > 0
        ]
        flows.sort(key=lambda flow: -flow.bytes_per_s)
        return TrafficView(
            flows=flows, over_s=over_s, left_out=last.left_out, silent=last.silent
        )

    async def _scrape(self) -> _Scrape:
        members = [m for m in self._node.roster.live() if m.beat.http]
        asked = members[:SCRAPED_NODES]
        totals: dict[tuple[str, str, str], float] = {}
        silent: list[str] = []
        async with httpx.AsyncClient(timeout=SCRAPE_LIMIT_S) as http:
            texts = await asyncio.gather(
                *(_metrics_text(http, m.beat.http) for m in asked)
            )
        for member, text in zip(asked, texts, strict=True):
            if text is None:
                silent.append(member.node)
                continue
            for (purpose, path), total in bytes_moved(text).items():
                totals[member.node, purpose, path] = total
        at_s = self._node.clock.monotonic()
        return _Scrape(at_s, totals, silent, len(members) - len(asked))


def bytes_moved(text: str) -> dict[tuple[str, str], float]:
    """Bytes that a process moved as a client, by purpose and path. Pure."""
    wanted = [
        line
        for line in text.splitlines()
        if line.startswith(_BYTES) and 'side="client"' in line
    ]
    totals: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families("\n".join([*wanted, ""])):
        for sample in family.samples:
            key = (sample.labels["purpose"], sample.labels["path"])
            totals[key] = totals.get(key, 0.0) + sample.value
    return totals


async def _metrics_text(http: httpx.AsyncClient, url: str) -> str | None:
    try:
        reply = await http.get(f"{url.rstrip('/')}/metrics")
    except httpx.HTTPError:
        return None
    return reply.text if reply.is_success else None


def _copy(row: BlockRow) -> Copy:
    return Copy(node=row.node, tier=row.tier.value, bytes=row.length, hits=row.hits)


def _no_catalog(error: Exception) -> str:
    return f"the catalog does not answer: {error or type(error).__name__}"


def _explained(row: DecisionRow, ended: RequestRow | None) -> Explained:
    """A decision as a conductor would tell it; its end, if both records of it are there."""
    outcome, actual = row.outcome, None
    if outcome is not None and ended is not None:
        actual = ActualTimes(
            outcome=outcome.outcome,
            cached_tokens=outcome.cached_tokens,
            output_tokens=ended.output_tokens,
            ttft_ms=outcome.ttft_ms,
            tbt_ms=outcome.tbt_ms,
        )
    return Explained(
        request=row.request,
        attempt=row.attempt,
        candidates=msgspec.convert(
            row.candidates, tuple[CandidateEstimate, ...], from_attributes=True
        ),
        reason=row.reason,
        considered=row.considered,
        actual=actual,
    )
