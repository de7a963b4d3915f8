"""Errors of the gateway.

KvtideError
└── GatewayError
    ├── ModelTextError     the model's tokenizer or chat template can't be used
    ├── PromptError        this request's messages or tokens make no prompt
    ├── NameTakenError     a request of this name is open: a bug, as names are random
    ├── UnavailableError   the gateway can't take requests now (not ready, draining, full)
    └── RequestFailedError a request's life ended with a failure
"""

from kvtide.gateway.life import RequestFailure
from kvtide.kv import RequestId
from kvtide.runtime import KvtideError


class GatewayError(KvtideError):
    """Something in the gateway's part went wrong."""


class ModelTextError(GatewayError):
    """The model's folder has no tokenizer or template that can be used."""


class PromptError(GatewayError):
    """The client's input makes no prompt. ``param`` names the field.

    ``code`` is OpenAI's word for it, if there is one.
    """

    def __init__(self, message: str, *, param: str, code: str | None = None) -> None:
        """Keep both beside the message."""
        super().__init__(message)
        self.param = param
        self.code = code


class NameTakenError(GatewayError):
    """A request of this name is open here. ``request`` is the name."""

    def __init__(self, request: RequestId) -> None:
        """Keep the name beside the message."""
        super().__init__(f"a request named {request} is open already")
        self.request = request


class UnavailableError(GatewayError):
    """Not now; the client may retry after ``retry_after_ms``."""

    def __init__(self, message: str, *, retry_after_ms: float) -> None:
        """Keep the time beside the message."""
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class RequestFailedError(GatewayError):
    """The request's terminal answer is this failure."""

    def __init__(self, failure: RequestFailure) -> None:
        """Keep the failure, which the HTTP edge turns into a status."""
        super().__init__(failure.reason)
        self.failure = failure
