"""Keys, tenants, administration, browsers, slow heads and TLS at the real HTTP port."""

import asyncio
import contextlib
import json
import shutil
import sqlite3
import ssl
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.gateway_cluster import (
    MODEL,
    Running,
    Script,
    running_gateway,
)

from kvtide.bus.messages import RejectCode
from kvtide.catalog import Catalog, KeyScope, Limits, NodeRow, Tenancy, catalog_url
from kvtide.kv import NodeId, TenantId, tenant_tag
from kvtide.runtime import ConfigError, SystemClock

QUICK: dict[str, Any] = {"keys_refresh_s": 0.05}
BODY: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 4}


@dataclass
class Desk:
    """Makes keys as the command line does."""

    tenancy: Tenancy

    async def key(self, tenant: str, *, admin: bool = False) -> str:
        scope = KeyScope.ADMIN if admin else KeyScope.CLIENT
        made, _ = await self.tenancy.make_key(tenant, label="", days=None, scope=scope)
        return made.text


@asynccontextmanager
async def desk_at(folder: Path) -> AsyncGenerator[Desk]:
    async with Catalog.open(catalog_url("", folder)) as catalog:
        await catalog.migrate()
        tenancy = Tenancy(catalog, SystemClock(), "test")
        for name, share in (("acme", ""), ("red", "team"), ("blue", "team")):
            await tenancy.add_tenant(name, title="", share=share, limits=Limits())
        yield Desk(tenancy)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def ask(
    client: httpx.AsyncClient, headers: dict[str, str] | None = None
) -> httpx.Response:
    return await client.post("/v1/completions", json=BODY, headers=headers)


async def until_status(
    client: httpx.AsyncClient, headers: dict[str, str], status: int
) -> httpx.Response:
    async with asyncio.timeout(40):
        while (reply := await ask(client, headers)).status_code != status:  # noqa: ASYNC110 - another process's work is awaited
            await asyncio.sleep(0.02)
    return reply


async def test_a_start_without_keys_is_open_until_the_first_key_is_made(
    tmp_path: Path,
) -> None:
    async with (
        running_gateway(tmp_path, **QUICK) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        assert (await ask(client)).status_code == 200
        assert (await ask(client, bearer("EMPTY"))).status_code == 200
        assert (await client.get("/admin/v1/keys")).status_code == 403
        async with desk_at(tmp_path) as desk:
            key = await desk.key("acme")
            reply = await until_status(client, {}, 401)
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
            assert reply.headers["x-request-id"]
            assert (await ask(client, bearer(key))).status_code == 200
            assert (await ask(client, {"x-api-key": key})).status_code == 200
            assert running.cluster.admits[-1].tenant == "acme"
            for path in ("/livez", "/readyz", "/health", "/metrics"):
                assert (await client.get(path)).status_code == 200
            for path in ("/v1/models", "/openapi.json", "/docs", "/nothing"):
                assert (await client.get(path)).status_code == 401
            await desk.tenancy.revoke_key(key)
            reply = await until_status(client, bearer(key), 401)
            assert "revoked" in reply.json()["error"]["message"]
            # a new key works in the same moment
            assert (await ask(client, bearer(await desk.key("acme")))).is_success


async def test_each_tenant_has_its_own_cache_unless_it_shares_one_on_purpose(
    tmp_path: Path,
) -> None:
    prompt = BODY | {"prompt": list(range(100, 140))}
    async with (
        desk_at(tmp_path) as desk,
        running_gateway(tmp_path, **QUICK) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        for tenant in ("acme", "red", "blue"):
            headers = bearer(await desk.key(tenant))
            reply = await client.post("/v1/completions", json=prompt, headers=headers)
            assert reply.is_success, reply.text
        acme, red, blue = running.cluster.admits
        assert (acme.tenant, red.tenant, blue.tenant) == ("acme", "red", "blue")
        assert len(red.keys) == 2
        assert red.keys == blue.keys
        assert not set(acme.keys) & set(red.keys)
        works = [(work.tenant, work.keys) for work in running.cluster.decodes]
        assert works[0] == ("acme", acme.keys)
        assert works[1] == works[2] == ("shared:team", red.keys)


async def test_a_tenants_limit_is_429_with_a_time(tmp_path: Path) -> None:
    script = Script(reject=RejectCode.TENANT_LIMIT)
    async with (
        running_gateway(tmp_path, script=script) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        reply = await ask(client)
    assert reply.status_code == 429
    assert reply.json()["error"]["type"] == "rate_limit_error"
    assert int(reply.headers["retry-after"]) >= 1
    assert int(reply.headers["retry-after-ms"]) >= 1


async def test_administration_has_a_key_of_its_own_and_is_noted(tmp_path: Path) -> None:
    async with (
        desk_at(tmp_path) as desk,
        running_gateway(tmp_path, **QUICK) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        admin = bearer(await desk.key("", admin=True))
        own = bearer(await desk.key("acme"))
        assert (await ask(client, admin)).status_code == 403
        reply = await client.get("/admin/v1/tenants", headers=own)
        assert reply.status_code == 403
        assert reply.json()["error"]["code"] == "wrong_key_scope"
        new = {"tenant": "fresh", "requests_per_min": 5}
        post = client.post
        assert (await post("/admin/v1/tenants", json=new, headers=admin)).is_success
        again = await post("/admin/v1/tenants", json=new, headers=admin)
        assert again.status_code == 409
        bad = await post("/admin/v1/tenants", json={"tenant": "../x"}, headers=admin)
        assert bad.status_code == 400
        assert bad.json()["error"]["param"] == "tenant"
        wish = {"tenant": "fresh"}
        made = await post("/admin/v1/keys", json=wish, headers=admin)
        assert made.status_code == 201
        key = bearer(made.json()["key"])
        assert (await ask(client, key)).status_code == 200
        listed = (await client.get("/admin/v1/keys", headers=admin)).text
        assert made.json()["prefix"] in listed
        assert made.json()["key"] not in listed
        nodes = (("down", "store"), ("other", "decode"))
        rows = [
            NodeRow(NodeId(name), 1, (role,), "host", "ready", "", 1.0)
            for name, role in nodes
        ]
        await desk.tenancy.catalog.write(rows)
        gone = await client.delete("/admin/v1/tenants/fresh", headers=admin)
        assert gone.json()["keys_revoked"] == 1
        # a store that the catalog knows, and that does not answer
        assert (gone.json()["stores"], gone.json()["unheard"]) == ([], ["down"])
        assert (await ask(client, key)).status_code == 401
        assert (
            await client.delete("/admin/v1/keys/0123", headers=admin)
        ).status_code == 404

        async def actions() -> set[str]:
            page = await client.get("/admin/v1/audit", headers=admin)
            return {entry["action"] for entry in page.json()}

        async with asyncio.timeout(40):
            while not {"tenant.delete", "key.make", "key.use"} <= await actions():  # noqa: ASYNC110 - the writer's work is awaited
                await asyncio.sleep(0.05)


def break_database(folder: Path) -> None:
    with contextlib.closing(sqlite3.connect(folder / "catalog.sqlite3")) as connection:
        connection.execute("ALTER TABLE access RENAME TO away")


async def test_with_the_database_gone_known_keys_go_on_and_others_are_told(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = QUICK | {"keys_max_age_s": 1.5}
    async with (
        desk_at(tmp_path) as desk,
        running_gateway(tmp_path, **settings) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        known = bearer(await desk.key("acme"))
        assert (await ask(client, known)).status_code == 200
        break_database(tmp_path)
        assert (await ask(client, known)).status_code == 200
        unknown = bearer("kvt_0123456789ab_" + "x" * 43)
        reply = await until_status(client, unknown, 503)
        assert reply.json()["error"]["code"] == "auth_unavailable"
        assert reply.headers["retry-after"]
        reply = await until_status(client, known, 503)
        assert reply.json()["error"]["code"] == "auth_unavailable"


async def test_browsers_may_call_only_from_where_they_are_allowed(
    tmp_path: Path,
) -> None:
    origin, other = "https://app.example", "https://evil.example"
    ask_first = {"access-control-request-method": "POST"}
    async with (
        running_gateway(tmp_path, cors_origins=f"{origin}, https://b.x") as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        allowed, refused = [
            await client.options(
                "/v1/completions", headers={"origin": each, **ask_first}
            )
            for each in (origin, other)
        ]
        assert allowed.headers["access-control-allow-origin"] == origin
        assert "access-control-allow-origin" not in refused.headers
        reply = await ask(client, {"origin": origin})
        assert reply.headers["access-control-allow-origin"] == origin
        assert "x-request-id" in reply.headers["access-control-expose-headers"]
    async with (
        running_gateway(tmp_path / "off") as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        reply = await ask(client, {"origin": origin})
        assert "access-control-allow-origin" not in reply.headers


async def read_all(running: Running, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*running.address)
    writer.write(sent)
    await writer.drain()
    try:
        async with asyncio.timeout(40):
            return await reader.read()
    finally:
        writer.close()


async def test_a_head_that_does_not_come_ends_its_connection(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, head_timeout_s=0.2) as running:
        assert await read_all(running, b"") == b""
        late = await read_all(running, b"GET /livez HTTP/1.1\r\nHost: x\r\nA: ")
        assert late.startswith(b"HTTP/1.1 408 ")
        assert json.loads(late.partition(b"\r\n\r\n")[2])["error"]["code"]
        wrong = await read_all(running, b"no http at all\r\n\r\n")
        assert wrong.startswith(b"HTTP/1.1 400 ")
        assert b'"invalid_http"' in wrong
        # an answer that takes longer than a head may is not cut
        running.script.step_s = 0.1
        async with httpx.AsyncClient(base_url=running.url) as client:
            assert (await ask(client)).is_success


def certificate(folder: Path) -> dict[str, Any]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(  # noqa: S603
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"),
            *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return {"tls_cert": cert, "tls_key": key}


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl")
async def test_with_a_certificate_nothing_but_https_is_spoken(tmp_path: Path) -> None:
    files = certificate(tmp_path)
    async with running_gateway(tmp_path, **files) as running:
        assert running.url.startswith("https://127.0.0.1:")
        trust = ssl.create_default_context(cafile=str(files["tls_cert"]))
        async with httpx.AsyncClient(base_url=running.url, verify=trust) as client:
            assert (await ask(client)).is_success
            stream = BODY | {"stream": True}
            reply = await client.post("/v1/completions", json=stream)
            assert reply.text.rstrip().endswith("[DONE]")
        async with httpx.AsyncClient() as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get(running.url.replace("https", "http") + "/livez")


async def test_files_for_tls_that_do_not_fit_are_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("nothing")
    cases: tuple[dict[str, Any], ...] = (
        {"tls_cert": tmp_path / "x.pem"},
        {"tls_cert": tmp_path / "x.pem", "tls_key": tmp_path / "x.pem"},
    )
    for files in cases:
        with pytest.raises(ConfigError, match="tls_"):
            async with running_gateway(tmp_path, **files):
                pass


def test_a_shared_caches_blocks_are_no_tenants() -> None:
    tags = {tenant_tag(b"s" * 32, TenantId(name)) for name in ("team", "shared:team")}
    assert len(tags) == 2
