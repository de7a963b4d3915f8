# pyright: reportUnknownMemberType=false
"""Who may do what on a NATS server of ours: keys, certificates, its configuration.

A folder holds all of it. What is there is kept, so that a node can be added later: run
again with its name, give it its key, and have the server read its configuration anew.
"""

import datetime as dt
import ipaddress
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import nkeys
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvtide.bus import Subjects
from kvtide.bus.grants import Grant, grant_of, operator_grant
from kvtide.cli.nats_keys import OPERATOR, Keys
from kvtide.kv import NodeId, Role
from kvtide.runtime import ConfigError

ANSWER_LIMIT = "5m"
"""So long after a question its reply is still let through."""

_AUTHORITY = "kvtide authority"
_DAYS = 3650
_SEED_BYTES = 32


def roles_of(role: str) -> tuple[Role, ...]:
    """The roles of a process: ``worker`` has two.

    Raises:
        ConfigError: there is no such role.
    """
    if role == "worker":
        return (Role.PREFILL, Role.DECODE)
    try:
        return (Role(role),)
    except ValueError:
        known = ", ".join([*Role, "worker"])
        raise ConfigError(f"{role!r} is no role: it is one of {known}") from None


def authorization(keys: Keys, cluster: str, nodes: Iterable[tuple[str, str]]) -> str:
    """The part of a server's configuration that says who may do what, over TLS.

    ``nodes`` are roles and names. Keys that are missing are made.

    Raises:
        ConfigError: a name or role that can't be.
        OSError: the folder can't be written.
    """
    subjects = Subjects(cluster)
    users = [_user(keys, OPERATOR, operator_grant(subjects))]
    for role, name in nodes:
        try:
            grant = grant_of(subjects, NodeId(name), roles_of(role))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        users.append(_user(keys, name, grant))
    return (
        f'tls {{ cert_file: "{keys.certificate}", key_file: "{keys.certificate_key}", '
        f'min_version: "1.3", timeout: 5 }}\n'
        "authorization { users: [\n" + ",\n".join(users) + "\n] }\n"
    )


def make_certificates(keys: Keys, names: Sequence[str]) -> None:
    """An authority, and a certificate of a server that is reached by ``names``.

    Nothing happens where they are; the authority's own key is not kept.

    Raises:
        OSError: the folder can't be written.
    """
    if keys.ca_file.exists() and keys.certificate.exists():
        return
    authority_key = ec.generate_private_key(ec.SECP256R1())
    server_key = ec.generate_private_key(ec.SECP256R1())
    authority = _certificate(_AUTHORITY, authority_key, ca=True)
    server = _certificate("kvtide nats", server_key, ca=False)
    server = server.add_extension(
        x509.SubjectAlternativeName([_alternative(name) for name in names]),
        critical=False,
    )
    private = server_key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    _write_private(keys.certificate_key, private)
    for path, made in ((keys.certificate, server), (keys.ca_file, authority)):
        signed = made.sign(authority_key, hashes.SHA256())
        _write_private(path, signed.public_bytes(serialization.Encoding.PEM))


def _certificate(
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


def _user(keys: Keys, name: str, grant: Grant) -> str:
    return (
        f"  {{ nkey: {_public_key(keys.key_file(name))}, permissions: {{\n"
        f"    publish: {{ allow: {_listed(grant.publish)} }}\n"
        f"    subscribe: {{ allow: {_listed(grant.subscribe)} }}\n"
        f'    allow_responses: {{ max: 1, expires: "{ANSWER_LIMIT}" }} }} }}'
    )


def _listed(subjects: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{subject}"' for subject in subjects) + "]"


def _public_key(path: Path) -> str:
    if not path.exists():
        seed = nkeys.encode_seed(
            secrets.token_bytes(_SEED_BYTES), nkeys.PREFIX_BYTE_USER
        )
        _write_private(path, bytes(seed) + b"\n")
    pair = nkeys.from_seed(bytearray(path.read_bytes().strip()))
    return cast("bytes", pair.public_key).decode("ascii")


def _write_private(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
