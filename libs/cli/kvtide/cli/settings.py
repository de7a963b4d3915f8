"""Settings of ``kvtide up``, and the environment that its processes get."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator

DEFAULT_PORT = 8000
DEMO_MODEL = "demo"


class UpSettings(BaseModel):
    """What ``kvtide up`` starts. Roles also read their own settings, as ever."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    host: str = Field(
        default="127.0.0.1", description="address that the gateway listens on"
    )
    port: int = Field(
        default=DEFAULT_PORT, ge=1, le=65535, description="port of the gateway"
    )
    model: str = Field(
        default=DEMO_MODEL,
        min_length=1,
        description="a folder, a hub id, or demo: SmolLM2-135M-Instruct",
    )
    prefill: int = Field(default=1, ge=0, le=64, description="prefill workers")
    decode: int = Field(default=1, ge=0, le=64, description="decode workers")
    worker: int = Field(
        default=0, ge=0, le=64, description="workers that do both in one process"
    )
    spare: bool = Field(
        default=True,
        description="keep one more worker in reserve with the model loaded, which takes "
        "the place of a prefill or decode worker that dies",
    )
    conductors: int = Field(default=1, ge=1, le=16, description="conductors")
    threads: int = Field(
        default=0, ge=0, le=1024, description="threads of each worker; 0: all cores"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="number format of weights, activations and KV of all workers",
    )
    device: str = Field(
        default="cpu",
        min_length=1,
        description="what workers compute on: cpu, auto, or a device of torch's such as cuda",
    )
    dram: ByteSize = Field(
        default=ByteSize(0),
        ge=0,
        description="memory of the store for KV blocks, such as 512MiB; 0: a quarter of "
        "the free shared memory, at most 2 GiB",
    )
    ssd: ByteSize = Field(
        default=ByteSize(4 << 30),
        ge=0,
        description="disk in the state folder for KV blocks that memory has no room "
        "for, such as 20GiB, at most nine tenths of what is free; 0: none",
    )
    state_dir: Path = Field(
        default=Path("~/.kvtide"),
        description="folder for the secret, the catalog, logs and what runs",
    )
    shm_dir: Path | None = Field(
        default=None,
        description="folder in memory for KV blocks; empty: one of its own in /dev/shm",
    )
    cache_dir: Path = Field(
        default=Path("~/.cache/kvtide"), description="folder for the demo model"
    )
    nats: str = Field(default="", description="URL of a NATS server; empty: start one")
    secure: bool = Field(
        default=False,
        description="give each role a key of its own for the NATS server that is started, "
        "with no more rights than it needs, over TLS; without: one token for all",
    )
    catalog: str = Field(
        default="", description="SQLAlchemy URL; empty: SQLite in the state folder"
    )
    cluster: str = Field(
        default="local", pattern=r"^[a-zA-Z0-9_-]+$", description="name of the cluster"
    )
    log_level: str = Field(
        default="info",
        pattern="^(debug|info|warning|error)$",
        description="least level logged",
    )
    otlp: str = Field(
        default="",
        pattern=r"^(https?://[^\s]+)?$",
        description="URL of an OpenTelemetry collector (OTLP over HTTP) that every "
        "role sends traces to; empty: no traces",
    )
    ready_timeout_s: float = Field(
        default=900.0, gt=0, description="how long the model may take to answer"
    )

    @field_validator("*", mode="after")
    @classmethod
    def _expand_home(cls, value: object) -> object:
        return value.expanduser() if isinstance(value, Path) else value


def process_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with ``changes``, for a process that it starts.

    A terminal's width and colours are not for processes that write into files.
    """
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES")
    }
    return {**kept, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1", **changes}


def wait_passively() -> None:
    """Have torch's threads of this process sleep while they wait, unless told otherwise.

    Call before torch is imported, which reads it. On few cores, threads that spin while
    they wait cost ten times.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def own_command() -> tuple[str, ...]:
    """How this program is started again."""
    return (sys.executable, "-m", "kvtide.cli")
