"""Records are sealed: encrypted and authenticated under a key of their tenant.

AES-256-GCM. The key of a record's messages is derived by keyed BLAKE3 from the tenant's
key, the directory's id and the ``life``: sixteen random bytes for each time that the
directory is opened. A life counts its records, and a record's two messages have the
nonces 2·count and 2·count + 1. So a nonce comes twice under one key only if the same
random life does; what was written, torn or cut before plays no part.

Associated data are the record's frame (segment, offset, lengths, time) and envelope: a
record that is moved, cut or given another key is none.
"""

import itertools
import os
import threading
from dataclasses import dataclass
from typing import Protocol

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvtide.store.ssd.errors import FormatError
from kvtide.store.ssd.format import (
    ENVELOPE_BYTES,
    FRAME_BYTES,
    TAG_BYTES,
    Envelope,
    Frame,
)

KEY_ID_BYTES = 16
SECRET_BYTES = 32
LIFE_BYTES = 16
_CONTEXT = b"kvtide ssd record v1"


@dataclass(frozen=True, slots=True)
class TenantKey:
    """What a tenant's blocks are sealed with; only in memory."""

    tenant: bytes
    key_id: bytes
    secret: bytes


class TenantKeys(Protocol):
    """Where tenants' keys are kept. Called in threads; every method may block."""

    def open(self) -> str:
        """Learn all keys; what names the key that they are wrapped with.

        Raises:
            KeysAwayError: they can't be had now, or not with this wrapping key.
        """
        ...

    def of_tenant(self, tenant: bytes) -> TenantKey:
        """The key of a tenant, by its tag; made if it never had one.

        Raises:
            LockedError: it is destroyed, or can't be had now.
        """
        ...

    def of_id(self, key_id: bytes) -> TenantKey:
        """A key that is known.

        Raises:
            LockedError: it is destroyed, or was never here.
        """
        ...

    def forget(self, tenant: bytes) -> None:
        """Keep a tenant's key in memory no longer; it may be asked for again."""
        ...


class Seals:
    """Seals and opens the records of one life of one directory. Safe in threads."""

    def __init__(self, keys: TenantKeys, directory: bytes) -> None:
        """A life begins."""
        self._keys = keys
        self._directory = directory
        self._life = os.urandom(LIFE_BYTES)
        # next() of it is one step of the interpreter, but that is not promised
        self._counts = itertools.count()
        self._lock = threading.Lock()

    def seal(self, frame: Frame, tenant: bytes, image: memoryview) -> "Sealing":
        """Ready to write ``image``, a block of this tenant.

        Raises:
            LockedError: its key is destroyed, or can't be had now.
        """
        key = self._keys.of_tenant(tenant)
        with self._lock:
            count = next(self._counts)
        envelope = Envelope(key.key_id, self._life, count)
        return Sealing(self._cipher(key, self._life), frame, envelope, image)

    def open_header(self, frame: Frame, record: memoryview) -> bytes:
        """The block's header of a sealed record, which starts at ``record``.

        Raises:
            LockedError: its key is destroyed.
            FormatError: these are not the bytes that were sealed here.
        """
        envelope = Envelope.decode(record[FRAME_BYTES:])
        start, end = _bounds(frame.header_bytes)
        out = bytearray(frame.header_bytes)
        self._open(frame, envelope, 0, record[start:end], memoryview(out))
        return bytes(out)

    def open(self, frame: Frame, record: memoryview, image: memoryview) -> None:
        """Open all of a record into ``image``.

        Raises:
            LockedError, FormatError: as ``open_header``; ``image`` is undefined then.
        """
        envelope = Envelope.decode(record[FRAME_BYTES:])
        start, middle = _bounds(frame.header_bytes)
        end = middle + len(image) - frame.header_bytes + TAG_BYTES
        header, parts = image[: frame.header_bytes], image[frame.header_bytes :]
        self._open(frame, envelope, 0, record[start:middle], header)
        self._open(frame, envelope, 1, record[middle:end], parts)

    def forget(self, tenant: bytes) -> None:
        """See ``TenantKeys``."""
        self._keys.forget(tenant)

    def _open(
        self,
        frame: Frame,
        envelope: Envelope,
        message: int,
        sealed: memoryview,
        out: memoryview,
    ) -> None:
        cipher = self._cipher(self._keys.of_id(envelope.key_id), envelope.life)
        nonce = _nonce(envelope.count, message)
        try:
            cipher.decrypt_into(nonce, sealed, frame.associated(envelope), out)
        except InvalidTag:
            raise FormatError("the record is not what was sealed here") from None

    def _cipher(self, key: TenantKey, life: bytes) -> AESGCM:
        hasher = blake3(_CONTEXT + self._directory + life, key=key.secret)
        return AESGCM(hasher.digest())


@dataclass(frozen=True, slots=True)
class Sealing:
    """A record that is about to be sealed."""

    cipher: AESGCM
    frame: Frame
    envelope: Envelope
    image: memoryview

    def into(self, record: memoryview) -> int:
        """Write the envelope and the sealed image behind where the frame goes.

        Returns where they end.
        """
        record[FRAME_BYTES : FRAME_BYTES + ENVELOPE_BYTES] = self.envelope.encode()
        known = self.frame.associated(self.envelope)
        header_bytes = self.frame.header_bytes
        start, middle = _bounds(header_bytes)
        end = middle + len(self.image) - header_bytes + TAG_BYTES
        parts = (
            (self.image[:header_bytes], record[start:middle]),
            (self.image[header_bytes:], record[middle:end]),
        )
        for message, (plain, out) in enumerate(parts):
            nonce = _nonce(self.envelope.count, message)
            self.cipher.encrypt_into(nonce, plain, known, out)
        return end


def _bounds(header_bytes: int) -> tuple[int, int]:
    """Where the sealed header starts and ends in a record."""
    start = FRAME_BYTES + ENVELOPE_BYTES
    return start, start + header_bytes + TAG_BYTES


def _nonce(count: int, message: int) -> bytes:
    return (2 * count + message).to_bytes(12, "big")
