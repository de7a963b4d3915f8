"""When keys are asked for; apart from the rest, for settings are read by every command."""

from enum import StrEnum


class AuthMode(StrEnum):
    """When keys are asked for.

    ``AUTO``: from the first key on that was ever made. ``REQUIRED``: always. ``OPEN``:
    never, whatever the catalog says.
    """

    AUTO = "auto"
    REQUIRED = "required"
    OPEN = "open"
