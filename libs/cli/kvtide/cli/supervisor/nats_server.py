"""The embedded NATS server: where its binary is and how it is set up."""

import shutil
import sysconfig
from pathlib import Path

from kvtide.runtime import ConfigError

MAX_PAYLOAD_BYTES = 1024 * 1024
"""More than the bus's own limit of 256 KiB with its envelope."""

_CONFIG = """\
# written by kvtide; kvtide up writes it anew each time
listen: "{host}:{port}"
server_name: "{name}"
max_payload: {max_payload}
ping_interval: "5s"
ping_max: 2
write_deadline: "5s"
max_control_line: 4096
{access}"""


def find_nats_server() -> Path:
    """The pinned binary beside this Python, else the one on the PATH.

    Raises:
        ConfigError: there is none.
    """
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    if beside.is_file():
        return beside
    found = shutil.which("nats-server")
    if found is None:
        message = (
            "there is no nats-server: install kvtide[local], put one on the PATH, or "
            "name a server that runs with --nats URL"
        )
        raise ConfigError(message, key="nats")
    return Path(found)


def token_access(token: str) -> str:
    """Everybody who knows the token may do everything."""
    return f'authorization {{ token: "{token}" }}\n'


def write_config(folder: Path, *, host: str, port: int, access: str) -> Path:
    """The server's configuration, readable by its owner only.

    ``access`` says who may do what.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nats.conf"
    path.touch(mode=0o600)
    path.write_text(
        _CONFIG.format(
            host=host,
            port=port,
            name="kvtide",
            max_payload=MAX_PAYLOAD_BYTES,
            access=access,
        )
    )
    return path
