"""Errors of the SSD tier.

StoreError
└── SsdError
    ├── FormatError      these bytes are not what this format writes
    └── WrongDirectory   the directory is another's, of another format, or damaged
"""

from kvtide.store.errors import StoreError


class SsdError(StoreError):
    """The tier can't do this."""


class FormatError(SsdError):
    """These bytes are not what this format writes, or not of this directory."""


class WrongDirectory(SsdError):  # noqa: N818 - as the message says it
    """The directory is another's, of another format, or damaged; ``path`` names it."""

    def __init__(self, message: str, *, path: str) -> None:
        """Keep the path beside the message."""
        super().__init__(message)
        self.path = path
