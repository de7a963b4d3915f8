"""Pictures as files, made without a library."""

import base64
import struct
import zlib
from collections.abc import Sequence

Colour = tuple[int, int, int]

JPEG = (
    b"\xff\xd8\xff\xe0\x00\x04ab\xff\xc4\x00\x02\xff\xff\xc2\x00\x0b\x08"
    + struct.pack(">HH", 20, 30)
    + b"\x01\x01\x11\x00scan\xff\xd9"
)
"""No picture, but a head of 30 x 20 pixels and an end."""


def png(colours: Sequence[Colour], side: int = 96) -> bytes:
    """A square of stripes in these colours."""
    rows = [
        b"\0" + bytes(colours[y * len(colours) // side]) * side for y in range(side)
    ]
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return _whole(head, zlib.compress(b"".join(rows)))


def claiming(width: int, height: int) -> bytes:
    """A few bytes that say to be a picture of this size."""
    return _whole(
        struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), zlib.compress(b"")
    )


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _whole(head: bytes, body: bytes) -> bytes:
    chunks = ((b"IHDR", head), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    sum_ = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", sum_)


def _riff(kind: bytes, body: bytes) -> bytes:
    chunk = kind + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


WEBPS = {
    "extended": _riff(b"VP8X", bytes(4) + b"\x1d\0\0" + b"\x13\0\0"),
    "lossless": _riff(b"VP8L", b"\x2f" + struct.pack("<I", 29 | 19 << 14)),
    "lossy": _riff(b"VP8 ", bytes(3) + b"\x9d\x01\x2a" + struct.pack("<HH", 30, 20)),
}
"""As ``JPEG``, of each kind."""
