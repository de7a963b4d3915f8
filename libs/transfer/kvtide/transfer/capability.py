"""Keys derived from the cluster's secret, and the capabilities made with one."""

import hashlib
import hmac
import struct
from dataclasses import dataclass

from kvtide.transfer.errors import AccessDenied
from kvtide.transfer.handles import Access

KEY_BYTES = 32
CAPABILITY_BYTES = 25
_FIELDS = struct.Struct("<BQ")
_NEVER = 0


def derive_key(secret: bytes, purpose: str) -> bytes:
    """A 32-byte key for one purpose; keys of two purposes say nothing of each other.

    Raises:
        ValueError: the secret has less than 16 bytes.
    """
    if len(secret) < 16:  # noqa: PLR2004
        message = "the cluster's secret must have 16 bytes or more"
        raise ValueError(message)
    return hmac.digest(secret, b"kvtide.transfer/" + purpose.encode(), "sha256")


@dataclass(frozen=True, slots=True)
class CapabilityMint:
    """Makes and checks the capabilities of one endpoint (node and epoch)."""

    key: bytes
    node: str
    epoch: int

    def mint(self, region: int, access: Access, expires_s: float | None) -> bytes:
        """A capability for ``region``, good until ``expires_s`` of the owner's clock."""
        expiry_us = _NEVER if expires_s is None else max(1, int(expires_s * 1e6))
        fields = _FIELDS.pack(access, expiry_us)
        return fields + self._mac(region, fields)

    def check(
        self, region: int, capability: bytes, access: Access, now_s: float
    ) -> float | None:
        """When the capability ends (None: never).

        Raises:
            AccessDenied: forged, of another region, epoch or node, expired, or for
                less than ``access``.
        """
        fields, mac = capability[: _FIELDS.size], capability[_FIELDS.size :]
        if not hmac.compare_digest(mac, self._mac(region, fields)):
            raise AccessDenied("the capability is not ours", node=self.node)
        allowed, expiry_us = _FIELDS.unpack(fields)
        if allowed < access:
            raise AccessDenied("the capability allows no writing", node=self.node)
        if expiry_us == _NEVER:
            return None
        if expiry_us <= now_s * 1e6:
            raise AccessDenied("the capability has expired", node=self.node)
        return expiry_us / 1e6

    def _mac(self, region: int, fields: bytes) -> bytes:
        node = self.node.encode()
        head = struct.pack("<HQQ", len(node), self.epoch, region)
        return hashlib.blake2b(
            head + node + fields, key=self.key, digest_size=16
        ).digest()
