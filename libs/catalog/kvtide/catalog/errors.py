"""Errors of the catalog.

KvtideError
└── CatalogError
    ├── CatalogUnavailableError   down, locked, full or too slow: try again later
    │   └── CatalogLostError      its tables are gone: make them anew, and fill them
    ├── CatalogRejectedError      the database refuses this very row: trying again is pointless
    ├── CatalogRevisionError      the schema is newer than, or foreign to, this program
    │                             (a ConfigError too: starting again will not help)
    └── TenancyError              no such tenant or key, or there is one already
                                  (a ConfigError too: what was asked for is wrong)
"""

from kvtide.runtime import ConfigError, KvtideError


class CatalogError(KvtideError):
    """Something about the catalog went wrong."""


class CatalogUnavailableError(CatalogError):
    """The database is down, locked, full or too slow. Nothing of the batch is in it."""


class CatalogLostError(CatalogUnavailableError):
    """There are no tables where there were some: what was written is lost."""


class CatalogRejectedError(CatalogError):
    """The database refuses what it was given, whenever it is given."""


class CatalogRevisionError(CatalogError, ConfigError):
    """The schema was made by a program that this one does not know."""

    def __init__(self, message: str, *, found: str, known: str) -> None:
        """``found`` is the database's revision, ``known`` the newest one known here."""
        ConfigError.__init__(self, message, key="catalog")
        self.found = found
        self.known = known


class TenancyError(CatalogError, ConfigError):
    """What is asked for can't be done; ``found``: such a thing is there already."""

    def __init__(self, message: str, *, key: str, found: bool = False) -> None:
        """``key`` is what was named wrongly: tenant or key."""
        ConfigError.__init__(self, message, key=key)
        self.found = found
