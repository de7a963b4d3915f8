"""Errors of blocks and keys.

KvtideError
└── KvError
    └── HeaderMismatchError   bytes are not the block that was promised (a miss)
"""

from kvtide.runtime import KvtideError


class KvError(KvtideError):
    """Something about a block or a key is wrong."""


class HeaderMismatchError(KvError):
    """Bytes are not the block that a descriptor promised: treat it as a miss."""

    def __init__(self, field: str, message: str) -> None:
        """``field`` names what differs."""
        super().__init__(message)
        self.field = field
