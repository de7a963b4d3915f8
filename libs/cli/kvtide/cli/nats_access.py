# pyright: reportUnknownMemberType=false
"""Who may do what on a NATS server of ours: keys, certificates, its configuration.

A folder holds all of it. What is there is kept, so that a node can be added later: run
again with its name, give it its key, and have the server read its configuration anew.
"""

import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import nkeys

from kvtide.bus import Subjects
from kvtide.bus.grants import Grant, grant_of, operator_grant
from kvtide.cli.certificates import Authority, write_private
from kvtide.cli.nats_keys import OPERATOR, Keys
from kvtide.kv import NodeId, Role
from kvtide.runtime import ConfigError

ANSWER_LIMIT = "5m"
"""So long after a question its reply is still let through."""

_SEED_BYTES = 32


def roles_of(role: str) -> tuple[Role, ...]:
    """The roles of a process: ``worker`` has two, ``router`` three.

    Raises:
        ConfigError: there is no such role.
    """
    if role == "worker":
        return (Role.PREFILL, Role.DECODE)
    if role == "router":
        return (Role.PREFILL, Role.DECODE, Role.STORE)
    try:
        return (Role(role),)
    except ValueError:
        known = ", ".join([*Role, "worker", "router"])
        raise ConfigError(f"{role!r} is no role: it is one of {known}") from None


def authorization(
    keys: Keys,
    cluster: str,
    nodes: Iterable[tuple[str, str]],
    *,
    served_from: Path | None = None,
) -> str:
    """The part of a server's configuration that says who may do what, over TLS.

    ``nodes`` are roles and names. Keys that are missing are made. ``served_from`` is
    where the server finds its certificate, if not in the folder of the keys.

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
    at = Keys(served_from or keys.folder)
    return (
        f'tls {{ cert_file: "{at.certificate}", key_file: "{at.certificate_key}", '
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
    authority = Authority.make()
    certificate, key = authority.issue("kvtide nats", names)
    write_private(keys.certificate_key, key)
    write_private(keys.certificate, certificate)
    write_private(keys.ca_file, authority.certificate)


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
        write_private(path, bytes(seed) + b"\n")
    pair = nkeys.from_seed(bytearray(path.read_bytes().strip()))
    return cast("bytes", pair.public_key).decode("ascii")
