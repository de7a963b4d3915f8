"""API keys as text: how they are made, told apart, and kept as a hash only.

A key is ``kvt_PREFIX_SECRET``. The prefix is public: lists and logs show it. The secret
has 256 random bits, so a plain SHA-256 of the whole key can't be searched through.
"""

import hashlib
import re
import secrets
from dataclasses import dataclass

from kvtide.kv import TenantId
from kvtide.runtime import ConfigError

KEY_BEGINS = "kvt_"
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of tenants and of the caches that they share."""

_PREFIX_BYTES = 6
_SECRET_BYTES = 32
_KEY = re.compile(r"kvt_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just made. ``text`` is shown once and kept nowhere."""

    text: str
    prefix: str
    key_hash: bytes

    def __repr__(self) -> str:
        """Without the secret."""
        return f"NewKey({self.prefix})"


def make_key() -> NewKey:
    """A new random key."""
    prefix = secrets.token_hex(_PREFIX_BYTES)
    text = f"{KEY_BEGINS}{prefix}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    return NewKey(text, prefix, key_hash(text))


def key_prefix(text: str) -> str | None:
    """The public part of a key; None: no key has this form."""
    found = _KEY.fullmatch(text)
    return found.group(1) if found is not None else None


def key_hash(text: str) -> bytes:
    """What is kept of a key: 32 bytes."""
    return hashlib.sha256(text.encode()).digest()


def check_tenant_name(name: str, *, what: str = "tenant") -> TenantId:
    """The name, if a tenant (or a shared cache) may have it.

    Raises:
        ConfigError: it may not.
    """
    if not TENANT_NAME.fullmatch(name):
        raise ConfigError(
            f"{what} {name[:80]!r}: a name has 1 to 64 letters, digits, '.', '_' and "
            "'-', and begins with a letter or a digit",
            key=what,
        )
    return TenantId(name)
