"""TLS of the HTTP port."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from kvtide.runtime import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate (with the chain behind it) and its key, both PEM."""

    cert: Path
    key: Path


def check_tls(cert: Path | None, key: Path | None) -> TlsFiles | None:
    """Both files, if they fit together; None: no TLS is wanted.

    Raises:
        ConfigError: one is missing, can't be read, or is not the other's.
    """
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        missing = "tls_key" if key is None else "tls_cert"
        raise ConfigError(f"{missing} is missing: TLS needs both files", key=missing)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = getattr(error, "reason", None) or getattr(error, "strerror", None)
        raise ConfigError(
            f"tls_cert {cert} and tls_key {key} can't be used: {why or error}",
            key="tls_cert",
        ) from error
    return TlsFiles(cert, key)


def _no_password() -> str:
    """Nobody is asked at a terminal."""
    raise ValueError("the key is encrypted; give one without a password")
