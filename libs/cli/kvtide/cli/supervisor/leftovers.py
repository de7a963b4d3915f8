"""Removes what a supervisor that was killed could not: shared memory of its processes."""

import hashlib
import os
import shutil
import stat
from pathlib import Path

from kvtide.runtime import ConfigError
from kvtide.transfer import sweep_shm

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the system's shared memory


def own_shm_dir(state_dir: Path) -> Path:
    """The folder in shared memory that belongs to this state folder alone."""
    digest = hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:12]
    return SHARED_MEMORY / f"kvtide-up-{os.getuid()}-{digest}"


def make_own_shm_dir(folder: Path) -> None:
    """Make it, for its owner only.

    Raises:
        ConfigError: somebody else's folder is there, or it can't be made.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        message = f"can't make the shared memory folder {folder}: {error.strerror}"
        raise ConfigError(message, key="shm_dir") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        message = f"{folder} is there and not ours: choose another one with --shm-dir"
        raise ConfigError(message, key="shm_dir")


def remove_own_shm_dir(folder: Path) -> int:
    """Remove it with all in it; returns how many files that were.

    Only call it while the state folder's lock is held and no process of it runs.
    """
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return 0
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return 0
    count = sum(1 for _ in folder.iterdir())
    shutil.rmtree(folder, ignore_errors=True)
    return count


def sweep_given_shm_dir(folder: Path) -> int:
    """Remove from a shared folder what no process holds any more."""
    return len(sweep_shm(folder)) if folder.is_dir() else 0
