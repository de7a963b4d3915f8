"""One engine's HTTP server, as its agent asks it."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from kvtide.bus.messages import DecodeWork, RefuseCode
from kvtide.router.asking import EngineKind, Heard, data_of, dialect_of
from kvtide.router.engine_load import EngineMetrics, read_metrics
from kvtide.router.errors import EngineAnswerError
from kvtide.runtime import ConfigError

ASK_LIMIT_S = 5.0
_SAID_BYTES = 400
_METRICS_BYTES = 16 << 20
_OK = 200
_UNSUPPORTED = frozenset({400, 422})
"""What is wrong is the request: engines of one model are taken to be set up alike. What
depends on its room alone is not asked of it: see ``Serving``."""


class _Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


class _ServerInfo(msgspec.Struct, frozen=True):
    page_size: int = 0


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What an engine serves. Sizes of 0 are not known."""

    name: str
    max_tokens: int


class EngineClient:
    """Use as an async context manager; everything it opens it closes."""

    def __init__(self, url: str, kind: EngineKind, key: str = "") -> None:
        """Nothing is sent before the first call."""
        self.url = url.rstrip("/")
        self._kind = kind
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(ASK_LIMIT_S, read=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        """Nothing yet."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def model(self, wanted: str) -> EngineModel:
        """The model named ``wanted``, or the only one.

        Raises:
            httpx.TransportError: there is no answer (yet).
            TimeoutError: nor was there within a few seconds.
            ConfigError: it answers, and is no such engine, or serves no such model.
        """
        text = await self._get("/v1/models", "url")
        try:
            models = msgspec.json.decode(text, type=_Models).data
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{self.url}/v1/models is no list of models: {error}", key="url"
            ) from error
        names = [model.id for model in models]
        found = [m for m in models if not wanted or m.id == wanted]
        if len(found) != 1:
            raise ConfigError(
                f"the engine at {self.url} serves {', '.join(names) or 'no model'}; "
                f"'engine_model' is {wanted or 'not given'}",
                key="engine_model",
            )
        return EngineModel(found[0].id, found[0].max_model_len or 0)

    async def block_tokens(self) -> int:
        """Tokens in one of its blocks; 0 if it does not say.

        Raises:
            httpx.TransportError, TimeoutError, ConfigError: as ``model``.
        """
        if self._kind is EngineKind.VLLM:
            seen = await self.metrics()
            return 0 if seen is None else seen.block_tokens
        text = await self._get("/server_info", "kind")
        try:
            return msgspec.json.decode(text, type=_ServerInfo).page_size
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{self.url}/server_info is not SGLang's: {error}", key="kind"
            ) from error

    async def metrics(self) -> EngineMetrics | None:
        """How loaded it is; None: it answers, and shows no metrics.

        Raises:
            httpx.TransportError: there is no answer.
            TimeoutError: nor was there within a few seconds.
        """
        async with (
            asyncio.timeout(ASK_LIMIT_S),
            self._http.stream("GET", "/metrics") as answer,
        ):
            if answer.status_code != _OK:
                return None
            text = await _beginning(answer, _METRICS_BYTES)
        return read_metrics(self._kind, text)

    async def answer(
        self, work: DecodeWork, model: str, salt: str
    ) -> AsyncGenerator[Heard]:
        """What the engine says of one request, until its stream ends.

        Closing the generator closes the stream, and the engine stops.

        Raises:
            httpx.HTTPError: the connection failed.
            EngineAnswerError: the engine refuses, fails, or can't be understood.
        """
        dialect = dialect_of(self._kind)
        body: dict[str, Any] = dialect.body(work, model, salt)
        async with self._http.stream("POST", dialect.path, json=body) as response:
            if response.status_code != _OK:
                said = await _beginning(response, _SAID_BYTES)
                final = response.status_code in _UNSUPPORTED
                raise EngineAnswerError(
                    f"the engine answers {response.status_code}: {said}",
                    code=RefuseCode.UNSUPPORTED if final else "engine_refuses",
                )
            async for line in response.aiter_lines():
                data = data_of(line)
                if data is not None:
                    yield dialect.hear(data.encode())

    async def _get(self, path: str, key: str) -> bytes:
        async with asyncio.timeout(ASK_LIMIT_S):
            answer = await self._http.get(path)
        if answer.status_code != _OK:
            raise ConfigError(
                f"{self.url}{path} answers {answer.status_code}: is it an engine's "
                f"address, and is 'engine_key' right?",
                key=key,
            )
        return answer.content


async def _beginning(answer: httpx.Response, most: int) -> str:
    """Its first bytes as text; what comes after them is not read."""
    data = b""
    async for piece in answer.aiter_bytes():
        data += piece
        if len(data) >= most:
            break
    return data[:most].decode(errors="replace")
