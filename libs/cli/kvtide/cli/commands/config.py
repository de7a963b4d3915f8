"""``kvtide config``: each setting's value and where it came from."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtide.cli.roles import ROLES, UP, schemas
from kvtide.runtime import ConfigError
from kvtide.runtime.settings import load_settings, shown
from kvtide.runtime.sources import near_matches


def show_config(
    roles: Sequence[str], config: Path | None, *, as_json: bool, console: Console
) -> None:
    """Print the settings of ``roles`` (all, if none are named) as they would be now.

    Raises:
        ConfigError: no such role, or a setting is wrong.
    """
    known = schemas()
    names = [UP, *ROLES]
    for role in roles:
        if role not in names:
            raise ConfigError(f"no role {role!r}{near_matches(role, names)}", key=role)
    found: dict[str, dict[str, Mapping[str, str]]] = {}
    for role in roles or names:
        settings, origins = load_settings(
            known[role], role, toml_path=config, schemas=known
        )
        found[role] = {
            key: {
                "value": shown(key, getattr(settings, key)),
                "from": str(origin),
            }
            for key, origin in origins.items()
        }
    if as_json:
        console.print_json(json.dumps(found))
        return
    for role, values in found.items():
        table = Table(title=f"\\[{role}]", title_justify="left", box=None)
        for title in ("setting", "value", "from"):
            table.add_column(title, overflow="fold")
        for key, cells in values.items():
            style = "dim" if cells["from"] == "default" else None
            table.add_row(
                key, escape(cells["value"]), escape(cells["from"]), style=style
            )
        console.print(table)
