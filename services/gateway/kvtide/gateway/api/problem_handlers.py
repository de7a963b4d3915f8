"""OpenAI's error object on every 4xx and 5xx, whoever found the problem."""

import asyncio
from http import HTTPStatus

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvtide.gateway.api.problems import ApiError, bad_param, internal, of_gateway
from kvtide.gateway.api.request_ids import request_id
from kvtide.gateway.errors import GatewayError

MESSAGES_PATH = "/v1/messages"
LINGER_S = 20.0
LINGER_BYTES = 128 * 1024 * 1024

log = structlog.get_logger("kvtide.gateway.api")


class ProblemResponse(Response):
    """An error. After a 413 the rest of the body is thrown away, within limits.

    The error is sent at once; but a client that reads only when it has sent all
    would meet a reset, and never see why.
    """

    media_type = "application/json"

    def __init__(self, error: ApiError) -> None:
        """Close the connection after what was not read."""
        self._error = error
        headers = dict(error.headers)
        self._lingers = error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        if self._lingers or error.status == HTTPStatus.REQUEST_TIMEOUT:
            headers["connection"] = "close"
        super().__init__(error.body(), error.status, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send in the words of the API that was asked, and linger if it must."""
        if scope["path"].startswith(MESSAGES_PATH):
            self.body = self._error.anthropic_body(request_id(Request(scope)))
            self.headers["content-length"] = str(len(self.body))
        if not self._lingers:
            await super().__call__(scope, receive, send)
            return
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        body = bytes(self.body)
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await _discard(receive)
        await send({"type": "http.response.body", "body": b""})


async def _discard(receive: Receive) -> None:
    try:
        async with asyncio.timeout(LINGER_S):
            left = LINGER_BYTES
            while left > 0:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
                left -= len(message.get("body", b""))
    except TimeoutError:
        return


def add_problem_handlers(app: FastAPI) -> None:
    """Translate every error at this one boundary."""

    async def of_ours(request: Request, error: Exception) -> Response:
        del request
        if not isinstance(error, GatewayError):
            raise error
        return ProblemResponse(of_gateway(error))

    async def of_framework(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        return ProblemResponse(_of_http(request, error))

    async def of_validation(request: Request, error: Exception) -> Response:
        del request
        if not isinstance(error, RequestValidationError):
            raise error
        first = error.errors()[0]
        param = str(first["loc"][-1])
        return ProblemResponse(bad_param(param, f"{param}: {first['msg']}"))

    async def of_bug(request: Request, error: Exception) -> Response:
        log.error(
            "request failed",
            request=request_id(request),
            path=request.url.path,
            exc_info=error,
        )
        return ProblemResponse(internal())

    app.add_exception_handler(GatewayError, of_ours)
    app.add_exception_handler(HTTPException, of_framework)
    app.add_exception_handler(RequestValidationError, of_validation)
    app.add_exception_handler(Exception, of_bug)


def _of_http(request: Request, error: HTTPException) -> ApiError:
    messages = {
        404: f"there is no {request.url.path[:200]}",
        405: f"{request.method} is not allowed on {request.url.path[:200]}",
    }
    codes = {404: "not_found", 405: "method_not_allowed"}
    return ApiError(
        error.status_code,
        messages.get(error.status_code, str(error.detail)),
        code=codes.get(error.status_code),
        headers=error.headers,
    )
