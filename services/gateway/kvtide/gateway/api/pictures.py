"""Pictures in a chat: taken out of data URLs, within bounds. Nothing is ever fetched."""

import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvtide.engine.picture_heads import BadPictureError, size_of
from kvtide.gateway.api.problems import ApiError, bad_param

KINDS: Final = ("image/png", "image/jpeg", "image/jpg", "image/webp")
_BASE64: Final = ";base64,"
_HEAD_CHARS: Final = 64
_AS_DATA_URL: Final = (
    "send the picture itself as a data URL, data:image/png;base64,… (PNG, JPEG or WebP); "
    "this server fetches nothing"
)


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """How many, how large. ``refusal``: why none is taken; empty: some are."""

    most: int
    bytes_each: int
    bytes_all: int
    pixels: int
    refusal: str = ""


class PictureTray:
    """Collects the pictures of one chat, in order."""

    def __init__(self, limits: Callable[[], PictureLimits]) -> None:
        """Empty; ``limits`` are asked for only when there is a picture."""
        self._limits = limits
        self._pictures: list[bytes] = []
        self._bytes = 0

    @property
    def pictures(self) -> tuple[bytes, ...]:
        """The files so far."""
        return tuple(self._pictures)

    def add(self, url: str, param: str) -> None:
        """Take a picture out of its URL.

        Raises:
            ApiError: see ``add_base64``; or the URL is none that holds its picture.
        """
        head, comma, _ = url[:_HEAD_CHARS].partition(_BASE64)
        scheme, _, kind = head.partition(":")
        is_data = bool(comma) and scheme.lower() == "data"
        self.add_base64(kind if is_data else "", url[len(head) + len(comma) :], param)

    def add_base64(
        self, kind: str, packed: str, param: str, how: str = _AS_DATA_URL
    ) -> None:
        """Take a picture; its size is looked at before it is decoded.

        ``kind``: its media type; empty, or one that is not taken: ``how`` says what to
        send instead.

        Raises:
            ApiError: 400 or 413; it names ``param`` and says what to do.
        """
        limits = self._limits()
        if limits.refusal:
            raise bad_param(param, f"{param}: {limits.refusal}")
        if kind.lower() not in KINDS:
            raise bad_param(param, f"{param}: {how}")
        if len(self._pictures) >= limits.most:
            raise bad_param(param, f"{param}: at most {limits.most} pictures are taken")
        size = _unpacked_bytes(packed)
        if size > limits.bytes_each:
            raise _too_large(param, f"a picture may have {limits.bytes_each} bytes")
        if self._bytes + size > limits.bytes_all:
            raise _too_large(param, f"all pictures may have {limits.bytes_all} bytes")
        picture = _unpack(packed, param)
        _check_pixels(picture, limits.pixels, param)
        self._bytes += size
        self._pictures.append(picture)


def _unpacked_bytes(packed: str) -> int:
    return len(packed) // 4 * 3 - packed[-2:].count("=")


def _unpack(packed: str, param: str) -> bytes:
    try:
        return binascii.a2b_base64(packed, strict_mode=True)
    except ValueError as error:
        raise bad_param(param, f"{param}: its base64 is wrong: {error}") from error


def _check_pixels(picture: bytes, most: int, param: str) -> None:
    try:
        width, height = size_of(picture)
    except BadPictureError as error:
        raise bad_param(param, f"{param}: {error}") from error
    if width * height > most:
        raise bad_param(
            param,
            f"{param}: the picture has {width} x {height} pixels; at most {most} in all "
            "are taken: send a smaller one",
        )


def _too_large(param: str, limit: str) -> ApiError:
    return ApiError(
        413,
        f"{param}: {limit}; send a smaller one",
        param=param,
        code="request_too_large",
    )


def check_sent(pictures: Sequence[bytes], answers: int, most: int, param: str) -> None:
    """Each answer's worker gets the pictures, so they count once for each.

    Raises:
        ApiError: 413.
    """
    if sum(map(len, pictures)) * answers > most:
        raise _too_large(
            param, f"all pictures, times {answers} answers, may have {most} bytes"
        )
