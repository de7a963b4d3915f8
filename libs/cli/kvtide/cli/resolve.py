"""A command's settings: from all sources, with a name and the local NATS filled in."""

import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from kvtide.cli.nats_keys import OPERATOR, keys_of
from kvtide.cli.roles import LOOK, schemas
from kvtide.runtime import random_node_name
from kvtide.runtime.settings import RoleSettings, load_settings

R = TypeVar("R", bound=RoleSettings)

WILDCARDS = ("0.0.0.0", "::")


def nats_url_file(state_dir: Path) -> Path:
    """Where ``kvtide up`` writes the address of its NATS server, token included."""
    return state_dir / "run" / "nats.url"


def embedded_nats(state_dir: Path) -> str | None:
    """The address of the NATS server of a ``kvtide up`` on this state folder."""
    try:
        return nats_url_file(state_dir).read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def resolve(
    cls: type[R], role: str, config: Path | None, flags: Mapping[str, object]
) -> R:
    """A role's settings, with a name for the node if nobody gave one.

    A NATS server that ``kvtide up`` runs on the same state folder is found by itself.
    Who listens on every address advertises the one that it reaches NATS from.

    Raises:
        ConfigError: see ``load_settings``.
    """
    settings, origins = load_settings(
        cls, role, flags=flags, toml_path=config, schemas=schemas()
    )
    changes: dict[str, object] = {}
    if not settings.node:
        changes["node"] = random_node_name(role)
    if origins["nats"].source == "default":
        found = embedded_nats(settings.state_dir)
        if found is not None:
            changes |= {"nats": found, **operator_files(settings, found)}
    if settings.listen in WILDCARDS and not settings.advertise:
        changes["advertise"] = own_address(str(changes.get("nats", settings.nats)))
    return settings.model_copy(update=changes)


def operator_files(settings: RoleSettings, url: str) -> dict[str, object]:
    """The key and authority of an operator, for the server of a secure ``kvtide up``.

    Those that were given are kept.
    """
    if not url.startswith("tls://"):
        return {}
    keys = keys_of(settings.state_dir)
    return {
        "nats_key_file": settings.nats_key_file or keys.key_file(OPERATOR),
        "nats_ca_file": settings.nats_ca_file or keys.ca_file,
    }


def own_address(nats_url: str) -> str:
    """The address of this machine on the way to the NATS server; sends nothing.

    Where the server's name can't be resolved yet: the address of this host's name.
    """
    url = nats_url.split(",", maxsplit=1)[0].strip()
    target = urlsplit(url if "://" in url else f"nats://{url}")
    with contextlib.suppress(OSError, ValueError):
        found = socket.getaddrinfo(
            target.hostname, target.port or 4222, type=socket.SOCK_DGRAM
        )
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def resolve_look(config: str | None, flags: Mapping[str, object]) -> RoleSettings:
    """The settings of a command that only looks on."""
    return resolve(RoleSettings, LOOK, Path(config) if config else None, flags)
