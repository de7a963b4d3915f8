# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""vLLM's engine behind ``RequestEngine``, with the pool's connector inside.

vLLM lives in a thread with a loop of its own: it blocks that for a minute while it
loads, and the worker's own loop must go on to say that it lives.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import structlog
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.version import __version__ as vllm_version

from kvtide.connect.connector_metrics import ConnectorMetrics
from kvtide.connect.model_digest import folder_digest
from kvtide.connect.vllm_facts import SALTED, served_facts
from kvtide.connect.vllm_worker.counting import loggers
from kvtide.connect.vllm_worker.pictures import PictureReader, most_pictures
from kvtide.connect.vllm_worker.sampling import ENGINE, logprobs_of, params_of
from kvtide.connect.vllm_worker.settings import VllmSettings
from kvtide.engine.demo import ensure_demo_model
from kvtide.engine.errors import EngineError, EngineFailed, UnsupportedOption
from kvtide.engine.serving import Ask, Piece, Served
from kvtide.engine.settings import DEMO
from kvtide.runtime import ConfigError

LOOK_S: Final = 0.5
END_LIMIT_S: Final = 20.0
_SPARE: Final = 16
TO_DECODE: Final = {"do_remote_decode": True, "do_remote_prefill": False}
FROM_PREFILL: Final = {"do_remote_decode": False, "do_remote_prefill": True}

log = structlog.get_logger("kvtide.connect")


class VllmEngine:
    """A ``RequestEngine``. ``start`` it once, ``close`` it once."""

    def __init__(self, settings: VllmSettings, metrics: ConnectorMetrics) -> None:
        """Nothing runs before ``start``. What the connector does goes to ``metrics``.

        Raises:
            ConfigError: the settings can't be used.
        """
        self._settings = settings
        self._metrics = metrics
        self._options = settings.options()
        self._adapters = {
            name: LoRARequest(name, number, str(folder))
            for number, (name, folder) in enumerate(settings.adapters().items(), 1)
        }
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, name="kvtide-vllm", daemon=True
        )
        self._loaded: concurrent.futures.Future[Served] = concurrent.futures.Future()
        self._closing = False
        self._llm: AsyncLLM | None = None
        self._pictures: PictureReader | None = None
        self._most_pictures = 0

    # ---- life

    def start(self) -> None:
        """Begin to load; returns at once."""
        self._thread.start()

    async def served(self) -> Served:
        """See ``RequestEngine``."""
        return await asyncio.shield(asyncio.wrap_future(self._loaded))

    async def failed_or(self, stop: asyncio.Event) -> None:
        """See ``RequestEngine``."""
        stopping = asyncio.ensure_future(stop.wait())
        try:
            while not stopping.done():
                await asyncio.wait((stopping,), timeout=LOOK_S)
                if self._loaded.done():
                    self._loaded.result()
                    if self._llm is not None and self._llm.errored:
                        raise EngineFailed("vLLM's engine has ended by itself")
        finally:
            stopping.cancel()

    async def close(self) -> None:
        """See ``RequestEngine``."""
        self._closing = True
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join, END_LIMIT_S)

    # ---- requests

    def check(self, ask: Ask) -> None:
        """See ``RequestEngine``."""
        params_of(ask)
        if len(ask.pictures) > self._most_pictures:
            most = self._most_pictures
            raise UnsupportedOption(
                ENGINE, f"{len(ask.pictures)} pictures", f"send at most {most}"
            )

    async def answer(self, ask: Ask) -> AsyncGenerator[Piece]:
        """See ``RequestEngine``."""
        transfer = dict(FROM_PREFILL) if ask.handed else None
        params = params_of(ask, transfer)
        ours = asyncio.get_running_loop()
        pieces: asyncio.Queue[Piece | EngineError] = asyncio.Queue(
            ask.max_tokens + _SPARE
        )

        def told(piece: Piece | EngineError) -> None:
            ours.call_soon_threadsafe(pieces.put_nowait, piece)

        async def generate() -> None:
            try:
                async for output in self._outputs(ask, params):
                    told(_piece(output, ask))
            except UnsupportedOption as error:
                told(error)
            except VLLMClientError as error:
                # what vLLM says of a request that it can't take, such as a wrong grammar
                told(UnsupportedOption(ENGINE, "what was asked", str(error)))
            except Exception as error:  # noqa: BLE001 - vLLM's own errors have no root
                told(EngineFailed(f"{type(error).__name__}: {error}"))

        doing = self._begin(generate())
        try:
            while True:
                piece = await pieces.get()
                if isinstance(piece, EngineError):
                    raise piece
                yield piece
                if piece.ended:
                    return
        finally:
            doing.cancel()

    async def prepare(self, ask: Ask) -> int:
        """See ``RequestEngine``."""
        params = params_of(ask, dict(TO_DECODE))

        async def generate() -> int:
            cached, params_back = 0, None
            async for output in self._outputs(ask, params):
                cached = int(output.num_cached_tokens or 0)
                params_back = output.kv_transfer_params or params_back
            if params_back is None:
                raise EngineFailed("vLLM's connector has not handed the prompt over")
            return cached

        doing = self._begin(generate())
        try:
            return await asyncio.wrap_future(doing)
        except EngineError:
            raise
        except Exception as error:
            raise EngineFailed(f"{type(error).__name__}: {error}") from error
        finally:
            doing.cancel()

    async def _outputs(self, ask: Ask, params: Any) -> AsyncGenerator[Any]:
        assert self._llm is not None  # noqa: S101 - asked only once it is served
        assert self._pictures is not None  # noqa: S101 - as above
        salt = f"{ask.tenant}{SALTED}{ask.salt}" if ask.salt else str(ask.tenant)
        prompt: Any = {"prompt_token_ids": list(ask.tokens), "cache_salt": salt}
        if ask.pictures:
            prompt = await self._pictures.read(prompt, ask.pictures)
        # vLLM keeps a request's name until it has freed it
        name = f"{ask.ref.request}-{ask.ref.attempt}"
        adapter = self._adapters.get(ask.model)
        answering = self._llm.generate(prompt, params, name, lora_request=adapter)
        async with aclosing(answering) as outputs:
            async for output in outputs:
                yield output

    def _begin(
        self, work: Coroutine[Any, Any, Any]
    ) -> "concurrent.futures.Future[Any]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # ---- in the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._load())
            # a stop that came while it loaded has been used up by that
            if not self._closing:
                self._loop.run_forever()
        except Exception as error:
            log.exception("vllm_failed")
            if not self._loaded.done():
                self._loaded.set_exception(EngineFailed(f"vLLM can't serve: {error}"))
        finally:
            if self._pictures is not None:
                self._pictures.close()
            if self._llm is not None:
                self._llm.shutdown()
            self._loop.run_until_complete(self._end_tasks())
            self._loop.close()

    async def _end_tasks(self) -> None:
        """End what vLLM has left running in this loop."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=LOOK_S)

    async def _load(self) -> None:
        """Blocks this loop, which has nothing else to do yet."""
        settings = self._settings
        model = self._model()
        connector = {
            "kv_connector": "KvtideConnector",
            "kv_connector_module_path": "kvtide.connect.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings.connector(),
        }
        args = AsyncEngineArgs(
            model=model,
            dtype=settings.dtype,
            enable_prefix_caching=True,
            kv_transfer_config=connector,
            **{"disable_log_stats": True, **self._options},
        )
        llm = self._llm = AsyncLLM.from_engine_args(
            args, stat_loggers=loggers(self._metrics)
        )
        for adapter in self._adapters.values():
            # one that vLLM can't take shall be known now
            await llm.add_lora(adapter)
        self._most_pictures = most_pictures(llm)
        self._pictures = PictureReader(llm, settings.max_picture_pixels)
        self._loaded.set_result(self._served(llm.vllm_config, model))

    def _model(self) -> str:
        """The model, as vLLM is to be given it."""
        settings = self._settings
        model = settings.model
        if model == DEMO:
            model = str(ensure_demo_model(settings.cache_dir.expanduser()))
        own = Path(model).resolve().name
        if own in self._adapters:
            raise ConfigError(f"lora can't be named {own}: so is the model", key="lora")
        return model

    def _served(self, config: Any, model: str) -> Served:
        digest = folder_digest(
            Path(model), self._settings.state_dir.expanduser() / "digests"
        )
        cache = config.cache_config
        facts = served_facts(
            config, vllm_version, digest, cache.effective_attention_block_size
        )
        facts = replace(facts, pictures=self._most_pictures > 0)
        # a request has blocks in each cache group, so vLLM itself must say what fits
        engines = int(config.parallel_config.data_parallel_size)
        adapted = tuple(
            facts.adapted(name, folder_digest(Path(adapter.lora_path)))
            for name, adapter in self._adapters.items()
        )
        tokens = int(cache.kv_cache_size_tokens or 0) * engines
        return Served(facts, tokens, adapted)


def _piece(output: Any, ask: Ask) -> Piece:
    """What came of a request; what was loaded counts as cached, handed over or not."""
    (answer,) = output.outputs
    cached = int(output.num_cached_tokens or 0)
    grown = len(output.prompt_token_ids) - ask.answered if ask.pictures else None
    return Piece(
        ids=tuple(map(int, answer.token_ids)),
        logprobs=logprobs_of(answer),
        cached_tokens=cached,
        ended=bool(output.finished),
        prompt_tokens=grown,
    )
