"""Keeps a keyring true: reads the catalog again and again, off every request's path."""

import asyncio
from typing import Protocol

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from kvtide.catalog import (
    HEAD,
    Access,
    Catalog,
    CatalogError,
    CatalogRevisionError,
    is_missing,
    key_prefix,
)
from kvtide.gateway.access.auth_mode import AuthMode
from kvtide.gateway.access.caller import Caller
from kvtide.gateway.access.keyring import Keyring, KeyRules, Refused, judge
from kvtide.runtime import Clock, KvtideError

READ_LIMIT_S = 10.0
FIRST_READ_LIMIT_S = 5.0
LOOK_LIMIT_S = 1.0
LOOK_AGAIN_S = 0.25
"""The least time between two readings that unknown keys ask for."""

log = structlog.get_logger("kvtide.gateway.keys")


class AccessSource(Protocol):
    """Where it is read from."""

    async def read(self, known_revision: int | None) -> Access | None:
        """Who may ask; None: the revision is still ``known_revision``.

        Raises:
            CatalogError: it can't be read.
        """
        ...


class CatalogAccess:
    """Reads a catalog; makes and migrates nothing that is not there."""

    def __init__(self, catalog: Catalog, url: str) -> None:
        """``url`` is the catalog's; nothing is read yet."""
        self._catalog = catalog
        self._url = url
        self._migrated = False

    async def read(self, known_revision: int | None) -> Access | None:
        """See ``AccessSource``. A catalog that was never made holds no keys."""
        if not self._migrated:
            if is_missing(self._url):
                return Access()
            revision = await self._catalog.revision()
            if revision is None:
                return Access()
            if revision != HEAD:
                await self._catalog.migrate()
            self._migrated = True
        if known_revision is not None:
            revision_now = await self._catalog.access_revision()
            if revision_now == known_revision:
                return None
        return await self._catalog.access()


class KeyFollower:
    """The keys that this gateway knows, and since when that is known to be true."""

    def __init__(
        self,
        source: AccessSource,
        rules: KeyRules,
        *,
        clock: Clock,
        registry: CollectorRegistry,
        refresh_s: float,
    ) -> None:
        """Nothing is read before ``start``."""
        self.rules = rules
        self._source = source
        self._clock = clock
        self._refresh_s = refresh_s
        self._ring: Keyring | None = None
        self._read_s = float("-inf")
        self._tried_s = float("-inf")
        self._reading = asyncio.Lock()
        self._looking = asyncio.Lock()
        self._failing = False
        self._refusals = Counter(
            "kvtide_gateway_auth_refusals",
            "requests that their key, or the lack of one, kept out",
            ("why",),
            registry=registry,
        )
        Gauge(
            "kvtide_gateway_keys_age_seconds",
            "how long ago the keys were known to be true; -1: never read",
            registry=registry,
        ).set_function(lambda: -1.0 if self._ring is None else self.age_s)

    @property
    def age_s(self) -> float:
        """How long ago what is known was known to be true."""
        return self._clock.monotonic() - self._read_s

    @property
    def ready(self) -> bool:
        """Whether requests can be judged."""
        return self._ring is not None or self.rules.mode is AuthMode.OPEN

    @property
    def is_open(self) -> bool:
        """Whether whoever reaches the port is served."""
        if self.rules.mode is not AuthMode.AUTO:
            return self.rules.mode is AuthMode.OPEN
        return self._ring is not None and not self._ring.keys_made

    async def start(self) -> None:
        """Read once, and say who may ask."""
        try:
            async with asyncio.timeout(FIRST_READ_LIMIT_S):
                await self.refresh()
        except TimeoutError:
            log.warning("keys can't be read yet", limit_s=FIRST_READ_LIMIT_S)
        self._say()

    async def run(self) -> None:
        """Read again for ever."""
        while True:
            await self._clock.sleep(self._refresh_s)
            was_open, was_ready = self.is_open, self.ready
            await self.refresh()
            if (self.is_open, self.ready) != (was_open, was_ready):
                self._say()

    async def check(self, presented: str | None) -> Caller | Refused:
        """Who asks. A key that is not known is looked for once more first."""
        found = self._judge(presented)
        if presented is not None and _is_unsure(found, presented):
            await self._look_again()
            found = self._judge(presented)
        if isinstance(found, Refused):
            self._refusals.labels(found.value).inc()
        return found

    async def _look_again(self) -> None:
        """Wait for a reading that begins from now on; it is not waited for for long.

        All who ask meanwhile share it, so guesses cost one reading in ``LOOK_AGAIN_S``.
        """
        asked_s = self._clock.monotonic()
        try:
            async with asyncio.timeout(LOOK_LIMIT_S), self._looking:
                pause_s = self._tried_s + LOOK_AGAIN_S - self._clock.monotonic()
                if self._tried_s < asked_s and pause_s > 0:
                    await self._clock.sleep(pause_s)
                if self._tried_s < asked_s:
                    await self.refresh()
        except TimeoutError:
            return

    def _judge(self, presented: str | None) -> Caller | Refused:
        return judge(self.rules, self._ring, self.age_s, presented, self._clock.wall())

    async def refresh(self) -> None:
        """Read once; what can't be read stays as it was."""
        async with self._reading:
            now_s = self._clock.monotonic()
            self._tried_s = now_s
            known = None if self._ring is None else self._ring.revision
            try:
                async with asyncio.timeout(READ_LIMIT_S):
                    access = await self._source.read(known)
            except (KvtideError, TimeoutError) as error:
                self._failed(error)
                return
            if access is not None:
                self._ring = Keyring(access)
                log.info("keys read", revision=access.revision, keys=len(self._ring))
            self._read_s = now_s
            if self._failing:
                self._failing = False
                log.info("keys can be read again")

    def _failed(self, error: Exception) -> None:
        if self._failing:
            return
        self._failing = True
        why = str(error) or type(error).__name__
        newer = isinstance(error, CatalogRevisionError)
        expected = isinstance(error, CatalogError | TimeoutError) and not newer
        say = log.warning if expected else log.error
        say("keys can't be read", why=why, known_for_s=self.rules.max_age_s)

    def _say(self) -> None:
        if self.is_open:
            log.warning(
                "no API key is needed: whoever reaches this port is served",
                tenant=self.rules.default.tenant,
                hint="make a key with kvtide keys make",
            )
        elif self.ready:
            log.info("an API key is needed")


def _is_unsure(found: Caller | Refused, presented: str) -> bool:
    """Whether a newer reading may say otherwise: an unknown key, or the first one."""
    if isinstance(found, Refused):
        return found in (Refused.UNKNOWN, Refused.UNCHECKED)
    return not found.key and key_prefix(presented) is not None
