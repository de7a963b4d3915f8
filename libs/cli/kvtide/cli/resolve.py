"""A command's settings: from all sources, with a name and the local NATS filled in."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from kvtide.cli.roles import LOOK, schemas
from kvtide.runtime import random_node_name
from kvtide.runtime.settings import RoleSettings, load_settings

R = TypeVar("R", bound=RoleSettings)


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
            changes["nats"] = found
    return settings.model_copy(update=changes)


def resolve_look(config: str | None, flags: Mapping[str, object]) -> RoleSettings:
    """The settings of a command that only looks on."""
    return resolve(RoleSettings, LOOK, Path(config) if config else None, flags)
