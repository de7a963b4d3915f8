"""Settings of a worker whose engine is vLLM, and the environment that it needs."""

import json
import os
import re
from pathlib import Path
from typing import Any, cast

from pydantic import Field

from kvtide.connect.settings import ConnectSettings
from kvtide.engine.settings import WorkerSettings
from kvtide.runtime import ConfigError
from kvtide.runtime.settings import RoleSettings

OURS = ("model", "dtype", "kv_transfer_config", "enable_prefix_caching")
"""Options of vLLM's that the worker sets itself."""

_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
"""Of an adapter: clients ask for it by this."""
_OF_THE_CONNECTOR = ("load_timeout_s", "save_timeout_s", "handover_wait_s", "lease_s")
_OF_THE_WORKER = ("node", "listen", "advertise", "http_port", "transfer_port")


class VllmSettings(WorkerSettings):
    """``kvtide worker --engine vllm``."""

    vllm_options: str = Field(
        default="{}",
        description="more of vLLM's engine arguments, as a JSON object by their names "
        'in Python, such as {"max_model_len": 4096, "enforce_eager": true}',
    )
    lora: str = Field(
        default="{}",
        description="LoRA adapters, as a JSON object of folders by the names that clients "
        'ask for, such as {"my-adapter": "/models/my-adapter"}',
    )
    max_requests: int = Field(
        default=256,
        ge=1,
        le=65_536,
        description="requests that vLLM may have at a time, waiting ones included",
    )
    max_picture_pixels: int = Field(
        default=16 * 1024 * 1024,
        ge=1,
        description="width times height of a picture that is opened, by its own head; at "
        "the gateways the same name says what is sent on",
    )
    load_timeout_s: float = Field(
        default=1.0,
        gt=0,
        description="longest time that a request waits for its blocks; what is not there "
        "is computed",
    )
    save_timeout_s: float = Field(
        default=0.25,
        gt=0,
        description="longest time that a step is held up to hand blocks over",
    )
    handover_wait_s: float = Field(
        default=2.0,
        ge=0,
        description="longest time that a decode waits for the prompt that a prefill "
        "worker has made to show up in the pool",
    )
    lease_s: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="how long the stores keep a prompt for the decode that it is for",
    )

    def options(self) -> dict[str, Any]:
        """VLLM's own arguments.

        Raises:
            ConfigError: they are no JSON object, or set what the worker sets.
        """
        options = _object(self.vllm_options, "vllm_options")
        for name in OURS:
            if name in options:
                raise ConfigError(
                    f"vllm_options can't set {name}: the worker does",
                    key="vllm_options",
                )
        # what somebody has set stays
        return {"enable_lora": True, **options} if self.adapters() else options

    def adapters(self) -> dict[str, Path]:
        """Folders of adapters by their names, always in one order.

        Raises:
            ConfigError: they are no JSON object of folders that are there.
        """
        found: dict[str, Path] = {}
        for name, folder in sorted(_object(self.lora, "lora").items()):
            if not isinstance(folder, str):
                raise ConfigError("lora must name a folder for each name", key="lora")
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"lora {name!r}: a name has 1 to 128 letters, digits and . _ : / -",
                    key="lora",
                )
            path = Path(folder).expanduser().resolve()
            if not path.is_dir():
                raise ConfigError(f"lora {name}: there is no folder {path}", key="lora")
            found[name] = path
        return found

    def connector(self) -> dict[str, Any]:
        """What the connector inside vLLM is told: the same cluster, as this one is."""
        shared = set(RoleSettings.model_fields) - set(_OF_THE_WORKER)
        own = self.model_dump(mode="json", include=shared)
        given = {name: value for name, value in own.items() if value is not None}
        given["keys_of"] = "gateway"
        given["owner_pid"] = os.getpid()
        given |= {name: getattr(self, name) for name in _OF_THE_CONNECTOR}
        return {
            name: given[name] for name in given if name in ConnectSettings.model_fields
        }


def _object(text: str, key: str) -> dict[str, Any]:
    try:
        given: object = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{key}: no JSON: {error}", key=key) from error
    if not isinstance(given, dict):
        raise ConfigError(f"{key} must be an object", key=key)
    return cast("dict[str, Any]", given)


def prepare_environment(settings: VllmSettings) -> None:
    """Set what vLLM reads from the environment, before it is imported.

    Its engine is a process of its own, which must be started afresh: a fork of one with
    threads may hang. What somebody has set stays.
    """
    os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if settings.threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(settings.threads))
