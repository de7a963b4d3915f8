"""Everything secret that a cluster of hosts needs, in a folder for each host.

::

    DIR/authority/      its key: signs hosts that are added later; leave it offline
    DIR/nats/           for the NATS server: nats.conf, and what it includes
    DIR/operator/       for whoever runs commands
    DIR/hosts/HOST/     for one host: secret, certificate, and NODE.toml for each node

What is there is kept: run again with more hosts to add some.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtide.cli.certificates import Authority, write_private
from kvtide.cli.nats_access import authorization, roles_of
from kvtide.cli.nats_keys import OPERATOR, Keys
from kvtide.cli.supervisor.nats_server import write_config
from kvtide.kv import MIN_SECRET_BYTES, Role
from kvtide.runtime import ConfigError

_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_HOST = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.:-]*")


@dataclass(frozen=True, slots=True)
class Host:
    """A host, by the name or address that others reach it at, and its nodes."""

    name: str
    nodes: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> "Host":
        """``HOST=ROLE:NODE,ROLE:NODE``.

        Raises:
            ConfigError: it is something else.
        """
        name, equals, rest = text.partition("=")
        parts = [part.partition(":") for part in rest.split(",")]
        pairs = [(role, node) for role, _, node in parts]
        good = _HOST.fullmatch(name) and equals
        if not good or not all(_NAME.fullmatch(node) for _, node in pairs):
            raise ConfigError(
                f"{text!r} is no host: write HOST=ROLE:NODE,ROLE:NODE, such as "
                "10.0.0.7=store:store-7,decode:decode-7",
                key="host",
            )
        for role, _ in pairs:
            roles_of(role)
        return cls(name, tuple(pairs))


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What keys are made for.

    ``nats`` are the names and addresses of its NATS servers; ``at`` is where a host
    will have its folder.
    """

    cluster: str
    nats: tuple[str, ...]
    hosts: tuple[Host, ...]
    at: Path
    nats_port: int = 4222

    def check(self) -> None:
        """Names are used once.

        Raises:
            ConfigError: a node or host is named twice, or nothing is named.
        """
        if not self.nats or not self.hosts:
            raise ConfigError("name at least one NATS server and one host", key="host")
        hosts = [host.name for host in self.hosts]
        nodes = [node for host in self.hosts for _, node in host.nodes]
        for names in (hosts, [*nodes, OPERATOR]):
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise ConfigError(f"named twice: {', '.join(sorted(twice))}")

    @property
    def nats_url(self) -> str:
        """All servers."""
        return ",".join(f"tls://{name}:{self.nats_port}" for name in self.nats)


def make_cluster_keys(folder: Path, spec: ClusterSpec) -> list[Path]:
    """Make what is missing; the folders of the hosts.

    Raises:
        ConfigError: the spec names something twice, or a role that there is not.
        OSError: the folder can't be written.
    """
    spec.check()
    authority = _authority(folder / "authority")
    secret = _kept(folder / "authority" / "secret")
    ssd_key = _kept(folder / "authority" / "ssd.key")
    seeds = Keys(folder / "authority" / "nkeys")
    nodes = [pair for host in spec.hosts for pair in host.nodes]
    nats = Keys(folder / "nats")
    _certify(
        authority, nats.certificate, nats.certificate_key, "kvtide nats", spec.nats
    )
    write_private(nats.ca_file, authority.certificate)
    access = authorization(seeds, spec.cluster, nodes, served_from=spec.at)
    write_private(nats.folder / "access.conf", access.encode())
    if not (nats.folder / "nats.conf").exists():
        include = 'include "access.conf"\n'
        write_config(nats.folder, host="0.0.0.0", port=spec.nats_port, access=include)
    operator = folder / "operator"
    _common(operator, authority, secret, OPERATOR)
    _node(operator, spec, seeds, OPERATOR, {})
    made: list[Path] = []
    for host in spec.hosts:
        home = folder / "hosts" / host.name
        _common(home, authority, secret, host.name)
        for role, node in host.nodes:
            more = {"advertise": host.name, "node": node}
            _node(home, spec, seeds, node, more, store=role == Role.STORE)
            if role == Role.STORE:
                write_private(home / "ssd.key", ssd_key)
        made.append(home)
    return made


def _authority(home: Path) -> Authority:
    key, certificate = home / "authority.key", home / "ca.pem"
    if key.exists():
        return Authority.of(key.read_bytes(), certificate.read_bytes())
    made = Authority.make()
    write_private(certificate, made.certificate)
    write_private(key, made.private)
    return made


def _kept(path: Path) -> bytes:
    """A secret that is made once."""
    if not path.exists():
        write_private(path, secrets.token_hex(MIN_SECRET_BYTES).encode() + b"\n")
    return path.read_bytes()


def _common(home: Path, authority: Authority, secret: bytes, name: str) -> None:
    """What all nodes of a host share."""
    write_private(home / "ca.pem", authority.certificate)
    _certify(authority, home / "host.pem", home / "host.key", name[:64], (name,))
    write_private(home / "secret", secret)


def _certify(
    authority: Authority,
    certificate: Path,
    key: Path,
    name: str,
    reached_by: Sequence[str],
) -> None:
    if certificate.exists() and key.exists():
        return
    made, private = authority.issue(name, reached_by)
    write_private(key, private)
    write_private(certificate, made)


def _node(
    home: Path,
    spec: ClusterSpec,
    seeds: Keys,
    node: str,
    more: dict[str, str],
    *,
    store: bool = False,
) -> None:
    """A node's key, and a file of settings that names all that is its own."""
    write_private(home / f"{node}.seed", seeds.key_file(node).read_bytes())
    lines = ["[common]"]
    settings = {
        "cluster": spec.cluster,
        "nats": spec.nats_url,
        "nats_ca_file": str(spec.at / "ca.pem"),
        "nats_key_file": str(spec.at / f"{node}.seed"),
        "secret_file": str(spec.at / "secret"),
        "transfer_ca_file": str(spec.at / "ca.pem"),
        "transfer_cert_file": str(spec.at / "host.pem"),
        "transfer_key_file": str(spec.at / "host.key"),
        **more,
    }
    lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    if store:
        lines += [
            "",
            "[store]",
            f"ssd_key_file = {json.dumps(str(spec.at / 'ssd.key'))}",
        ]
    write_private(home / f"{node}.toml", ("\n".join(lines) + "\n").encode())
