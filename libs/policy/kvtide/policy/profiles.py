"""Measured costs by worker class as TOML or JSON, to seed fits with.

::

    [a800x8.prefill]
    fixed_ms = 0.0
    token_ms = 0.05
    pair_ms = 1.7e-7

    [a800x8.loading]
    fixed_ms = 0.1
    near_byte_ms = 7.8e-9
    far_byte_ms = 1e-8

    [a800x8.step]
    fixed_ms = 7.2
    row_ms = 0.01
    pair_ms = 2e-5

Each of the three tables may be left out; the class ``default`` is for all workers whose
class has none.
"""

import json as json_format
import tomllib
from collections.abc import Mapping
from dataclasses import asdict

import msgspec

from kvtide.policy.class_costs import ClassProfile
from kvtide.policy.curves import LoadCurve, PrefillCurve, StepCurve

DEFAULT_CLASS = "default"


class ProfileError(ValueError):
    """This text holds no profiles; the message says where and why not."""


class _ClassTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefill: PrefillCurve | None = None
    loading: LoadCurve | None = None
    step: StepCurve | None = None


def read_profiles(text: str, *, json: bool = False) -> dict[str, ClassProfile]:
    """Profiles by class; ``default`` under the name "".

    Raises:
        ProfileError: it is not TOML (JSON), a name is unknown, a value no number, or
            below zero.
    """
    try:
        raw = json_format.loads(text) if json else tomllib.loads(text)
        tables = msgspec.convert(raw, dict[str, _ClassTable])
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise ProfileError(str(error)) from error
    profiles: dict[str, ClassProfile] = {}
    for name, table in tables.items():
        for curve in (table.prefill, table.loading, table.step):
            if curve is not None and not all(v >= 0 for v in asdict(curve).values()):
                raise ProfileError(f"{name} has a cost below zero")
        profile = ClassProfile(table.prefill, table.loading, table.step)
        profiles["" if name == DEFAULT_CLASS else name] = profile
    return profiles


def write_profiles(profiles: Mapping[str, ClassProfile], *, json: bool = False) -> str:
    """The text that ``read_profiles`` reads."""
    tables = {
        name or DEFAULT_CLASS: {
            part: asdict(curve)
            for part, curve in (
                ("prefill", profile.prefill),
                ("loading", profile.loading),
                ("step", profile.step),
            )
            if curve is not None
        }
        for name, profile in profiles.items()
    }
    if json:
        return json_format.dumps(tables, indent=2) + "\n"
    lines: list[str] = []
    for name, parts in tables.items():
        for part, values in parts.items():
            lines.append(f"[{json_format.dumps(name)}.{part}]")
            lines += [f"{key} = {value!r}" for key, value in values.items()]
            lines.append("")
    return "\n".join(lines)
