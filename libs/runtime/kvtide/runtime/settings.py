"""Settings that every role shares. Frozen, read in one place, passed as arguments.

A role's settings are a subclass of ``RoleSettings`` in its own ``settings.py``. Values
come from a flag, then the environment (``KVTIDE_…``), then a TOML file, then the
default; an unknown key is an error that names it.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretBytes,
    SecretStr,
    ValidationError,
    field_validator,
)

from kvtide.runtime.errors import ConfigError, MissingSettingError
from kvtide.runtime.sources import (
    CONFIG_VARIABLE,
    Given,
    Origin,
    Schemas,
    from_text,
    near_matches,
    read_environment,
    read_file,
)

S = TypeVar("S", bound=BaseModel)

HIDDEN = "********"
_SECRET_NAME = re.compile(r"(^|_)(secret|password|token|api_keys?|engine_key)$")
# drivers take a slash in a password; a port with a path, and the next URL, are none
_URL_PASSWORD = re.compile(r"(?<=://)([^/@\s:]*):(?!\d{1,5}/)((?:[^/@\s]|/(?!/))*)@")
_NATS_TOKEN = re.compile(r"\b(nats|tls|ws|wss)://[^/@\s:]+@")


class RoleSettings(BaseModel):
    """What each process needs to find the others and to be seen."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    nats: str = Field(
        default="nats://127.0.0.1:4222",
        description="URL of the NATS server (or several, comma-separated)",
    )
    nats_key_file: Path | None = Field(
        default=None,
        description="file with the seed of this node's nkey, which the NATS server asks for",
    )
    nats_ca_file: Path | None = Field(
        default=None,
        description="file with the authority that signed the NATS server's certificate; "
        "set: TLS",
    )
    cluster: str = Field(
        default="local",
        pattern=r"^[a-zA-Z0-9_-]+$",
        description="name of the cluster, part of every subject",
    )
    catalog: str = Field(
        default="",
        description="SQLAlchemy URL of the catalog; empty: SQLite in the state folder",
    )
    node: str = Field(
        default="",
        pattern=r"^[a-zA-Z0-9_-]*$",
        description="this node's name; empty: role and a random word",
    )
    state_dir: Path = Field(
        default=Path("~/.kvtide"),
        description="folder for the secret, epochs, logs, SQLite and SSD blocks",
    )
    secret_file: Path | None = Field(
        default=None,
        description="file with the cluster's secret; empty: STATE_DIR/secret, made once",
    )
    shm_dir: Path | None = Field(
        default=Path("/dev/shm"),  # noqa: S108 - the system's shared memory, not a temporary file
        description="folder in memory that this host's roles share; equal for all of them",
    )
    listen: str = Field(
        default="127.0.0.1", description="address that ports of this role bind to"
    )
    advertise: str = Field(
        default="", description="address that others reach this role at; empty: LISTEN"
    )
    http_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="port for /livez, /readyz and /metrics; 0: any free one",
    )
    transfer_port: int = Field(
        default=0, ge=0, le=65535, description="port for bulk bytes; 0: any free one"
    )
    transfer_cert_file: Path | None = Field(
        default=None,
        description="file with this host's certificate for bulk bytes; set: TLS, for "
        "all nodes of a cluster or none",
    )
    transfer_key_file: Path | None = Field(
        default=None, description="file with that certificate's key"
    )
    transfer_ca_file: Path | None = Field(
        default=None, description="file with the authority that signed all of them"
    )
    transfer_engine: str = Field(
        default="",
        pattern=r"^(nixl(:[A-Z0-9_]+)?|mooncake(:[a-z0-9_]+(:[\w.,-]+)?)?)?$",
        description="engine of others for bulk bytes between hosts that both have it: "
        "nixl or nixl:BACKEND, mooncake or mooncake:PROTOCOL[:DEVICE]; empty: none",
    )
    log_level: str = Field(
        default="info",
        pattern="^(debug|info|warning|error)$",
        description="least level logged",
    )
    log_format: str = Field(
        default="console",
        pattern="^(console|json)$",
        description="console or json lines",
    )
    otlp: str = Field(
        default="",
        pattern=r"^(https?://[^\s]+)?$",
        description="URL of an OpenTelemetry collector that takes traces by OTLP over "
        "HTTP, such as http://collector:4318; empty: no traces",
    )
    trace_share: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="share of the requests that are traced, 0 to 1; a client's "
        "traceparent decides for its own",
    )

    @field_validator("*", mode="after")
    @classmethod
    def _expand_home(cls, value: object) -> object:
        return value.expanduser() if isinstance(value, Path) else value


def load_settings(
    cls: type[S],
    role: str,
    *,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    toml_path: Path | None = None,
    schemas: Schemas | None = None,
) -> tuple[S, Mapping[str, Origin]]:
    """The settings of ``role`` and where each value came from.

    Order: ``flags`` (those not None), the environment (``KVTIDE_<ROLE>_X``, then
    ``KVTIDE_X``), the TOML file (``[<role>]``, then ``[common]``), the default.
    ``environ`` None is the process's own; ``toml_path`` None is ``KVTIDE_CONFIG``, if
    set. ``schemas`` are the settings of all roles, whose names are then known too.

    Raises:
        ConfigError: an unknown name, a value that does not fit, or an unreadable file.
    """
    environ = os.environ if environ is None else environ
    schemas = {role: cls} if schemas is None else {**schemas, role: cls}
    if toml_path is None and environ.get(CONFIG_VARIABLE):
        toml_path = Path(environ[CONFIG_VARIABLE])
    given: dict[str, Given] = {}
    if toml_path is not None:
        given |= read_file(schemas, role, toml_path.expanduser())
    given |= read_environment(schemas, role, environ)
    for key, value in (flags or {}).items():
        if key not in cls.model_fields:
            near = near_matches(key, cls.model_fields)
            raise ConfigError(f"unknown setting {key!r} of {role}{near}", key=key)
        if value is not None:
            flag = f"--{key.replace('_', '-')}"
            if isinstance(value, str):
                value = from_text(value, cls.model_fields[key])  # noqa: PLW2901
            given[key] = Given(value, Origin("flag", flag))
    try:
        settings = cls(**{key: item.value for key, item in given.items()})
    except ValidationError as error:
        raise _readable(error, cls, given) from error
    default = Origin("default")
    origins = {
        key: given[key].origin if key in given else default for key in cls.model_fields
    }
    return settings, origins


def shown(key: str, value: object) -> str:
    """``value`` as text for people: secrets and passwords in URLs are hidden."""
    if value is None or value == "":
        return ""
    if isinstance(value, (SecretStr, SecretBytes)) or is_secret_name(key):
        return HIDDEN
    return hide_passwords(str(value))


def is_secret_name(key: str) -> bool:
    """Whether a setting or log field of this name holds a secret."""
    return _SECRET_NAME.search(key) is not None


def hide_passwords(text: str) -> str:
    """``text`` with the password, or NATS token, of each URL in it replaced."""
    text = _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", text)
    return _NATS_TOKEN.sub(rf"\1://{HIDDEN}@", text)


def _readable(
    error: ValidationError, cls: type[BaseModel], given: Mapping[str, Given]
) -> ConfigError:
    """One line for each thing that is wrong, with the name, the value and its origin."""
    lines: list[str] = []
    first = ""
    for item in error.errors(include_url=False):
        path = [str(part) for part in item["loc"]]
        key = ".".join(path)
        first = first or key
        what = item["msg"]
        if item["type"] == "extra_forbidden":
            what = f"no such setting{near_matches(path[-1], cls.model_fields)}"
        line = f"{key}: {what[:1].lower()}{what[1:]}"
        if path and path[0] in given:
            origin = given[path[0]].origin
            line += f" (got {shown(path[-1], item['input'])!r} from {origin})"
        lines.append(line)
    lacks = all(item["type"] == "missing" for item in error.errors(include_url=False))
    kind = MissingSettingError if lacks else ConfigError
    return kind("; ".join(lines), key=first)
