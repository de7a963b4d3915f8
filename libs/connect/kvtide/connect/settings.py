"""Settings of a connector: how to find the cluster, and how long to wait at most."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from kvtide.runtime import ConfigError
from kvtide.runtime.settings import RoleSettings, load_settings


class ConnectSettings(RoleSettings):
    """What an engine's configuration may say of kvtide.

    ``node`` is made up if empty; a connector's own epochs are kept nowhere.
    """

    log_level: str = Field(
        default="warning",
        pattern="^(debug|info|warning|error)$",
        description="least level logged",
    )
    tenant: str = Field(
        default="default",
        min_length=1,
        description="whose the blocks are that no request claims for a tenant",
    )
    model_digest: str = Field(
        default="",
        description="digest of the model's content; empty: made from its files",
    )
    numerics: str = Field(
        default="",
        description="whatever else changes numbers between your engines, in words of your "
        "own: they share blocks where all of it is equal",
    )
    keys_of: Literal["engine", "gateway"] = Field(
        default="engine",
        description="what blocks are known by: the engine's own hashes, or the keys that "
        "gateways derive, which conductors place by (vLLM; engines share blocks with "
        "those that say the same)",
    )
    owner_pid: int = Field(
        default=0,
        ge=0,
        description="process that this engine works for: it is killed when that one ends; "
        "0: none",
    )
    mode: Literal["both", "load", "save"] = Field(
        default="both", description="load blocks, save them, or both"
    )
    load_timeout_s: float = Field(
        default=1.0,
        gt=0,
        description="longest time that the engine waits for blocks at once",
    )
    save_timeout_s: float = Field(
        default=0.25,
        gt=0,
        description="longest time that the engine waits to hand blocks over",
    )
    commit_timeout_s: float = Field(
        default=5.0, gt=0, description="longest time that a store checks what it got"
    )
    pin_timeout_s: float = Field(
        default=1.0, gt=0, description="longest time that a pin is waited for"
    )
    handover_wait_s: float = Field(
        default=1.0,
        ge=0,
        description="longest time that a decode waits for the prompt that a prefill "
        "instance has announced to show up in the pool",
    )
    lease_s: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="how long the stores keep a prompt for the decode that it is for",
    )
    rest_s: float = Field(
        default=1.0,
        gt=0,
        description="how long nothing is tried after a failure; doubles with each",
    )
    rest_limit_s: float = Field(
        default=30.0, gt=0, description="longest such time after many failures"
    )
    staging_bytes: int = Field(
        default=64 << 20,
        ge=1 << 20,
        description="memory in which loaded blocks are verified, allocated when needed",
    )
    open_saves: int = Field(
        default=64, ge=1, description="saves that may wait for their store at once"
    )
    index_blocks: int = Field(
        default=4_000_000, ge=1, description="blocks of the pool that are known at most"
    )

    def secret_path(self) -> Path:
        """The file with the cluster's secret, which must be there.

        Raises:
            ConfigError: there is none; a connector never makes one.
        """
        path = (self.secret_file or self.state_dir / "secret").expanduser()
        if not path.is_file():
            raise ConfigError(
                f"there is no cluster secret at {path}: start kvtide here once, or name "
                "the file with 'secret_file' (its folder with 'state_dir')",
                key="secret_file",
            )
        return path


def connect_settings(given: dict[str, object]) -> ConnectSettings:
    """The settings in an engine's configuration; the environment gives none.

    Raises:
        ConfigError: an unknown name or a value that does not fit; it is named.
    """
    settings, _ = load_settings(ConnectSettings, "connect", flags=given, environ={})
    return settings
