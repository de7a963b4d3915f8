"""The memory that holds the blocks: one shared region, its size, and who may write."""

import os
from pathlib import Path

import structlog

from kvtide.runtime import ConfigError
from kvtide.transfer import (
    Access,
    Region,
    RegionHandle,
    TransferEndpoint,
    TransferError,
    huge_pages,
)

log = structlog.get_logger("kvtide.store")

DEFAULT_LIMIT_BYTES = 2 << 30
WRITE_TTL_S = 60.0
PAGE_BYTES = 4096


def free_bytes(shm_dir: Path) -> int:
    """What the file system of the shared memory has left."""
    space = os.statvfs(shm_dir)
    return space.f_bavail * space.f_frsize


def arena_bytes(
    wanted: int, shm_dir: Path | None, available_bytes: int | None = None
) -> int:
    """The arena's size: as set, or a quarter of what is free up to 2 GiB.

    If it is not set it is no more than half of ``available_bytes`` either: the shared
    memory may look larger than what the control group allows.

    Raises:
        ConfigError: there is no shared memory, or less than was asked for.
    """
    if shm_dir is None:
        raise ConfigError(
            "a store needs shared memory: set shm_dir to a folder in memory that "
            "the workers of this host use too",
            key="shm_dir",
        )
    try:
        free = free_bytes(shm_dir)
    except OSError as error:
        raise ConfigError(
            f"shm_dir {shm_dir} can't be used: {error.strerror or error}", key="shm_dir"
        ) from error
    size = wanted or min(free // 4, DEFAULT_LIMIT_BYTES)
    if not wanted and available_bytes is not None:
        size = min(size, max(PAGE_BYTES, available_bytes // 2))
    size -= size % PAGE_BYTES
    if not 0 < size <= free:
        raise ConfigError(
            f"an arena of {wanted or size} bytes does not fit into {shm_dir}, which has "
            f"{free} free: set dram_bytes to less, or give the folder more memory",
            key="dram_bytes",
        )
    return size


def note_huge_pages(shm_dir: Path | None) -> None:
    """Say, once, whether the arena has huge pages; what to do if it has none."""
    if shm_dir is None:
        return
    option = huge_pages(shm_dir)
    if option == "never":
        log.info(
            "arena_without_huge_pages",
            shm_dir=str(shm_dir),
            advice=f"mount -o remount,huge=advise {shm_dir}",
        )
    else:
        log.info("arena_with_huge_pages", shm_dir=str(shm_dir), option=option)


class Arena:
    """The store's region. ``view`` is the memory; peers read it one-sided."""

    def __init__(self, endpoint: TransferEndpoint, length: int) -> None:
        """Allocate it; nothing of it is backed before it is asked for.

        Raises:
            ConfigError: it is not shared memory after all.
        """
        self._endpoint = endpoint
        self._region: Region = endpoint.allocate(length, name="arena")
        if not self._region.handle().shm_name and endpoint.address.shm_host:
            raise ConfigError(
                f"{length} bytes of shared memory can't be had: set dram_bytes to less",
                key="dram_bytes",
            )

    @property
    def view(self) -> memoryview:
        """All of it."""
        return self._region.view

    def back(self, offset: int, length: int) -> bool:
        """Have real memory behind a range; false: there is none now.

        Blocks while the kernel clears pages, about 10 ms for 32 MiB.
        """
        try:
            self._region.commit(offset, length)
        except TransferError as error:
            log.warning("arena_not_backed", error=str(error))
            return False
        return True

    def give_back(self, offset: int, length: int) -> None:
        """Let the host have the memory behind whole pages; they read as zeros.

        Takes some milliseconds for 32 MiB.
        """
        try:
            self._region.release(offset, length)
        except OSError as error:
            # it stays: the next writer finds it there
            log.warning("arena_not_given_back", error=str(error))

    def readable(self) -> RegionHandle:
        """The right to read, for everyone."""
        return self._region.handle()

    def writable(self) -> RegionHandle:
        """The right to map for writing, for a worker on this host, for a minute."""
        return self._region.handle(Access.WRITE, ttl_s=WRITE_TTL_S)

    async def close(self) -> None:
        """End access and give the memory back."""
        await self._endpoint.deregister(self._region)
