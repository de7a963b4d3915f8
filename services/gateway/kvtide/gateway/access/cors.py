"""Which pages in browsers may call, and what of the answers they may read."""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

MAX_AGE_S = 600
_METHODS = ("GET", "POST", "DELETE", "OPTIONS")
_READABLE = ("x-request-id", "retry-after", "retry-after-ms", "x-should-retry")


def cross_origin(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """``app`` for pages of these origins too; none: as it is.

    A preflight is answered without a key, for browsers send none. No cookie is ever
    used, so credentials are not allowed.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=tuple(origins),
        allow_methods=_METHODS,
        allow_headers=("*",),
        expose_headers=_READABLE,
        max_age=MAX_AGE_S,
    )
