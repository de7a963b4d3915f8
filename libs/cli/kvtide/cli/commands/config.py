"""``kvtide config``: each setting's value and where it came from."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtide.cli.exits import BAD_SETTINGS, CLEAN
from kvtide.cli.roles import ROLES, UP, schemas
from kvtide.runtime import ConfigError, MissingSettingError
from kvtide.runtime.settings import load_settings, shown
from kvtide.runtime.sources import Schemas, near_matches

Values = Mapping[str, Mapping[str, str]]


def show_config(
    roles: Sequence[str], config: Path | None, *, as_json: bool, console: Console
) -> int:
    """Print the settings of ``roles`` (all, if none are named) as they would be now.

    Returns the exit code: a role whose settings are wrong is said so among the others;
    one that isn't asked for may lack what has no default.

    Raises:
        ConfigError: no such role.
    """
    known = schemas()
    names = [UP, *ROLES]
    for role in roles:
        if role not in names:
            raise ConfigError(f"no role {role!r}{near_matches(role, names)}", key=role)
    found: dict[str, Values] = {}
    wrong: dict[str, str] = {}
    code = CLEAN
    for role in roles or names:
        try:
            found[role] = _values(known, role, config)
        except ConfigError as error:
            wrong[role] = str(error)
            if roles or not isinstance(error, MissingSettingError):
                code = BAD_SETTINGS
    if as_json:
        console.print_json(
            json.dumps({**found, **{r: {"error": wrong[r]} for r in wrong}})
        )
    else:
        for role, values in found.items():
            console.print(_table(role, values))
        for role, reason in wrong.items():
            console.print(f"\\[{role}] {escape(reason)}", style="red")
    return code


def _values(known: Schemas, role: str, config: Path | None) -> Values:
    settings, origins = load_settings(
        known[role], role, toml_path=config, schemas=known
    )
    return {
        key: {"value": shown(key, getattr(settings, key)), "from": str(origin)}
        for key, origin in origins.items()
    }


def _table(role: str, values: Values) -> Table:
    table = Table(title=f"\\[{role}]", title_justify="left", box=None)
    for title in ("setting", "value", "from"):
        table.add_column(title, overflow="fold")
    for key, cells in values.items():
        style = "dim" if cells["from"] == "default" else None
        table.add_row(key, escape(cells["value"]), escape(cells["from"]), style=style)
    return table
