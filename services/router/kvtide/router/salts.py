"""Which tenant's an engine's block is: told by the salt that we gave its request. Pure.

A salt names tenant and client salt, so that an agent that has just started reads it too,
and proves that this cluster made it: who talks to the engine past us can neither hit a
tenant's blocks nor put any into its index.
"""

import base64

import msgspec
from blake3 import blake3

from kvtide.kv import TenantId
from kvtide.kv.keys import derive_key

MOST_SALT_CHARS = 1024
"""What vLLM takes as a ``cache_salt``."""

_PREFIX = "kvtide."
_PROOF_BYTES = 32


class _Named(msgspec.Struct, frozen=True, array_like=True):
    tenant: str
    salt: str


class Salts:
    """Makes and reads salts."""

    def __init__(self, secret: bytes) -> None:
        """``secret`` is the cluster's."""
        self._key = derive_key(secret, "engine salts")

    def of(self, tenant: TenantId, salt: str) -> str:
        """The salt of a tenant's requests; the same one each time.

        A client salt that is too long to be carried is replaced by its digest: its
        blocks are then kept apart all the same, but not found again by name.
        """
        text = self._text(tenant, salt)
        if len(text) > MOST_SALT_CHARS:
            text = self._text(tenant, blake3(salt.encode(), key=self._key).hexdigest())
        return text

    def read(self, text: str) -> tuple[TenantId, str] | None:
        """Tenant and client salt; None: it is none of ours."""
        if not text.startswith(_PREFIX):
            return None
        try:
            raw = base64.urlsafe_b64decode(text[len(_PREFIX) :])
            named = msgspec.msgpack.decode(raw[_PROOF_BYTES:], type=_Named)
        except (ValueError, msgspec.MsgspecError):
            return None
        tenant = TenantId(named.tenant)
        return (tenant, named.salt) if self._text(tenant, named.salt) == text else None

    def _text(self, tenant: TenantId, salt: str) -> str:
        said = msgspec.msgpack.encode(_Named(tenant, salt))
        proof = blake3(said, key=self._key).digest(length=_PROOF_BYTES)
        return _PREFIX + base64.urlsafe_b64encode(proof + said).decode()
