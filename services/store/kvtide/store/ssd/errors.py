"""Errors of the SSD tier.

StoreError
└── SsdError
    ├── FormatError      these bytes are not what this format writes
    ├── LockedError      the key for these bytes is destroyed, or can't be had now
    ├── KeysAwayError    no tenant's key can be had now
    └── WrongDirectory   the directory is another's, of another format, or damaged
"""

from kvtide.store.errors import StoreError


class SsdError(StoreError):
    """The tier can't do this."""


class FormatError(SsdError):
    """These bytes are not what this format writes, or not of this directory."""


class LockedError(SsdError):
    """The key for these bytes is destroyed, was never here, or can't be had now."""


class KeysAwayError(SsdError):
    """No tenant's key can be had: who keeps them is away, or they are wrapped anew."""


class WrongDirectory(SsdError):  # noqa: N818 - as the message says it
    """The directory is another's, of another format, or damaged; ``path`` names it."""

    def __init__(self, message: str, *, path: str) -> None:
        """Keep the path beside the message."""
        super().__init__(message)
        self.path = path
