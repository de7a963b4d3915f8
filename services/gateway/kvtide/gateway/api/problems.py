"""What a client is told when something is wrong: status, type, code, param.

ApiError is what routes raise; all other errors are translated here, at one boundary.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvtide.gateway.errors import (
    GatewayError,
    PromptError,
    RequestFailedError,
    UnavailableError,
)
from kvtide.gateway.life import FailureKind, RequestFailure

INVALID = "invalid_request_error"
SERVER = "server_error"
OVERLOADED_CODE = "server_is_overloaded"

_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "api_error",
    504: "timeout_error",
}
"""Anthropic's words for a status."""


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct, frozen=True):
    """The body of every 4xx and 5xx, and of an error event in a stream."""

    error: ErrorBody


class AnthropicErrorReply(msgspec.Struct, frozen=True):
    """The same for clients of Anthropic's API, which read ``type`` and ``error``."""

    error: ErrorBody
    request_id: str
    type: str = "error"


class ApiError(GatewayError):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Everything that the client sees of it."""
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON of its ``ErrorReply``."""
        error = ErrorBody(str(self), self.kind, self.param, self.code)
        return msgspec.json.encode(ErrorReply(error))

    def anthropic_body(self, request_id: str) -> bytes:
        """The JSON of its ``AnthropicErrorReply``."""
        kind = _ANTHROPIC.get(self.status, INVALID)
        if self.code == OVERLOADED_CODE:
            kind = "overloaded_error"
        error = ErrorBody(str(self), kind, self.param, self.code)
        return msgspec.json.encode(AnthropicErrorReply(error, request_id))


def bad_param(param: str, message: str, *, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


@dataclass(frozen=True, slots=True)
class _Rule:
    """How one kind of failure looks over HTTP."""

    status: int
    kind: str
    code: str


_RULES = {
    FailureKind.OVERLOADED: _Rule(503, SERVER, OVERLOADED_CODE),
    FailureKind.NO_WORKERS: _Rule(503, SERVER, OVERLOADED_CODE),
    FailureKind.NO_CONDUCTOR: _Rule(503, SERVER, OVERLOADED_CODE),
    FailureKind.TENANT_LIMIT: _Rule(429, "rate_limit_error", "rate_limit_exceeded"),
    FailureKind.UNKNOWN_MODEL: _Rule(404, INVALID, "model_not_found"),
    FailureKind.TOO_LARGE: _Rule(400, INVALID, "context_length_exceeded"),
    FailureKind.UNSUPPORTED: _Rule(400, INVALID, "unsupported_option"),
    FailureKind.QUARANTINED: _Rule(500, SERVER, "request_quarantined"),
    FailureKind.WORKERS_FAILED: _Rule(500, SERVER, "workers_failed"),
    FailureKind.DEADLINE: _Rule(504, SERVER, "deadline_exceeded"),
    FailureKind.SHUTDOWN: _Rule(503, SERVER, "shutting_down"),
    FailureKind.INTERNAL: _Rule(500, SERVER, "internal_error"),
}
_RETRY_MS = {
    FailureKind.NO_CONDUCTOR: 1000.0,
    FailureKind.SHUTDOWN: 1000.0,
}
_HOPELESS = frozenset((FailureKind.QUARANTINED, FailureKind.WORKERS_FAILED))


def of_failure(failure: RequestFailure) -> ApiError:
    """The error that ends a request which was placed or refused."""
    rule = _RULES[failure.kind]
    retry_ms = failure.retry_after_ms or _RETRY_MS.get(failure.kind)
    headers = retry_headers(retry_ms) if retry_ms is not None else {}
    if failure.kind in _HOPELESS:
        # a request that kills workers is not to be sent again by a client library
        headers["x-should-retry"] = "false"
    param = "model" if failure.kind is FailureKind.UNKNOWN_MODEL else None
    return ApiError(
        rule.status,
        failure.reason,
        kind=rule.kind,
        param=param,
        code=rule.code,
        headers=headers,
    )


def of_gateway(error: GatewayError) -> ApiError:
    """Any error of ours as the client sees it."""
    match error:
        case ApiError():
            return error
        case PromptError():
            return bad_param(error.param, str(error), code=error.code)
        case UnavailableError():
            return ApiError(
                503,
                str(error),
                kind=SERVER,
                code=OVERLOADED_CODE,
                headers=retry_headers(error.retry_after_ms),
            )
        case RequestFailedError():
            return of_failure(error.failure)
        case _:
            return internal()


def internal() -> ApiError:
    """A bug of ours; the log has the rest."""
    return ApiError(500, "internal error", kind=SERVER, code="internal_error")


def retry_headers(retry_after_ms: float) -> dict[str, str]:
    """When to try again, in the two forms that clients read."""
    ms = max(1, round(retry_after_ms))
    return {"retry-after": str(-(-ms // 1000)), "retry-after-ms": str(ms)}
