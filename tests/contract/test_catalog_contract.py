"""What SQLite and PostgreSQL must both do."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Generator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from sqlalchemy import Connection, inspect, text
from tests.integration.postgres import PostgresServer, postgres_server

from kvtide.catalog import (
    HEAD,
    ApiKeyRow,
    BlockCount,
    BlockDropped,
    BlockQuery,
    BlockRow,
    BlocksForgotten,
    CandidateRow,
    Catalog,
    CatalogRejectedError,
    CatalogRevisionError,
    Cutoffs,
    DecisionOutcome,
    DecisionRow,
    NodeRow,
    OthersRow,
    QuotaRow,
    RequestRow,
    TenantRow,
    Verdict,
    migrate,
)
from kvtide.catalog.database import open_engine, transaction
from kvtide.catalog.rows import signed, unsigned
from kvtide.catalog.tables import metadata
from kvtide.kv import BlockKey, NodeId, RequestId, TenantId, Tier

pytestmark = pytest.mark.timeout(240)  # starts servers and processes

NODE = NodeRow(
    node=NodeId("store-a"),
    epoch=1_790_000_000_123,
    roles=("store",),
    host="boot:1",
    state="ready",
    http="127.0.0.1:80",
    seen_at_s=1000.5,
)
BLOCK = BlockRow(
    node=NodeId("store-a"),
    key=BlockKey(b"k" * 16),
    tier=Tier.DRAM,
    epoch=7,
    key_id=0,
    model_tag=b"m" * 16,
    layout_tag=b"l" * 16,
    tenant_tag=b"t" * 16,
    tokens=64,
    arena=2,
    offset=1 << 40,
    length=1_474_560,
    generation=1 << 50,
    header_xxh3=(1 << 64) - 1,
    stored_at_s=1.25,
    used_at_s=2.5,
    hits=3,
)
DECISION = DecisionRow(
    request=RequestId("r1"),
    attempt=0,
    conductor=NodeId("c1"),
    tenant=TenantId("acme"),
    model="demo",
    verdict=Verdict.PLACED,
    code="",
    reason="the shortest time to first token: 12 ms",
    prefill=NodeId("p1"),
    decode=NodeId("d1"),
    prompt_tokens=200,
    hit_tokens=128,
    considered=9,
    candidates=(
        CandidateRow(NodeId("p1"), NodeId("d1"), 128, 0.0, 2.5, 9.5, 12.0, 20.0),
        CandidateRow(NodeId("p2"), NodeId("d1"), 0, 1.0, 0.0, 30.0, 31.0, 20.0),
    ),
    decided_at_s=5.0,
    others=OthersRow(7, 31.5, 40.0, 90.25),
)
REQUEST = RequestRow(
    request=RequestId("r1"),
    attempt=0,
    gateway=NodeId("g1"),
    tenant=TenantId("acme"),
    model="demo",
    outcome="finished",
    code="stop",
    prompt_tokens=200,
    cached_tokens=128,
    output_tokens=10,
    ttft_ms=14.0,
    tbt_ms=None,
    total_ms=200.0,
    ended_at_s=6.0,
)
TENANT = TenantRow(TenantId("acme"), "Acme", 1.0)


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


def schema(connection: Connection) -> dict[str, object]:
    """Names, types, keys and indexes of all tables, comparable between databases."""
    found = inspect(connection)
    return {
        table: (
            [
                (c["name"], type(c["type"].as_generic()).__name__, c["nullable"])
                for c in found.get_columns(table)
            ],
            found.get_pk_constraint(table)["constrained_columns"],
            sorted(str(i["name"]) for i in found.get_indexes(table)),
            [k["referred_table"] for k in found.get_foreign_keys(table)],
        )
        for table in sorted(found.get_table_names())
        if table != "alembic_version"
    }


async def test_migrations_from_empty_make_what_tables_say(
    url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    await migrate(url)
    engine = open_engine(url)
    async with transaction(engine, writes=False) as connection:
        migrated = await connection.run_sync(schema)
    async with transaction(engine, writes=True) as connection:
        await connection.run_sync(metadata.drop_all)
        await connection.run_sync(metadata.create_all)
    async with transaction(engine, writes=False) as connection:
        created = await connection.run_sync(schema)
    await engine.dispose()
    assert set(migrated) == set(metadata.tables)
    assert migrated == created


async def test_migrating_twice_changes_nothing(catalog: Catalog, url: str) -> None:
    await catalog.write([NODE])
    await migrate(url)
    assert await catalog.revision() == HEAD
    assert await catalog.nodes() == (NODE,)


MIGRATE = "import asyncio, sys; from kvtide.catalog import migrate; asyncio.run(migrate(sys.argv[1]))"


async def test_three_processes_migrate_at_once(url: str) -> None:
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            "-W",
            "error",
            "-c",
            MIGRATE,
            url,
            stderr=asyncio.subprocess.PIPE,
        )
        for _ in range(3)
    ]
    ended = [await process.communicate() for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == [0, 0, 0], [stderr.decode() for _, stderr in ended]
    async with Catalog.open(url) as catalog:
        assert await catalog.revision() == HEAD
        await catalog.write([NODE])


async def test_a_newer_schema_is_refused_and_left_alone(
    catalog: Catalog, url: str
) -> None:
    await catalog.write([NODE])
    engine = open_engine(url)
    async with transaction(engine, writes=True) as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num='9999'"))
    await engine.dispose()
    with pytest.raises(CatalogRevisionError, match=r"9999.*newer") as caught:
        await catalog.migrate()
    assert (caught.value.found, caught.value.known) == ("9999", HEAD)
    assert await catalog.nodes() == (NODE,)


async def test_every_record_comes_back_as_it_went_in(catalog: Catalog) -> None:
    key = ApiKeyRow(b"h" * 32, TENANT.tenant, "laptop", 1.0, expires_at_s=9.0)
    quota = QuotaRow(TENANT.tenant, requests_per_min=60, pool_bytes=1 << 40)
    await catalog.write([NODE, BLOCK, DECISION, REQUEST, TENANT, key, quota])
    assert await catalog.nodes() == (NODE,)
    assert await catalog.blocks(BlockQuery()) == (BLOCK,)
    assert await catalog.decisions(DECISION.request) == (DECISION,)
    assert await catalog.recent_decisions(5) == (DECISION,)
    assert await catalog.request(REQUEST.request) == REQUEST
    assert await catalog.recent_requests(5, tenant=TENANT.tenant) == (REQUEST,)
    assert await catalog.recent_requests(5, tenant=TenantId("other")) == ()
    assert await catalog.request(RequestId("none")) is None
    assert await catalog.tenants() == (TENANT,)
    assert await catalog.api_keys() == (key,)
    assert await catalog.quotas() == (quota,)


async def test_writing_again_replaces(catalog: Catalog) -> None:
    await catalog.write([BLOCK, TENANT])
    moved = replace(BLOCK, offset=4096, generation=9, header_xxh3=5, hits=8)
    renamed = replace(TENANT, name="Acme Ltd", created_at_s=99.0, deleted_at_s=100.0)
    await catalog.write([replace(BLOCK, offset=1), moved, renamed])
    assert await catalog.blocks(BlockQuery()) == (moved,)
    assert await catalog.tenants() == (replace(renamed, created_at_s=1.0),)


async def test_changes_apply_in_order(catalog: Catalog) -> None:
    drop = BlockDropped(BLOCK.node, BLOCK.key, BLOCK.tier, BLOCK.generation)
    await catalog.write([BLOCK, drop])
    assert await catalog.blocks(BlockQuery()) == ()
    await catalog.write([drop, BLOCK])
    assert await catalog.blocks(BlockQuery()) == (BLOCK,)


async def test_dropping_an_earlier_use_leaves_the_later_one(catalog: Catalog) -> None:
    later = replace(BLOCK, generation=BLOCK.generation + 1)
    drop = BlockDropped(BLOCK.node, BLOCK.key, BLOCK.tier, BLOCK.generation)
    await catalog.write([BLOCK, later, drop])
    assert await catalog.blocks(BlockQuery()) == (later,)


async def test_forgetting_a_life_keeps_other_tiers_nodes_and_the_new_life(
    catalog: Catalog,
) -> None:
    ssd = replace(BLOCK, tier=Tier.SSD)
    other = replace(BLOCK, node=NodeId("store-b"))
    new = replace(BLOCK, key=BlockKey(b"n" * 16), epoch=8)
    await catalog.write([BLOCK, ssd, other, new])
    await catalog.write([BlocksForgotten(BLOCK.node, Tier.DRAM, epoch=8)])
    assert await catalog.blocks(BlockQuery()) == (ssd, new, other)


async def test_blocks_are_found_by_what_they_belong_to_and_paged(
    catalog: Catalog,
) -> None:
    rows = [
        replace(
            BLOCK,
            node=NodeId(f"store-{'ab'[i % 2]}"),
            key=BlockKey(i.to_bytes(16, "big")),
            tier=tier,
            tenant_tag=bytes([i % 3]) * 16,
        )
        for i in range(30)
        for tier in Tier
    ]
    await catalog.write(rows)
    expected = sorted(rows, key=lambda row: (row.node, row.key, row.tier))
    paged: list[BlockRow] = []
    query = BlockQuery(limit=7)
    while page := await catalog.blocks(query):
        paged += page
        query = replace(query, after=page[-1])
    assert paged == expected
    tenant = BlockQuery(tenant_tag=bytes([1]) * 16, tier=Tier.SSD, limit=1000)
    assert list(await catalog.blocks(tenant)) == [
        row for row in expected if row.tenant_tag[0] == 1 and row.tier is Tier.SSD
    ]
    assert await catalog.block_counts() == tuple(
        BlockCount(NodeId(node), tier, 15, 15 * BLOCK.length)
        for node in ("store-a", "store-b")
        for tier in (Tier.DRAM, Tier.SSD)
    )


async def test_what_really_happened_stands_beside_the_estimate(
    catalog: Catalog,
) -> None:
    outcome = DecisionOutcome(DECISION.request, 0, "finished", 128, 14.0, None)
    second = replace(DECISION, attempt=1)
    await catalog.write([DECISION, second, outcome])
    first = replace(DECISION, outcome=outcome)
    assert await catalog.decisions(DECISION.request) == (first, second)
    await catalog.write([DECISION])
    assert await catalog.decisions(DECISION.request) == (first, second)


async def test_a_request_is_found_by_its_name_and_by_what_its_client_called_it(
    catalog: Catalog,
) -> None:
    names = ("mine.1", "mine.2", "Mine.3", "mine", "minef", "mi_e.4", "%.5")
    rows = [
        replace(DECISION, request=RequestId(name), decided_at_s=float(age))
        for age, name in enumerate(names)
    ]
    await catalog.write(rows)
    assert await catalog.find_request("mine") == "mine"
    assert await catalog.find_request("mine.1") == "mine.1"
    assert await catalog.find_request("Mine") == "Mine.3"
    assert await catalog.find_request("mi_e") == "mi_e.4"
    assert await catalog.find_request("%") == "%.5"
    assert await catalog.find_request("min") is None
    again = replace(DECISION, request=RequestId("%.6"), decided_at_s=99.0)
    older = replace(DECISION, request=RequestId("%.7"), decided_at_s=-1.0)
    await catalog.write([again, older])
    assert await catalog.find_request("%") == "%.6"


async def test_a_batch_is_written_whole_or_not_at_all(catalog: Catalog) -> None:
    orphan = QuotaRow(TenantId("nobody"))
    with pytest.raises(CatalogRejectedError):
        await catalog.write([NODE, orphan])
    assert await catalog.nodes() == ()


async def test_old_decisions_and_requests_are_pruned(catalog: Catalog) -> None:
    new = replace(DECISION, request=RequestId("r2"), decided_at_s=100.0)
    ended = replace(REQUEST, request=RequestId("r2"), ended_at_s=100.0)
    await catalog.write([DECISION, REQUEST, new, ended])
    assert await catalog.prune(Cutoffs(requests_s=50.0)) == 2
    assert await catalog.recent_decisions(5) == (new,)
    assert await catalog.recent_requests(5) == (ended,)


async def test_ten_thousand_blocks_in_one_batch(catalog: Catalog) -> None:
    rows = [replace(BLOCK, key=BlockKey(i.to_bytes(16, "big"))) for i in range(10_000)]
    await catalog.write(rows)
    (count,) = await catalog.block_counts()
    assert count.blocks == 10_000


@given(st.integers(0, 2**64 - 1))
@settings(max_examples=200, deadline=None)
def test_unsigned_numbers_survive_signed_columns(number: int) -> None:
    assert -(2**63) <= signed(number) < 2**63
    assert unsigned(signed(number)) == number
