# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Pictures of a prompt, from the bytes that clients sent to what vLLM takes.

The files are strangers'. Before one is opened its own head must say one of three formats
and a size that fits, so that a few bytes can't become gigabytes.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any, Final

import structlog
from PIL import Image, UnidentifiedImageError
from vllm.multimodal.image import convert_image_mode, normalize_image
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.v1.engine.exceptions import EngineDeadError

from kvtide.connect.vllm_worker.sampling import ENGINE
from kvtide.engine.errors import UnsupportedOption
from kvtide.engine.picture_heads import has_too_many_scans

FORMATS: Final = ("PNG", "JPEG", "WEBP")
AT_ONCE: Final = 2
"""Prompts whose pictures are open at a time: what they may take is bounded by it."""

log = structlog.get_logger("kvtide.connect")


def opened(data: bytes, most_pixels: int) -> Any:
    """A picture as vLLM's own server would open it, but for damaged ones.

    That one would take what could be read of them.

    Raises:
        UnsupportedOption: it is too large, or no whole picture of our formats.
    """
    try:
        # reads the head alone, and has a bound of its own
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            _check_scans(image.format, data)
            if width * height <= most_pixels:
                image.load()
                return convert_image_mode(normalize_image(image), "RGB")
    except UnsupportedOption:
        raise
    except UnidentifiedImageError as error:
        raise _refused("it is no PNG, JPEG or WebP file") from error
    except Exception as error:  # a stranger's file: decoders raise whatever they like
        raise _refused(f"it can't be opened: {error}") from error
    raise _refused(
        f"it has {width} x {height} pixels; at most {most_pixels} in all are taken: "
        "send a smaller one"
    )


def _check_scans(format_name: str | None, data: bytes) -> None:
    if format_name == "JPEG" and has_too_many_scans(data):
        raise _refused("it has too many scans")


class PictureReader:
    """Makes prompts with pictures ready, a few at a time. For one loop."""

    def __init__(self, llm: Any, most_pixels: int) -> None:
        """``llm`` is an ``AsyncLLM``."""
        self._renderer = llm.renderer
        self._config = llm.model_config
        self._most_pixels = most_pixels
        self._room = asyncio.Semaphore(AT_ONCE)
        self._threads = ThreadPoolExecutor(AT_ONCE, "kvtide-pictures")

    async def read(self, prompt: dict[str, Any], pictures: Sequence[bytes]) -> Any:
        """The prompt as the engine takes it, its pictures' tokens made many.

        Raises:
            UnsupportedOption: a picture can't be used, or the prompt has no place for it.
        """
        loop = asyncio.get_running_loop()
        async with self._room:
            images: list[Any] = []
            for data in pictures:
                work = loop.run_in_executor(
                    self._threads, opened, data, self._most_pixels
                )
                images.append(await work)
            try:
                return await self._rendered(prompt, images)
            except (MemoryError, EngineDeadError):
                raise
            except Exception as error:
                # a prompt that can't be made here can't be made by another worker
                log.warning("pictures_refused", reason=str(error), exc_info=error)
                raise _refused(str(error)) from error

    async def _rendered(self, prompt: dict[str, Any], images: list[Any]) -> Any:
        whole = {**prompt, "multi_modal_data": {"image": images}}
        # with the cache vLLM would count on its engine to have what it once rendered, and a
        # request that is cancelled in between never gets there
        (ready,) = await self._renderer.render_cmpl_async(
            [parse_model_prompt(self._config, whole)], skip_mm_cache=True
        )
        return ready

    def close(self) -> None:
        """No more are read."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def most_pictures(llm: Any) -> int:
    """How many a prompt may have; 0: the model takes none."""
    if not llm.model_config.is_multimodal_model:
        return 0
    processor = llm.renderer.get_mm_processor()
    return int(processor.info.allowed_mm_limits.get("image", 0))


def _refused(why: str) -> UnsupportedOption:
    return UnsupportedOption(ENGINE, "a picture", why)
