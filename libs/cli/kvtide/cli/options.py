"""Flags made from a settings class: one for each field, with its words and default."""

import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic.fields import FieldInfo

from kvtide.runtime import ConfigError
from kvtide.runtime.settings import is_secret_name, shown

_METAVARS: dict[object, str] = {int: "NUMBER", float: "NUMBER", Path: "PATH"}


def config_option() -> Any:
    """``--config``, that every command with settings has."""
    return typer.Option(
        "--config",
        help="TOML file with settings, tables by role and one called common. Default: $KVTIDE_CONFIG.",
        metavar="PATH",
        show_default=False,
    )


Run = Callable[[Path | None, Mapping[str, object]], None]
"""Called with the path of ``--config`` and the flags that were given, by setting."""


def with_flags(fields: Mapping[str, FieldInfo], run: Run) -> Callable[[], None]:
    """A function that typer makes a command of, with a flag for each field.

    Flags hand over text: whether it fits is decided where settings are checked, so
    that all sources give the same words.
    """
    parameters = [
        _parameter("config", Annotated[str | None, config_option()]),
        *(
            _parameter(key, _flag(key, field))
            for key, field in fields.items()
            # a process list shows flags to everybody
            if not is_secret_name(key)
        ),
    ]

    def command(**values: object) -> None:
        config = values.pop("config")
        path = Path(str(config)) if config else None
        run(path, {key: value for key, value in values.items() if value is not None})

    # typer reads names, kinds and help off the signature
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {item.name: item.annotation for item in parameters}
    return command


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _flag(key: str, field: FieldInfo) -> Any:
    kind = bool if field.annotation is bool else str
    return Annotated[kind | None, _option(key, field)]


def _option(key: str, field: FieldInfo) -> Any:
    flag = "--" + key.replace("_", "-")
    required = field.is_required()
    default = "" if required else shown(key, field.get_default())
    names = [f"{flag}/--no-{flag[2:]}"] if field.annotation is bool else [flag]
    described = field.description or ""
    words = described[:1].upper() + described[1:] + "." if described else ""
    if required:
        words += " Required."
    elif default:
        words = f"{words} Default: {default}."
    return typer.Option(
        *names,
        help=words.strip() or None,
        metavar=_METAVARS.get(field.annotation, "TEXT"),
        show_default=False,
    )


C = TypeVar("C", bound=StrEnum)


def chosen(kind: type[C], text: str, flag: str) -> C:
    """One of the words that a flag takes.

    Raises:
        ConfigError: another one.
    """
    try:
        return kind(text)
    except ValueError:
        words = ", ".join(kind)
        raise ConfigError(f"--{flag} {text!r}: give one of {words}", key=flag) from None
