"""What the pages ask for that is not in this process: of conductors, of the catalog."""

import asyncio

import msgspec

from kvtide.bus import BusError, Hop, Node
from kvtide.bus.messages import (
    ActualTimes,
    CandidateEstimate,
    Explained,
    ExplainQuery,
    OtherCandidates,
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
SHOWN_COPIES = 40


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
        others=msgspec.convert(
            row.others, OtherCandidates | None, from_attributes=True
        ),
        actual=actual,
    )
