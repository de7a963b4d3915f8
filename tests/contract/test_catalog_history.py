"""What the catalog tells people: hit rates, removals, age and heat; and what it forgets."""

from collections.abc import AsyncGenerator, Generator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.contract.test_catalog_contract import (
    BLOCK,
    DECISION,
    NODE,
    REQUEST,
    TENANT,
)
from tests.integration.postgres import PostgresServer, postgres_server

from kvtide.catalog import (
    HEAD,
    Access,
    ApiKeyRow,
    AuditQuery,
    BlockDropped,
    BlockOrder,
    BlockQuery,
    BlockUsed,
    Catalog,
    Change,
    Cutoffs,
    DeletionRow,
    HitQuery,
    HitRate,
    KeyScope,
    Limits,
    QuotaRow,
    RemovalCount,
    RemovalQuery,
    RemovalRow,
    RemovedBlockRow,
    Tenancy,
    TenancyError,
    TenantHits,
    TenantRow,
)
from kvtide.catalog.database import open_engine, transaction
from kvtide.catalog.migrate import alembic_config, migrate_engine
from kvtide.kv import BlockKey, NodeId, RequestId, TenantId, Tier
from kvtide.runtime import ManualClock

pytestmark = pytest.mark.timeout(240)  # starts servers


@pytest.fixture(scope="module")
def postgres() -> Generator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path}/catalog.sqlite3"
    server: PostgresServer = request.getfixturevalue("postgres")
    return await server.create_database()


@pytest.fixture
async def catalog(url: str) -> AsyncGenerator[Catalog]:
    async with Catalog.open(url) as catalog:
        await catalog.migrate()
        yield catalog


OLD_DECISION = (
    "INSERT INTO decisions (request, attempt, conductor, tenant, model, verdict, code,"
    " reason, prompt_tokens, hit_tokens, considered, candidates, decided_at_s) VALUES"
    " ('old', 0, 'c', 't', 'm', 'placed', '', '', 9, 3, 1, '[]', 1.0)"
)


OLD_TENANT = "INSERT INTO tenants (tenant, name, created_at_s) VALUES ('a', 'A', 1.0)"
OLD_KEY = (
    "INSERT INTO api_keys (key_hash, tenant, label, created_at_s)"
    " SELECT CAST('0123' AS {}), 'a', 'laptop', 1.0"
)


def revisions() -> list[str]:
    from alembic.script import ScriptDirectory  # noqa: PLC0415 - as the program does

    found = ScriptDirectory.from_config(alembic_config()).walk_revisions()
    return [each.revision for each in found if each.revision != HEAD]


@pytest.mark.parametrize("earlier", revisions())
async def test_every_earlier_revision_is_brought_up_to_date_with_its_rows(
    url: str, earlier: str
) -> None:
    from alembic import command  # noqa: PLC0415 - as the program does

    engine = open_engine(url)
    async with transaction(engine, writes=True) as connection:
        await connection.run_sync(
            lambda sync: command.upgrade(alembic_config(sync), earlier)
        )
        await connection.execute(text(OLD_DECISION))
        await connection.execute(text(OLD_TENANT))
        binary = "BYTEA" if connection.dialect.name == "postgresql" else "BLOB"
        await connection.execute(text(OLD_KEY.format(binary)))
    await migrate_engine(engine)
    await engine.dispose()
    async with Catalog.open(url) as catalog:
        assert await catalog.revision() == HEAD
        (old,) = await catalog.decisions(RequestId("old"))
        assert (old.hit_tokens, old.dram_tokens, old.ssd_tokens) == (3, 0, 0)
        access = await catalog.access()
        # what is written past the catalog is counted by the revision that began to count
        counted = int(earlier < "0004")
        assert (access.revision, access.keys_made) == (1, counted)
        assert access.tenants == (TenantRow(TenantId("a"), "A", 1.0),)
        assert [(key.prefix, key.scope) for key in access.keys] == [
            ("", KeyScope.CLIENT)
        ]
        new = replace(DECISION, dram_tokens=100, ssd_tokens=28)
        await catalog.write([BLOCK, new])
        assert await catalog.decisions(DECISION.request) == (new,)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


async def test_why_a_copy_went_is_kept_and_counted(catalog: Catalog) -> None:
    rows = [replace(BLOCK, key=key(i), generation=i, hits=i) for i in range(6)]
    await catalog.write(rows)
    reasons = ("capacity", "capacity", "quota", "corrupt", "", "demoted")
    dropped = [
        BlockDropped(row.node, row.key, row.tier, row.generation, why, 100.0 + i)
        for i, (row, why) in enumerate(zip(rows, reasons, strict=True))
    ]
    await catalog.write(dropped)
    # told twice, it is kept once; of a copy that has no row nothing is kept
    await catalog.write([*dropped, replace(dropped[0], key=key(99))])
    assert await catalog.blocks(BlockQuery()) == ()
    removed = await catalog.removals(RemovalQuery())
    assert [row.reason for row in removed] == [
        "demoted", "corrupt", "quota", "capacity", "capacity",
    ]  # fmt: skip
    assert removed[-1] == RemovalRow(
        node=BLOCK.node,
        key=key(0),
        tier=BLOCK.tier,
        generation=0,
        reason="capacity",
        model_tag=BLOCK.model_tag,
        tenant_tag=BLOCK.tenant_tag,
        tokens=BLOCK.tokens,
        length=BLOCK.length,
        stored_at_s=BLOCK.stored_at_s,
        hits=0,
        gone_at_s=100.0,
    )
    assert await catalog.removals(RemovalQuery(reason="quota")) == (removed[2],)
    assert await catalog.removals(RemovalQuery(key=key(3))) == (removed[1],)
    assert await catalog.removals(RemovalQuery(since_s=104.0)) == (removed[0],)
    assert await catalog.removals(RemovalQuery(tier=Tier.SSD)) == ()
    size = BLOCK.length
    assert await catalog.removal_counts(since_s=101.0) == tuple(
        RemovalCount(BLOCK.node, BLOCK.tier, why, 1, size)
        for why in ("capacity", "corrupt", "demoted", "quota")
    )


async def test_a_later_use_of_the_key_has_no_removal(catalog: Catalog) -> None:
    later = replace(BLOCK, generation=BLOCK.generation + 1)
    drop = BlockDropped(BLOCK.node, BLOCK.key, BLOCK.tier, BLOCK.generation, "quota")
    await catalog.write([later, drop])
    assert await catalog.blocks(BlockQuery()) == (later,)
    assert await catalog.removals(RemovalQuery()) == ()


async def test_blocks_are_found_by_age_and_heat(catalog: Catalog) -> None:
    rows = [
        replace(BLOCK, key=key(i), generation=i, stored_at_s=10.0 * i, used_at_s=500.0)
        for i in range(5)
    ]
    await catalog.write(rows)
    used = [BlockUsed(BLOCK.node, key(i), BLOCK.tier, i, 90.0 - i, i) for i in (1, 2)]
    stale = BlockUsed(BLOCK.node, key(3), BLOCK.tier, 77, 1.0, 99)
    await catalog.write([*used, stale])

    async def found(query: BlockQuery) -> list[int]:
        return [row.generation for row in await catalog.blocks(query)]

    assert await found(BlockQuery(stored_before_s=20.0)) == [0, 1]
    assert await found(BlockQuery(used_before_s=100.0)) == [1, 2]
    assert await found(BlockQuery(least_hits=3)) == [0, 3, 4]
    hottest = BlockQuery(order=BlockOrder.HOTTEST, limit=2, stored_before_s=25.0)
    assert await found(hottest) == [0, 2]
    assert await found(BlockQuery(order=BlockOrder.NEWEST, limit=2)) == [4, 3]
    assert await found(BlockQuery(order=BlockOrder.OLDEST, limit=2)) == [0, 1]
    assert await found(BlockQuery(order=BlockOrder.IDLE, limit=1)) == [2]


async def test_hit_rates_are_of_requests_and_of_tiers_over_time(
    catalog: Catalog,
) -> None:
    def ended(
        number: int, at_s: float, cached: int, tenant: str = "acme"
    ) -> list[Change]:
        name = RequestId(f"r{number}")
        request = replace(
            REQUEST,
            request=name,
            attempt=1,
            ended_at_s=at_s,
            cached_tokens=cached,
            tenant=TenantId(tenant),
        )
        first = replace(DECISION, request=name, attempt=0, dram_tokens=999)
        last = replace(
            first, attempt=1, dram_tokens=cached // 2, ssd_tokens=cached // 4
        )
        return [first, last, request]

    await catalog.write(
        [
            *ended(1, 60.0, 0),
            *ended(2, 119.9, 128),
            *ended(3, 120.0, 64),
            *ended(4, 130.0, 64, "other"),
            *ended(5, 400.0, 64),
        ]
    )
    query = HitQuery(since_s=60.0, until_s=300.0)
    assert await catalog.hit_rates(query) == (
        HitRate(60.0, 2, 1, 400, 128, 64, 32),
        HitRate(120.0, 2, 2, 400, 128, 64, 32),
    )
    own = replace(query, tenant=TenantId("other"), step_s=100.0)
    assert await catalog.hit_rates(own) == (HitRate(100.0, 1, 1, 200, 64, 32, 16),)
    assert await catalog.hit_rates(replace(query, model="none")) == ()
    acme, other = TenantId("acme"), TenantId("other")
    assert await catalog.tenant_hits(query) == (
        TenantHits(60.0, acme, 2, 400, 128),
        TenantHits(120.0, acme, 1, 200, 64),
        TenantHits(120.0, other, 1, 200, 64),
    )
    largest = await catalog.tenant_hits(query, most=1)
    assert {each.tenant for each in largest} == {acme}
    assert {each.tenant for each in await catalog.tenant_hits(own)} == {other}


async def test_deleted_tenants_are_told_in_their_order(catalog: Catalog) -> None:
    rows = [
        replace(TENANT, tenant=TenantId(name), deleted_at_s=at_s)
        for name, at_s in (("a", 30.0), ("b", None), ("c", 10.0), ("d", 20.0))
    ]
    await catalog.write(rows)
    found = await catalog.deleted_tenants()
    assert [row.tenant for row in found] == ["c", "d", "a"]
    assert await catalog.deleted_tenants(since_s=20.0) == found[1:]


async def test_removals_by_tenant_and_model_are_kept_until_they_are_old(
    catalog: Catalog,
) -> None:
    tenant, model = b"t" * 16, b"m" * 16
    early = DeletionRow(tenant, b"", 10.0)
    both, any_tenant = DeletionRow(tenant, model, 20.0), DeletionRow(b"", model, 30.0)
    await catalog.write([early, any_tenant, both])
    assert await catalog.deletions() == (early, both, any_tenant)
    again = replace(early, until_s=25.0)
    await catalog.write([again])
    assert await catalog.deletions() == (both, again, any_tenant)
    assert await catalog.prune(Cutoffs(tenants_s=25.0)) == 1
    assert await catalog.deletions() == (again, any_tenant)


async def test_removals_of_single_blocks_are_kept_until_they_are_old(
    catalog: Catalog,
) -> None:
    early, late = RemovedBlockRow(key(1), 10.0), RemovedBlockRow(key(2), 20.0)
    await catalog.write([late, early])
    assert await catalog.removed_blocks() == (early, late)
    again = replace(early, until_s=25.0)
    await catalog.write([again])
    assert await catalog.removed_blocks() == (late, again)
    assert await catalog.removed_blocks(limit=1) == (again,)
    assert await catalog.prune(Cutoffs(tenants_s=25.0)) == 1
    assert await catalog.removed_blocks() == (again,)


async def test_what_is_too_old_goes_and_nothing_else(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtide.catalog.pruning.PIECE_ROWS", 3)
    rows = [replace(BLOCK, key=key(i), generation=i) for i in range(8)]
    drops = [
        BlockDropped(row.node, row.key, row.tier, row.generation, "quota", float(i))
        for i, row in enumerate(rows)
    ]
    await catalog.write([*rows, *drops])
    assert await catalog.prune(Cutoffs()) == 0
    assert await catalog.prune(Cutoffs(removals_s=7.0)) == 7
    assert len(await catalog.removals(RemovalQuery())) == 1
    # a store that is gone for good, one that lives, one that is only just gone
    names = ("dead", "live", "late")
    nodes = [
        replace(NODE, node=NodeId(name), gone_at_s=gone_s)
        for name, gone_s in zip(names, (50.0, None, 150.0), strict=True)
    ]
    copies = [
        replace(BLOCK, node=NodeId(name), tier=tier) for name in names for tier in Tier
    ]
    await catalog.write([*nodes, *copies])
    assert await catalog.prune(Cutoffs(lost_s=100.0, nodes_s=100.0)) == 1
    left = await catalog.blocks(BlockQuery())
    assert set(left) == {row for row in copies if row != copies[0]}
    assert len(await catalog.nodes()) == 3
    await catalog.write(
        [BlockDropped(NodeId("dead"), BLOCK.key, Tier.SSD, BLOCK.generation)]
    )
    assert await catalog.prune(Cutoffs(lost_s=100.0, nodes_s=100.0)) == 1
    assert [row.node for row in await catalog.nodes()] == ["late", "live"]


async def test_deleted_tenants_go_with_all_that_is_theirs(catalog: Catalog) -> None:
    gone = replace(TENANT, tenant=TenantId("gone"), deleted_at_s=5.0)
    kept = replace(TENANT, deleted_at_s=500.0)
    secret = ApiKeyRow(b"h" * 32, gone.tenant, "laptop", 1.0)
    own = ApiKeyRow(b"k" * 32, kept.tenant, "laptop", 1.0)
    await catalog.write(
        [gone, kept, secret, own, QuotaRow(gone.tenant), QuotaRow(kept.tenant)]
    )
    assert await catalog.prune(Cutoffs(tenants_s=100.0)) == 3
    assert await catalog.tenants() == (kept,)
    assert await catalog.api_keys() == (own,)
    assert await catalog.quotas() == (QuotaRow(kept.tenant),)


async def test_blocks_are_found_by_how_their_keys_begin(catalog: Catalog) -> None:
    begins = (b"\x11", b"\x12", b"\x12", b"\xff")
    names = [
        BlockKey(begin + bytes([i]) * 15) for i, begin in enumerate(begins, start=0x80)
    ]
    await catalog.write([replace(BLOCK, key=name) for name in names])
    ends = (BlockKey(b"\x12" + bytes(15)), BlockKey(b"\x12" + b"\xff" * 15))
    found = await catalog.blocks(BlockQuery(key_range=ends))
    assert [row.key for row in found] == names[1:3]
    only = await catalog.blocks(BlockQuery(key_range=(names[3], names[3])))
    assert [row.key for row in only] == names[3:]


async def test_who_may_ask_has_a_number_that_grows_with_each_change(
    catalog: Catalog,
) -> None:
    assert await catalog.access() == Access(revision=1)
    assert await catalog.access_revision() == 1
    quota = QuotaRow(TENANT.tenant, requests_per_min=60)
    key = ApiKeyRow(b"h" * 32, TENANT.tenant, "", 1.0, prefix="ab")
    admin = replace(key, key_hash=b"i" * 32, prefix="cd", scope=KeyScope.ADMIN)
    await catalog.write([TENANT, quota, key, admin])
    assert await catalog.access() == Access(4, 2, (TENANT,), (key, admin), (quota,))
    # other rows don't count; a key that is pruned stays counted
    await catalog.write([NODE, replace(TENANT, deleted_at_s=5.0)])
    assert await catalog.prune(Cutoffs(tenants_s=10.0)) >= 1
    access = await catalog.access()
    assert (access.revision, access.keys_made, access.keys) == (5, 2, ())


async def test_what_is_done_to_tenants_and_keys_is_in_the_audit_log(
    catalog: Catalog,
) -> None:
    clock = ManualClock()
    tenancy = Tenancy(catalog, clock, "test:me")
    limits = Limits(requests_per_min=60)
    await tenancy.add_tenant("acme", title="", share="team", limits=limits)
    made, row = await tenancy.make_key(
        "acme", label="laptop", days=1.0, scope=KeyScope.CLIENT
    )
    with pytest.raises(TenancyError, match="already"):
        await tenancy.add_tenant("acme", title="", share="", limits=limits)
    with pytest.raises(TenancyError, match="no tenant"):
        await tenancy.make_key("nobody", label="", days=None, scope=KeyScope.CLIENT)
    await clock.advance(1.0)
    await tenancy.set_tenant("acme", share=None, limits=Limits())
    await clock.advance(1.0)
    assert await tenancy.delete_tenant("acme", b"t" * 16) == 1
    access = await catalog.access()
    assert access.keys == (replace(row, revoked_at_s=clock.wall()),)
    assert access.quotas == (QuotaRow(TenantId("acme")),)
    rows = await catalog.audit(AuditQuery())
    assert [row.action for row in rows[:2]] == ["tenant.delete", "tenant.set"]
    assert {row.action for row in rows[2:]} == {"tenant.add", "key.make"}
    assert {(row.actor, row.outcome) for row in rows} == {("test:me", "done")}
    assert made.text not in str(rows)
    only = await catalog.audit(AuditQuery(action="key.make"))
    assert [row.target for row in only] == [made.prefix]
    assert await catalog.prune(Cutoffs(audit_s=clock.wall() + 1)) == len(rows)
