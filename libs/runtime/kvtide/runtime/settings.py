"""Settings that every role shares. Frozen, read in one place, passed as arguments.

A role's settings are a subclass of ``RoleSettings`` in its own ``settings.py``. Values
come from a flag, then the environment (``KVTIDE_…``), then a TOML file, then the
default; an unknown key is an error that names it.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class RoleSettings(BaseModel):
    """What each process needs to find the others and to be seen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nats: str = Field(
        "nats://127.0.0.1:4222",
        description="URL of the NATS server (or several, comma-separated)",
    )
    cluster: str = Field(
        "local",
        pattern=r"^[a-zA-Z0-9_-]+$",
        description="name of the cluster, part of every subject",
    )
    catalog: str = Field(
        "",
        description="SQLAlchemy URL of the catalog; empty: SQLite in the state folder",
    )
    node: str = Field(
        "",
        pattern=r"^[a-zA-Z0-9_-]*$",
        description="this node's name; empty: role and a random word",
    )
    state_dir: Path = Field(
        Path("~/.kvtide"),
        description="folder for the secret, epochs, logs, SQLite and SSD blocks",
    )
    secret_file: Path | None = Field(
        None,
        description="file with the cluster's secret; empty: STATE_DIR/secret, made once",
    )
    shm_dir: Path | None = Field(
        Path("/dev/shm"),  # noqa: S108 - the system's shared memory, not a temporary file
        description="folder in memory that this host's roles share; equal for all of them",
    )
    listen: str = Field(
        "127.0.0.1", description="address that ports of this role bind to"
    )
    advertise: str = Field(
        "", description="address that others reach this role at; empty: LISTEN"
    )
    http_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="port for /livez, /readyz and /metrics; 0: any free one",
    )
    transfer_port: int = Field(
        0, ge=0, le=65535, description="port for bulk bytes; 0: any free one"
    )
    log_level: str = Field(
        "info", pattern="^(debug|info|warning|error)$", description="least level logged"
    )
    log_format: str = Field(
        "console", pattern="^(console|json)$", description="console or json lines"
    )
