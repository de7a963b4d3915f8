"""What the head of a picture file says, without opening the picture. Pure.

A worker's engine opens it, with a library that is made for that. Here only the format, the
size in pixels and whether the file is whole are read, so that a client hears of a bad one
from the gateway, before anything is sent, and nobody opens one that would not fit into
memory or would take for ever.
"""

import struct
from typing import Final

Size = tuple[int, int]
"""Width and height in pixels."""

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_JPEG: Final = b"\xff\xd8\xff"
_JPEG_END: Final = b"\xff\xd9"
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers that begin a JPEG's frame."""
_STEPS: Final = 4096
"""Chunks or markers that are looked at; no real file has as many before its pixels."""
_SCAN: Final = b"\xff\xda"
_MOST_SCANS: Final = 32
"""Each scan of a JPEG may go over all its pixels. Some ten are usual."""
_LONE: Final = (0x01, *range(0xD0, 0xD9))
"""Markers without a length."""


class BadPictureError(ValueError):
    """The file can't be used; the message says why."""


def size_of(data: bytes) -> Size:
    """The size of a PNG, JPEG or WebP file.

    Raises:
        BadPictureError: it is none of these, or not whole.
    """
    try:
        if data.startswith(_PNG):
            size = _png(data)
        elif data.startswith(_JPEG):
            size = _jpeg(data)
        elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            size = _webp(data)
        else:
            raise BadPictureError("it is no PNG, JPEG or WebP file")
    except (struct.error, IndexError) as error:
        raise BadPictureError("the file is cut short") from error
    if min(size) < 1:
        raise BadPictureError("it has no pixels")
    return size


def has_too_many_scans(data: bytes) -> bool:
    """Whether a JPEG file would be gone over too often: opening it can't be stopped."""
    return data.count(_SCAN) > _MOST_SCANS


def _png(data: bytes) -> Size:
    """Its chunks must go on up to the one that ends it."""
    at = len(_PNG)
    size: Size | None = None
    for _ in range(_STEPS):
        length, kind = struct.unpack_from(">I4s", data, at)
        if size is None:
            if kind != b"IHDR":
                raise BadPictureError("the PNG file does not begin with its size")
            size = struct.unpack_from(">II", data, at + 8)
        at += 12 + length
        if at > len(data):
            raise BadPictureError("the file is cut short")
        if kind == b"IEND":
            return size
    raise BadPictureError("the PNG file has too many parts")


def _jpeg(data: bytes) -> Size:
    """The first frame's size; what comes after it must have an end."""
    if has_too_many_scans(data):
        raise BadPictureError("the JPEG file has too many scans")
    at = 2
    for _ in range(_STEPS):
        if data[at] != 0xFF:  # noqa: PLR2004 - what each marker begins with
            raise BadPictureError("the JPEG file is damaged")
        marker = data[at + 1]
        if marker == 0xFF:  # noqa: PLR2004 - fill before a marker
            at += 1
            continue
        at += 2
        if marker in _LONE:
            continue
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 3)
            if _JPEG_END not in data[at:]:
                raise BadPictureError("the file is cut short")
            return width, height
        at += struct.unpack_from(">H", data, at)[0]
    raise BadPictureError("the JPEG file has too many parts")


def _webp(data: bytes) -> Size:
    """The canvas of an extended file, else the one frame's size."""
    if struct.unpack_from("<I", data, 4)[0] + 8 > len(data):
        raise BadPictureError("the file is cut short")
    kind, body = data[12:16], 20
    if kind == b"VP8X":
        wide, tall = data[body + 4 : body + 7], data[body + 7 : body + 10]
        return int.from_bytes(wide, "little") + 1, int.from_bytes(tall, "little") + 1
    if kind == b"VP8L":
        bits = struct.unpack_from("<I", data, body + 1)[0]
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, body + 6)
        return width & 0x3FFF, height & 0x3FFF
    raise BadPictureError("the WebP file is damaged")
