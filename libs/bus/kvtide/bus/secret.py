"""The cluster's secret: made once, kept with the state, read by every role."""

import os
import secrets
from pathlib import Path

from kvtide.kv import MIN_SECRET_BYTES
from kvtide.runtime import ConfigError

_RECIPE = f"'openssl rand -hex {MIN_SECRET_BYTES}'"


def load_secret(path: Path) -> bytes:
    """The secret in ``path``, as hex; made on the first call, for its owner only.

    When many processes start at once they all get the one that was made first.

    Raises:
        ConfigError: the file can't be read or made, or holds no secret.
    """
    path = path.expanduser()
    try:
        if not path.exists():
            _make(path)
        text = path.read_text(encoding="ascii").strip()
        secret = bytes.fromhex(text)
    except OSError as error:
        raise ConfigError(
            f"the cluster's secret {path} can't be used: {error.strerror}",
            key="secret_file",
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{path} holds no secret: it must be hexadecimal digits; make one with "
            f"{_RECIPE}",
            key="secret_file",
        ) from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"the secret in {path} is too short: it needs {2 * MIN_SECRET_BYTES} "
            f"hexadecimal digits or more; make one with {_RECIPE}",
            key="secret_file",
        )
    return secret


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(MIN_SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            # a link never replaces: whoever is first wins, the others read theirs
            os.link(fresh, path)
        except FileExistsError:
            return
    finally:
        fresh.unlink(missing_ok=True)
