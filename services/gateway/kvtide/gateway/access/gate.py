"""Pure ASGI middleware: nobody gets to a route without saying who they are."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvtide.catalog import key_prefix
from kvtide.gateway.access.audit import AuditBook
from kvtide.gateway.access.caller import Caller, set_caller
from kvtide.gateway.access.key_follower import KeyFollower
from kvtide.gateway.access.keyring import Refused
from kvtide.gateway.api.problem_handlers import ProblemResponse
from kvtide.gateway.api.problems import SERVER, ApiError, retry_headers

OPEN_PATHS = frozenset(("/livez", "/readyz", "/health", "/metrics"))
OPEN_PAGES = "/ui"
"""The dashboard's files, which hold no data; what they show is an admin path."""
ADMIN_PATHS = "/admin/"
LOOKING_ON = "/admin/ui/"
"""What the dashboard shows: open as long as the gateway asks nobody for a key."""
RETRY_MS = 2000.0
_SCHEME = "bearer "

_SAID = {
    Refused.MISSING: "no API key was sent: give one as Authorization: Bearer or x-api-key",
    Refused.UNKNOWN: "the API key is not valid",
    Refused.REVOKED: "the API key was revoked",
    Refused.EXPIRED: "the API key has expired",
    Refused.TENANT_GONE: "the API key's tenant does not exist any more",
}


class KeyGate:
    """Lets through who has a key, and notes whose request it is.

    Requests without one are answered before any byte of their body is read.
    """

    def __init__(
        self, app: ASGIApp, keys: KeyFollower, audit: AuditBook | None
    ) -> None:
        """``audit`` None: failures are counted, but not kept."""
        self._app = app
        self._keys = keys
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401, 403 or 503."""
        if scope["type"] != "http" or _is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        presented = presented_key(Headers(scope=scope))
        found = await self._keys.check(presented)
        if isinstance(found, Refused):
            self._note(scope, presented, found)
            await ProblemResponse(refusal(found))(scope, receive, send)
            return
        wrong = _wrong_door(found, scope["path"])
        if wrong is not None:
            if self._audit is not None:
                action = f"{scope['method']} {scope['path'][:200]}"
                self._audit.note(found.key or "nobody", "admin", action, "forbidden")
            await ProblemResponse(wrong)(scope, receive, send)
            return
        set_caller(scope, found)
        await self._app(scope, receive, send)

    def _note(self, scope: Scope, presented: str | None, why: Refused) -> None:
        unsure = why in (Refused.MISSING, Refused.UNCHECKED)
        if self._audit is None or presented is None or unsure:
            return
        client = scope.get("client")
        host = str(client[0]) if client else "unknown"
        self._audit.key_failed(key_prefix(presented), why, host)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path == OPEN_PAGES or path.startswith(f"{OPEN_PAGES}/")


def presented_key(headers: Headers) -> str | None:
    """The key that a request shows, in either of the two ways; None: none."""
    authorization = headers.get("authorization", "")
    if authorization[: len(_SCHEME)].lower() == _SCHEME:
        return authorization[len(_SCHEME) :].strip()
    return headers.get("x-api-key")


def refusal(why: Refused) -> ApiError:
    """What a client is told."""
    if why is Refused.UNCHECKED:
        return ApiError(
            503,
            "the API key can't be checked now: the database is not available",
            kind=SERVER,
            code="auth_unavailable",
            headers=retry_headers(RETRY_MS),
        )
    return ApiError(
        401,
        _SAID[why],
        kind="authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def _wrong_door(caller: Caller, path: str) -> ApiError | None:
    """Administration and completions have keys of their own."""
    if not caller.key and path.startswith(LOOKING_ON):
        return None
    if path.startswith(ADMIN_PATHS) and not caller.admin:
        message = "this needs an admin key: make one with kvtide keys make --admin"
    elif caller.admin and not path.startswith(ADMIN_PATHS):
        message = "an admin key opens /admin/ only: use a tenant's key"
    else:
        return None
    return ApiError(403, message, kind="permission_error", code="wrong_key_scope")
