"""The SSD tier of a running store: a device for each of its lives, and what is logged."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
from prometheus_client import Histogram

from kvtide.bus import Node
from kvtide.bus.messages import StoreLoad
from kvtide.kv import NodeId, derive_key
from kvtide.runtime import Clock, ConfigError, TaskScope
from kvtide.store.settings import StoreSettings
from kvtide.store.ssd.device import FilesSpec, SsdDevice, TierFiles
from kvtide.store.ssd.events import SsdCommand, SsdEvent, TierOpened, Tombstone
from kvtide.store.ssd.health import TierState
from kvtide.store.ssd.rules import SsdRules
from kvtide.store.ssd.sealing import TenantKeys
from kvtide.store.ssd.tier import SsdTier

log = structlog.get_logger("kvtide.store")

DISK_SHARE = 0.9
FLUSH_LOOK_S = 0.01

DeletedSpaces = Callable[[], Sequence[Tombstone]]
"""What was deleted while the node was down; called in a thread, may block."""


def no_deleted_spaces() -> Sequence[Tombstone]:
    """For a store that nobody tells."""
    return ()


async def flushed(tier: SsdTier, clock: Clock, limit_s: float) -> bool:
    """Wait until a tier that flushes has nothing left to write; false: it took too long."""
    end_s = clock.monotonic() + limit_s
    while not tier.flushed:
        if clock.monotonic() >= end_s:
            log.warning("ssd_flush_cut_short", limit_s=limit_s, left=tier.unsaved)
            return False
        await clock.sleep(FLUSH_LOOK_S)
    return True


def ssd_dir(settings: StoreSettings) -> Path:
    """Where the tier's files are."""
    return settings.ssd_dir or settings.state_dir / "ssd" / settings.node


def ssd_rules(settings: StoreSettings) -> SsdRules:
    """The tier's limits by the settings and by what the disk has left."""
    return SsdRules(
        capacity_bytes=_capacity_bytes(settings),
        segment_bytes=settings.ssd_segment_bytes,
        write_bytes_per_s=settings.ssd_write_bytes_per_s,
        dram_high=settings.dram_high,
        dram_low=min(settings.dram_low, settings.dram_high),
        ssd_high=settings.ssd_high,
        ssd_low=min(settings.ssd_low, settings.ssd_high),
        promote_hits=settings.ssd_promote_hits,
        stage_share=settings.ssd_stage_share,
        save_s=settings.ssd_save_s,
        sealed=is_sealed(settings),
    )


def is_sealed(settings: StoreSettings) -> bool:
    """Whether blocks on the SSD are encrypted."""
    return settings.ssd_key_file is not None or settings.ssd_key_secret is not None


def _capacity_bytes(settings: StoreSettings) -> int:
    if settings.ssd_bytes == 0:
        return 0
    path = ssd_dir(settings)
    there = next(each for each in (path, *path.parents) if each.exists())
    try:
        space = os.statvfs(there)
        used = sum(each.stat().st_blocks * 512 for each in path.glob("*.seg"))
    except OSError as error:
        # whether it can be used at all is found out when it is opened
        log.warning("ssd_space_unknown", path=str(path), reason=str(error))
        return settings.ssd_bytes
    most = int((space.f_bavail * space.f_frsize + used) * DISK_SHARE)
    if most < settings.ssd_bytes:
        log.warning("ssd_smaller", path=str(path), bytes=most, set=settings.ssd_bytes)
    return max(1, min(settings.ssd_bytes, most))


class SsdLife:
    """See the module."""

    def __init__(
        self,
        node: Node,
        settings: StoreSettings,
        seconds: Histogram,
        deleted: DeletedSpaces,
        keys: TenantKeys | None = None,
    ) -> None:
        """Nothing is opened before the machine says so. ``keys``: records are sealed."""
        self._node = node
        self._settings = settings
        self._seconds = seconds
        self._deleted = deleted
        self._keys = keys
        self._device: SsdDevice | None = None
        self._ending = TaskScope()
        self._said = (TierState.OFF.value, "")

    def begin(
        self, node: NodeId, arena: memoryview, tell: Callable[[SsdEvent], None]
    ) -> None:
        """A life begins; of an earlier one nothing is written into the arena any more."""
        before, self._device = self._device, None
        if before is not None:
            before.end_copies()
            closing = before.close(self._settings.drain_timeout_s)
            self._ending.spawn(closing, name="ssd of an earlier life")
        if self._settings.ssd_bytes == 0:
            return
        if is_sealed(self._settings) and self._keys is None:
            raise ConfigError(
                "blocks on SSD are to be encrypted, and nobody keeps the keys",
                key="ssd_key_file",
            )
        digest = derive_key(self._node.secret, "ssd directory")
        spec = FilesSpec(
            path=ssd_dir(self._settings),
            node=node,
            key_id=int.from_bytes(digest[:8], "little"),
            deleted=self._deleted,
            keys=self._keys,
            plain=self._settings.ssd_plain == "read",
        )

        def heard(event: SsdEvent) -> None:
            if isinstance(event, TierOpened):
                log.info(
                    "ssd_scanned",
                    path=str(spec.path),
                    torn=event.torn,
                    took_s=round(event.took_s, 3),
                    direct=event.direct,
                )
            tell(event)

        clock = self._node.clock
        self._device = SsdDevice(
            TierFiles(spec, arena, clock),
            clock,
            heard,
            read_threads=self._settings.ssd_read_threads,
            seconds=self._seconds,
        )

    def submit(self, command: SsdCommand) -> None:
        """Have the device do it."""
        if self._device is not None:
            self._device.submit(command)

    def note(self, load: StoreLoad) -> None:
        """Log changes of the tier's state."""
        said = (load.ssd_state, load.ssd_reason)
        if said == self._said:
            return
        self._said = said
        bad = load.ssd_state in (TierState.OUT, TierState.READ_ONLY) and said[1]
        (log.warning if bad else log.info)(
            "ssd_state",
            state=load.ssd_state,
            reason=load.ssd_reason,
            blocks=load.ssd_blocks,
            path=str(ssd_dir(self._settings)),
        )

    @property
    def trouble(self) -> str:
        """What is wrong, for people; empty: nothing. From any thread."""
        state, reason = self._said
        return f"{state}: {reason}" if reason else ""

    async def close(self, timeout_s: float) -> None:
        """End what runs, and let go of the directory. Idempotent."""
        device, self._device = self._device, None
        if device is not None:
            await device.close(timeout_s)
        await self._ending.close()
