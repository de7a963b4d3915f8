"""``kvtide worker``: prefill and decode in one process, with one loaded model."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry
from pydantic.fields import FieldInfo

from kvtide.cli.exits import leave
from kvtide.cli.resolve import resolve
from kvtide.cli.roles import ROLES
from kvtide.cli.running import run_process, run_role
from kvtide.cli.settings import wait_passively
from kvtide.connect.vllm_worker.settings import VllmSettings
from kvtide.decode.settings import DecodeSettings
from kvtide.kv import Role
from kvtide.prefill.settings import PrefillSettings
from kvtide.runtime import ConfigError, SystemClock, random_node_name
from kvtide.runtime.sources import near_matches

WORKER_ROLES = (Role.PREFILL, Role.DECODE)
_ROLES_FIELD = FieldInfo(
    annotation=str,
    default="prefill,decode",
    description="what this process does, comma-separated",
)
OWN, VLLM = "kvtide", "vllm"
_ENGINE_FIELD = FieldInfo(
    annotation=str,
    default=OWN,
    description="what computes: kvtide, or vllm, which must be installed beside it",
)


def worker_fields() -> dict[str, FieldInfo]:
    """The flags: those of both roles and of vLLM, ``--roles`` and ``--engine``."""
    return {
        "roles": _ROLES_FIELD,
        "engine": _ENGINE_FIELD,
        **VllmSettings.model_fields,
        **PrefillSettings.model_fields,
        **DecodeSettings.model_fields,
    }


def run_worker(config: Path | None, flags: Mapping[str, object]) -> None:
    """Run until a signal; ends the process with its exit code."""
    leave(lambda _console: _run(config, flags))


def _run(config: Path | None, flags: Mapping[str, object]) -> int:
    roles = _parsed_roles(str(flags.get("roles", _ROLES_FIELD.default)))
    given = {k: v for k, v in flags.items() if k not in ("roles", "engine")}
    engine = str(flags.get("engine", OWN))
    if engine == VLLM:
        from kvtide.cli.commands.vllm_worker import run_vllm  # noqa: PLC0415

        return run_vllm(roles, config, given)
    if engine != OWN:
        raise ConfigError(
            f"engine is {engine!r}: it can be {OWN} or {VLLM}", key="engine"
        )
    if len(roles) == 1:
        return run_role(roles[0].value, config, given)
    given.setdefault("node", random_node_name("worker"))
    both = PrefillSettings.model_fields | DecodeSettings.model_fields
    for key in given.keys() - both.keys():
        raise ConfigError(f"{key} is of --engine {VLLM} alone", key=key)
    prefill = resolve(
        PrefillSettings,
        Role.PREFILL,
        config,
        {key: v for key, v in given.items() if key in PrefillSettings.model_fields},
    )
    decode = resolve(
        DecodeSettings,
        Role.DECODE,
        config,
        {key: v for key, v in given.items() if key in DecodeSettings.model_fields},
    )
    _require_equal(prefill, decode)

    async def serving(stop: asyncio.Event, registry: CollectorRegistry) -> None:
        await _serve(prefill, decode, stop, registry)

    return run_process("worker", prefill, serving)


def _parsed_roles(text: str) -> tuple[Role, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [role.value for role in WORKER_ROLES]
    for name in names:
        if name not in known:
            message = (
                f"a worker can't be {name!r}{near_matches(name, [*known, *ROLES])}"
            )
            raise ConfigError(message, key="roles")
    if not names:
        raise ConfigError("a worker needs a role: prefill, decode or both", key="roles")
    return tuple(role for role in WORKER_ROLES if role.value in names)


def _require_equal(prefill: PrefillSettings, decode: DecodeSettings) -> None:
    """One process has one node, engine and address: what both have must agree."""
    for key in sorted(
        PrefillSettings.model_fields.keys() & DecodeSettings.model_fields
    ):
        if getattr(prefill, key) != getattr(decode, key):
            message = f"{key} differs between [prefill] and [decode]: one process can't have both"
            raise ConfigError(message, key=key)


async def _serve(
    prefill: PrefillSettings,
    decode: DecodeSettings,
    stop: asyncio.Event,
    registry: CollectorRegistry,
) -> None:
    """One node and one engine under both services.

    Raises:
        ConfigError: a setting can't be used, or the model can't be served.
    """
    wait_passively()
    # these load torch
    from kvtide.decode.shell import DecodeService  # noqa: PLC0415
    from kvtide.prefill.shell import PrefillService  # noqa: PLC0415
    from kvtide.worker.app import serve_worker  # noqa: PLC0415

    await serve_worker(
        prefill,
        WORKER_ROLES,
        lambda chassis: [
            PrefillService(chassis, prefill),
            DecodeService(chassis, decode),
        ],
        stop=stop,
        registry=registry,
        clock=SystemClock(),
    )
