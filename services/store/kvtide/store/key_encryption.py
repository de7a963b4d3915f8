"""The key-encryption key: what tenants' keys are wrapped with. It is in no database."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvtide.runtime import ConfigError
from kvtide.store.settings import StoreSettings

MIN_BYTES = 32
_NONCE_BYTES = 12
_RECIPE = f"'openssl rand -hex {MIN_BYTES}'"


class NotUnwrappedError(Exception):
    """These bytes were not wrapped with this key, or for something else."""


@dataclass(frozen=True, slots=True)
class KeyEncryptionKey:
    """AES-256-GCM with random nonces, for the few keys that there are."""

    secret: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """What names it, and says nothing of it."""
        return self._derived("kek id").hex()[:16]

    def wrap(self, key: bytes, purpose: bytes) -> bytes:
        """``key``, for nobody to read or to use for something else."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher().encrypt(nonce, key, purpose)

    def unwrap(self, wrapped: bytes, purpose: bytes) -> bytes:
        """What ``wrap`` got.

        Raises:
            NotUnwrappedError: it was not wrapped with this key, for this purpose.
        """
        nonce, sealed = wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:]
        try:
            return self._cipher().decrypt(nonce, sealed, purpose)
        except (InvalidTag, ValueError):
            raise NotUnwrappedError from None

    def _cipher(self) -> AESGCM:
        return AESGCM(self._derived("kek wrap"))

    def _derived(self, purpose: str) -> bytes:
        return blake3(self.secret, derive_key_context=f"kvtide 2026 {purpose}").digest()


def load_kek(settings: StoreSettings) -> KeyEncryptionKey | None:
    """The key that the settings name; None: the SSD tier is not encrypted.

    Raises:
        ConfigError: its file can't be read, or it is no key.
    """
    path, text = settings.ssd_key_file, settings.ssd_key_secret
    if path is not None:
        if text is not None:
            raise ConfigError(
                "ssd_key_file and ssd_key_secret are both set: give one of them",
                key="ssd_key_file",
            )
        return _parsed(_read(path), str(path), "ssd_key_file")
    if text is None:
        return None
    return _parsed(text.get_secret_value(), "ssd_key_secret", "ssd_key_secret")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"the key for the SSD tier {path} can't be read: {error.strerror}; make one "
            f"with {_RECIPE}",
            key="ssd_key_file",
        ) from error


def _parsed(text: str, where: str, setting: str) -> KeyEncryptionKey:
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) < MIN_BYTES:
        raise ConfigError(
            f"{where} holds no key: it must be {2 * MIN_BYTES} hexadecimal digits or "
            f"more; make one with {_RECIPE}",
            key=setting,
        )
    return KeyEncryptionKey(secret)
