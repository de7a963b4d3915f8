"""Files of measured costs by worker class (see ``kvtide.policy.profiles``)."""

from pathlib import Path

from kvtide.policy.class_costs import ClassProfile
from kvtide.policy.profiles import ProfileError, read_profiles
from kvtide.runtime import ConfigError


def load_profiles(path: Path) -> dict[str, ClassProfile]:
    """The profiles in a TOML or JSON file, by worker class.

    Raises:
        ConfigError: the file can't be read, or isn't one of profiles.
    """
    try:
        text = path.read_text()
    except OSError as error:
        message = f"profiles {path}: {error.strerror or error}"
        raise ConfigError(message) from error
    try:
        return read_profiles(text, json=path.suffix == ".json")
    except ProfileError as error:
        message = f"profiles {path}: {error}"
        raise ConfigError(message) from error
