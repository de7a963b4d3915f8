# pyright: reportUnknownMemberType=false
"""Certificates of an authority of our own, and private files to keep them in."""

import datetime as dt
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvtide.runtime import ConfigError

_AUTHORITY = "kvtide authority"
_DAYS = 3650


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates. Whoever has its key can pass for any host."""

    key: ec.EllipticCurvePrivateKey
    certificate: bytes

    @classmethod
    def make(cls) -> "Authority":
        """A new one."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = _builder(_AUTHORITY, key, ca=True).sign(key, hashes.SHA256())
        return cls(key, made.public_bytes(serialization.Encoding.PEM))

    @classmethod
    def of(cls, key: bytes, certificate: bytes) -> "Authority":
        """One that was made, from PEM.

        Raises:
            ConfigError: these are no key and certificate.
        """
        try:
            loaded = serialization.load_pem_private_key(key, None)
            x509.load_pem_x509_certificate(certificate)
        except ValueError as error:
            raise ConfigError(f"the authority can't be read: {error}") from error
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ConfigError("the authority's key is of another kind")
        return cls(loaded, certificate)

    def issue(self, name: str, reached_by: Sequence[str]) -> tuple[bytes, bytes]:
        """A certificate for these host names and addresses, and its key, in PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = _builder(name, key, ca=False).add_extension(
            x509.SubjectAlternativeName([_alternative(each) for each in reached_by]),
            critical=False,
        )
        signed = made.sign(self.key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM), _pem(key)

    @property
    def private(self) -> bytes:
        """Its key in PEM."""
        return _pem(self.key)


def write_private(path: Path, data: bytes) -> None:
    """Write a file that its owner alone can read; its folder, too, if it is made.

    Raises:
        OSError: it can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _builder(
    name: str, key: ec.EllipticCurvePrivateKey, *, ca: bool
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(_AUTHORITY))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=_DAYS))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
