"""Puts memory of all kinds into an endpoint's table of regions."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from kvtide.transfer.buffers import plain_view
from kvtide.transfer.cuda import (
    PREFIX as CUDA,
    Driver,
    Stage,
    device_memory,
    index_of,
)
from kvtide.transfer.errors import OutOfBounds
from kvtide.transfer.files import file_region
from kvtide.transfer.regions import Region, RegionTable
from kvtide.transfer.shm import create, private_memory

log = logging.getLogger("kvtide.transfer")


class Registrar:
    """Of one endpoint; what its methods do is said in ``Endpoint``. Thread-safe."""

    def __init__(
        self,
        table: RegionTable,
        shm_dir: Path | None,
        cuda: Callable[[int], Driver],
    ) -> None:
        """``cuda`` opens a GPU's driver, at the first region there."""
        self._table = table
        self._shm_dir = shm_dir
        self._cuda = cuda
        self._lock = threading.Lock()
        self._gpus: dict[int, Driver] = {}

    def allocate(self, length: int, *, name: str, location: str) -> Region:
        """Memory of our own, shared where that is possible."""
        if length <= 0:
            raise OutOfBounds(f"region {name!r} must have a length, not {length}")
        if location.startswith(CUDA):
            raise OutOfBounds("a GPU's memory is not allocated here: register it")
        if self._shm_dir is not None:
            try:
                file = create(self._shm_dir, length)
            except OSError as error:
                log.warning(
                    "region %r of %d bytes is not in shared memory: %s; peers on "
                    "this host will read it through TCP, which is slower",
                    name,
                    length,
                    error,
                )
            else:
                return self._table.add(
                    memoryview(file.mapping),
                    name=name,
                    location=location,
                    shm_name=file.name,
                    backing=file,
                )
        memory = private_memory(length)
        return self._table.add(
            memoryview(memory.mapping), name=name, location=location, backing=memory
        )

    def register(self, buffer: object, *, name: str, location: str) -> Region:
        """Memory that is there."""
        if not location.startswith(CUDA):
            return self._table.add(plain_view(buffer), name=name, location=location)
        memory = device_memory(buffer)
        stage = Stage(memory, self._gpu(index_of(location)))
        view = memoryview(b"")
        return self._table.add(view, name=name, location=location, stage=stage)

    def register_file(self, path: Path, *, name: str, writable: bool = False) -> Region:
        """A whole file."""
        backing = file_region(path, writable=writable)
        return self._table.add(
            memoryview(backing.mapping),
            name=name,
            location=f"file:{path}",
            shm_name=backing.file.name(),
            backing=backing,
        )

    def close(self) -> None:
        """Let go of the GPUs, after their regions."""
        with self._lock:
            gpus, self._gpus = self._gpus, {}
        for driver in gpus.values():
            driver.close()

    def _gpu(self, index: int) -> Driver:
        with self._lock:
            driver = self._gpus.get(index)
            if driver is None:
                driver = self._gpus[index] = self._cuda(index)
        return driver
