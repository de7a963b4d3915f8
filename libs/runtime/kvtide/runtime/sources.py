"""Where settings come from: the environment and a TOML file, read and checked.

A name is known when the schema of any role has it, so that one environment and one
file serve all roles of a machine; what no role knows is an error that names it.
"""

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvtide.runtime.errors import ConfigError

Schemas = Mapping[str, type[BaseModel]]
"""The settings class of each role, by the role's name."""

PREFIX = "KVTIDE_"
CONFIG_VARIABLE = "KVTIDE_CONFIG"
RESERVED_PREFIX = "KVTIDE_TEST_"
"""Variables that tests read; never settings."""

COMMON_TABLE = "common"
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from; ``detail`` is the flag, variable or table."""

    source: Literal["flag", "environment", "file", "default"]
    detail: str = ""

    def __str__(self) -> str:
        """Read as ``environment KVTIDE_NATS``."""
        return f"{self.source} {self.detail}".strip()


@dataclass(frozen=True, slots=True)
class Given:
    """A value that somebody gave, and where."""

    value: object
    origin: Origin


def near_matches(name: str, known: Iterable[str]) -> str:
    """``"; did you mean a or b?"``, or nothing when no known name is close."""
    close = difflib.get_close_matches(name, sorted(set(known)), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def read_environment(
    schemas: Schemas, role: str, environ: Mapping[str, str]
) -> dict[str, Given]:
    """What the environment gives ``role``: ``KVTIDE_<ROLE>_X`` before ``KVTIDE_X``.

    Raises:
        ConfigError: a ``KVTIDE_…`` variable names no setting of any role.
    """
    known = _variable_names(schemas)
    for variable in environ:
        if not variable.startswith(PREFIX) or variable.startswith(RESERVED_PREFIX):
            continue
        if variable not in known and variable != CONFIG_VARIABLE:
            message = (
                f"environment variable {variable} names no setting"
                f"{near_matches(variable, known)}"
            )
            raise ConfigError(message, key=variable)
    given: dict[str, Given] = {}
    for key, field in schemas[role].model_fields.items():
        for variable in (_variable(f"{role}_{key}"), _variable(key)):
            if variable in environ:
                value = from_text(environ[variable], field)
                given[key] = Given(value, Origin("environment", variable))
                break
    return given


def read_file(schemas: Schemas, role: str, path: Path) -> dict[str, Given]:
    """What the TOML file at ``path`` gives ``role``: ``[<role>]`` before ``[common]``.

    Raises:
        ConfigError: the file can't be read or parsed, or a table or key is unknown.
    """
    tables = _tables(path)
    _check_tables(schemas, tables, path)
    given: dict[str, Given] = {}
    for key, field in schemas[role].model_fields.items():
        for table in (role, COMMON_TABLE):
            values = tables.get(table, {})
            if key in values:
                value = values[key]
                if value == "" and _may_be_none(field):
                    value = None
                given[key] = Given(value, Origin("file", f"{path} [{table}]"))
                break
    return given


def _tables(path: Path) -> dict[str, dict[str, object]]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            message = f"{path} is larger than {MAX_FILE_BYTES} bytes"
            raise ConfigError(message, key=str(path))
        parsed = tomllib.loads(raw.decode())
    except OSError as error:
        message = f"can't read the settings file {path}: {error.strerror}"
        raise ConfigError(message, key=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"{path} is no valid TOML: {error}"
        raise ConfigError(message, key=str(path)) from error
    tables: dict[str, dict[str, object]] = {}
    for name, value in parsed.items():
        if not isinstance(value, dict):
            message = (
                f"{path}: key {name!r} stands outside of a table; "
                f"put it under [{COMMON_TABLE}] or a role's table"
            )
            raise ConfigError(message, key=name)
        tables[name] = cast("dict[str, object]", value)
    return tables


def _check_tables(
    schemas: Schemas, tables: Mapping[str, Mapping[str, object]], path: Path
) -> None:
    everywhere = {key for schema in schemas.values() for key in schema.model_fields}
    for table, values in tables.items():
        if table == COMMON_TABLE:
            known = everywhere
        elif table in schemas:
            known = set(schemas[table].model_fields)
        else:
            near = near_matches(table, [*schemas, COMMON_TABLE])
            message = f"{path}: unknown table [{table}]{near}"
            raise ConfigError(message, key=table)
        for key in values:
            if key not in known:
                near = near_matches(key, known)
                message = f"{path}: unknown key {key!r} in [{table}]{near}"
                raise ConfigError(message, key=f"{table}.{key}")


def _variable(name: str) -> str:
    return f"{PREFIX}{name.upper()}"


def _variable_names(schemas: Schemas) -> set[str]:
    names: set[str] = set()
    for role, schema in schemas.items():
        for key in schema.model_fields:
            names |= {_variable(key), _variable(f"{role}_{key}")}
    return names


def _may_be_none(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)


def _is_collection(field: FieldInfo) -> bool:
    annotations = [field.annotation, *get_args(field.annotation)]
    origins = {get_origin(annotation) or annotation for annotation in annotations}
    return bool(origins & {list, tuple, set, frozenset, dict})


def from_text(text: str, field: FieldInfo) -> object:
    """Text as the value that pydantic then checks: JSON or a,b,c for collections."""
    if text == "" and _may_be_none(field):
        return None
    annotation = field.annotation
    nested = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    if not nested and not _is_collection(field):
        return text
    if text.lstrip().startswith(("[", "{")):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    if nested:
        return text
    return [part.strip() for part in text.split(",") if part.strip()]
