"""The root of kvtide's errors.

KvtideError
├── ConfigError     a setting, a flag or a file a person wrote is wrong
│   └── MissingSettingError   nothing is wrong, but what has no default was not given
└── LimitError      something would pass a limit that protects the process

Each library hangs its own branch under KvtideError in its own ``errors.py``.
"""


class KvtideError(Exception):
    """Something that kvtide foresaw went wrong; the message says what to do."""


class ConfigError(KvtideError):
    """A setting is wrong. ``key`` names it."""

    def __init__(self, message: str, *, key: str | None = None) -> None:
        """Keep the key beside the message, so that callers can point at it."""
        super().__init__(message)
        self.key = key


class MissingSettingError(ConfigError):
    """Settings without a default were not given; ``key`` names the first."""


class LimitError(KvtideError):
    """A limit that protects the process would be passed. ``limit`` names it."""

    def __init__(self, message: str, *, limit: str) -> None:
        """Keep the limit's name beside the message."""
        super().__init__(message)
        self.limit = limit
