"""``/admin/v1``: tenants, keys and the audit log over HTTP, for admin keys only."""

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from kvtide.bus import Hop
from kvtide.bus.messages import BlocksDone, BlockSelector, RemoveBlocks
from kvtide.catalog import (
    OPERATORS,
    AuditQuery,
    CatalogUnavailableError,
    KeyScope,
    Limits,
    QuotaRow,
    Tenancy,
    TenancyError,
)
from kvtide.gateway.access.caller import caller_of
from kvtide.gateway.access.opening import AccessDesk
from kvtide.gateway.api.body import read
from kvtide.gateway.api.door import Door
from kvtide.gateway.api.models import json_response
from kvtide.gateway.api.problems import SERVER, ApiError, retry_headers
from kvtide.kv import BlockKey, NodeId, Role, TenantId, tenant_tag
from kvtide.runtime import Clock, ConfigError, KvtideError

MOST_BODY_BYTES = 64 * 1024
MOST_PAGES = 10_000
STORE_LIMIT_S = 5.0
RETRY_MS = 2000.0


class LimitsBody(BaseModel):
    """What a tenant may use; absent is no limit."""

    model_config = ConfigDict(extra="forbid")

    requests_per_min: int | None = Field(default=None, ge=1, le=1 << 53)
    tokens_per_min: int | None = Field(default=None, ge=1, le=1 << 53)
    concurrent_requests: int | None = Field(default=None, ge=1, le=1 << 53)

    def limits(self) -> Limits:
        """As the catalog takes them."""
        return Limits(
            self.requests_per_min, self.tokens_per_min, self.concurrent_requests
        )


class TenantBody(LimitsBody):
    """A new tenant."""

    tenant: str
    title: str = Field(default="", max_length=200)
    share: str = ""


class ChangeBody(LimitsBody):
    """A tenant's new limits; ``share`` absent: as it is."""

    share: str | None = None


class KeyBody(BaseModel):
    """A new key."""

    model_config = ConfigDict(extra="forbid")

    tenant: str = ""
    label: str = Field(default="", max_length=200)
    days: float | None = Field(default=None, gt=0, le=36_500)
    admin: bool = False


class TenantReply(msgspec.Struct, frozen=True):
    """A tenant and what it may use; null is no limit."""

    tenant: str
    title: str
    share: str
    deleted: bool
    requests_per_min: int | None
    tokens_per_min: int | None
    concurrent_requests: int | None


class KeyReply(msgspec.Struct, frozen=True):
    """A key as lists show it. Times are seconds since the Unix epoch."""

    prefix: str
    tenant: str
    scope: str
    label: str
    created_at_s: float
    expires_at_s: float | None
    revoked_at_s: float | None


class MadeKeyReply(msgspec.Struct, frozen=True):
    """The only time that ``key`` is seen."""

    key: str
    prefix: str
    tenant: str
    scope: str


class GoneReply(msgspec.Struct, frozen=True):
    """What ended. ``stores`` removed the tenant's blocks.

    ``unheard`` are other stores that the catalog knows: they do it when they start, or
    soon after they reach the cluster again.
    """

    name: str
    keys_revoked: int = 0
    stores: tuple[str, ...] = ()
    unheard: tuple[str, ...] = ()


class DeskClerk:
    """Does for one admin request what it asks, and translates what goes wrong."""

    def __init__(self, desk: AccessDesk, clock: Clock, request: Request) -> None:
        """The audit log names the request's key."""
        key = caller_of(request.scope).key
        self.tenancy = Tenancy(desk.catalog, clock, f"key:{key}")

    async def __aenter__(self) -> Tenancy:
        """Begin."""
        return self.tenancy

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Raise as ``ApiError`` what a client is to be told."""
        del kind, trace
        match error:
            case TenancyError():
                status = 409 if error.found else 404
                raise ApiError(status, str(error), param=error.key) from error
            case ConfigError():
                raise ApiError(400, str(error), param=error.key) from error
            case CatalogUnavailableError():
                raise ApiError(
                    503,
                    "the database is not available",
                    kind=SERVER,
                    code="database_unavailable",
                    headers=retry_headers(RETRY_MS),
                ) from error
            case _:
                return


def admin_routes(door: Door) -> APIRouter:
    """Tenants, keys and the audit log."""
    router = APIRouter(prefix="/admin/v1", include_in_schema=False)
    _tenant_routes(router, door)
    _key_routes(router, door)

    @router.get("/audit")
    async def audit(request: Request, limit: int = 100) -> Response:
        """The newest entries."""
        async with _clerk(door, request) as tenancy:
            query = AuditQuery(limit=max(1, min(limit, 1000)))
            rows = await tenancy.catalog.audit(query)
        return Response(msgspec.json.encode(rows), media_type="application/json")

    del audit
    return router


def _clerk(door: Door, request: Request) -> DeskClerk:
    return DeskClerk(door.access, door.gateway.node.clock, request)


def _tenant_routes(router: APIRouter, door: Door) -> None:
    @router.get("/tenants")
    async def tenants(request: Request) -> Response:
        """All tenants, deleted ones too."""
        async with _clerk(door, request) as tenancy:
            access = await tenancy.catalog.access()
        quotas = {quota.tenant: quota for quota in access.quotas}
        shown = [
            TenantReply(
                row.tenant,
                row.name,
                row.share,
                row.deleted_at_s is not None,
                *_three(quotas.get(row.tenant)),
            )
            for row in access.tenants
            if row.tenant != OPERATORS
        ]
        return Response(msgspec.json.encode(shown), media_type="application/json")

    @router.post("/tenants")
    async def add(request: Request) -> Response:
        """Add a tenant."""
        body = await read(request, TenantBody, MOST_BODY_BYTES)
        limits = body.limits()
        async with _clerk(door, request) as tenancy:
            row = await tenancy.add_tenant(
                body.tenant, title=body.title, share=body.share, limits=limits
            )
        three = _three(limits.row(row.tenant))
        return json_response(
            TenantReply(row.tenant, row.name, row.share, False, *three), 201
        )

    @router.post("/tenants/{name}")
    async def change(request: Request, name: str) -> Response:
        """Replace a tenant's limits."""
        body = await read(request, ChangeBody, MOST_BODY_BYTES)
        async with _clerk(door, request) as tenancy:
            await tenancy.set_tenant(name, share=body.share, limits=body.limits())
        return json_response(GoneReply(name), 200)

    @router.delete("/tenants/{name}")
    async def delete(request: Request, name: str) -> Response:
        """End a tenant, its keys and its blocks."""
        async with _clerk(door, request) as tenancy:
            tag = tenant_tag(door.gateway.node.secret, TenantId(name))
            keys = await tenancy.delete_tenant(name, tag)
            nodes = await tenancy.catalog.nodes()
        await door.access.keys.refresh()
        known = [each.node for each in nodes if Role.STORE in each.roles]
        stores = await _forget_blocks(door, TenantId(name))
        unheard = tuple(store for store in known if store not in stores)
        return json_response(GoneReply(name, keys, stores, unheard))

    del tenants, add, change, delete


def _key_routes(router: APIRouter, door: Door) -> None:
    @router.get("/keys")
    async def keys(request: Request) -> Response:
        """All keys by their beginnings."""
        async with _clerk(door, request) as tenancy:
            access = await tenancy.catalog.access()
        shown = [
            KeyReply(
                row.prefix,
                row.tenant,
                row.scope.value,
                row.label,
                row.created_at_s,
                row.expires_at_s,
                row.revoked_at_s,
            )
            for row in access.keys
        ]
        return Response(msgspec.json.encode(shown), media_type="application/json")

    @router.post("/keys")
    async def make(request: Request) -> Response:
        """Make a key; it is shown this once."""
        body = await read(request, KeyBody, MOST_BODY_BYTES)
        if bool(body.tenant) == body.admin:
            raise ApiError(400, "name either a tenant or admin", param="tenant")
        scope = KeyScope.ADMIN if body.admin else KeyScope.CLIENT
        async with _clerk(door, request) as tenancy:
            made, row = await tenancy.make_key(
                body.tenant, label=body.label, days=body.days, scope=scope
            )
        reply = MadeKeyReply(made.text, row.prefix, row.tenant, row.scope.value)
        return json_response(reply, 201)

    @router.delete("/keys/{prefix}")
    async def revoke(request: Request, prefix: str) -> Response:
        """Revoke a key, here at once and at other gateways within seconds."""
        async with _clerk(door, request) as tenancy:
            row = await tenancy.revoke_key(prefix)
        await door.access.keys.refresh()
        return json_response(GoneReply(row.prefix, 1))

    del keys, make, revoke


def _three(quota: QuotaRow | None) -> tuple[int | None, int | None, int | None]:
    if quota is None:
        return None, None, None
    return quota.requests_per_min, quota.tokens_per_min, quota.concurrent_requests


async def _forget_blocks(door: Door, tenant: TenantId) -> tuple[str, ...]:
    """Have the live stores remove a tenant's blocks; those that did so to the end."""
    node = door.gateway.node
    select = BlockSelector(tenant=tenant_tag(node.secret, tenant))
    stores = [member.node for member in node.roster.live(Role.STORE)]
    return tuple([store for store in stores if await _forget_at(door, store, select)])


async def _forget_at(door: Door, store: NodeId, select: BlockSelector) -> bool:
    node = door.gateway.node
    subject = node.subjects.inbox(Role.STORE, store, Hop.QUERY)
    after: BlockKey | None = None
    for _ in range(MOST_PAGES):
        message = RemoveBlocks(select=select, after=after)
        try:
            reply = await node.bus.request(subject, message, timeout_s=STORE_LIMIT_S)
        except (KvtideError, TimeoutError):
            return False
        if not isinstance(reply, BlocksDone):
            return False
        after = reply.next_key
        if after is None:
            return True
    return False
