"""What leads to an endpoint: its hosts and RDMA devices, as they are now."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtide.runtime import Clock
from kvtide.transfer.cuda import CudaDriver, Driver
from kvtide.transfer.engines.seam import Engine
from kvtide.transfer.engines.slabs import Slabs
from kvtide.transfer.errors import TransferError
from kvtide.transfer.nics import hosts_here
from kvtide.transfer.rdma_owner import RdmaOwner
from kvtide.transfer.verbs import Device, device_names

log = logging.getLogger("kvtide.transfer")

ALL_CARDS = "*"
"""Advertise the addresses of all cards that are up."""


@dataclass(frozen=True, slots=True)
class System:
    """How to find out what this machine has."""

    device_names: Callable[[], list[str]] = device_names
    open_device: Callable[[str], Device] = Device
    hosts: Callable[[], tuple[str, ...]] = hosts_here
    cuda: Callable[[int], Driver] = CudaDriver


class OwnWays:
    """See the module. ``look`` is for one thread at a time, the rest for any.

    ``wanted`` are the RDMA devices to use, None: all that there are.
    """

    def __init__(
        self,
        advertised: str,
        wanted: Sequence[str] | None,
        system: System,
        engine: Engine | None,
        clock: Clock,
    ) -> None:
        """Nothing is opened before ``open``."""
        self._advertised = advertised
        self._wanted = wanted
        self._system = system
        self._engine = engine
        self._clock = clock
        self._looking = threading.Lock()
        self.hosts = tuple(advertised.split(","))
        self.rdma: RdmaOwner | None = None
        self.slabs: Slabs | None = None
        """What a foreign engine reaches; None without one."""

    @property
    def changing(self) -> bool:
        """Whether looking again can find anything else."""
        return self._advertised == ALL_CARDS or self.rdma is not None

    @property
    def devices(self) -> tuple[Device | None, ...]:
        """The RDMA devices by number, None where one is gone."""
        return () if self.rdma is None else tuple(self.rdma.devices)

    def open(self) -> None:
        """Find the hosts, and open the devices and the engine.

        Raises:
            Refused, Unreachable: one that was asked for can't be used.
        """
        self._find_hosts()
        self._open_devices()
        if self._engine is not None:
            try:
                self._engine.open(self.hosts[0])
            except TransferError:
                self.close()
                raise
            self.slabs = Slabs(self._engine, self._clock)

    def _open_devices(self) -> None:
        if self._wanted is not None and not self._wanted:
            return
        names = self._system.device_names() if self._wanted is None else self._wanted
        devices: list[Device] = []
        try:
            devices.extend(self._system.open_device(name) for name in names)
        except TransferError:
            for device in devices:
                device.close()
            raise
        self.rdma = RdmaOwner(devices)

    def look(self, leaving: Callable[[Sequence[Device | None]], None]) -> bool:
        """Look again at what there is; whether it is different.

        ``leaving`` is called with the devices that stay, before others are closed.
        """
        with self._looking:
            before = (self.hosts, self.devices)
            self._find_hosts()
            if self.rdma is not None:
                self._look_at_devices(self.rdma, leaving)
            return before != (self.hosts, self.devices)

    def close(self) -> None:
        """Give the devices back, and end the engine."""
        with self._looking:
            if self.slabs is not None:
                self.slabs.close()
            if self.rdma is not None:
                self.rdma.close()

    def _find_hosts(self) -> None:
        if self._advertised == ALL_CARDS:
            self.hosts = self._system.hosts() or ("127.0.0.1",)

    def _look_at_devices(
        self, rdma: RdmaOwner, leaving: Callable[[Sequence[Device | None]], None]
    ) -> None:
        names = self._system.device_names()
        if self._wanted is not None:
            names = [name for name in names if name in self._wanted]
        gone = rdma.gone(names)
        if gone:
            leaving([None if each in gone else each for each in self.devices])
        for device in gone:
            log.warning("the RDMA device %s is gone", device.name)
            rdma.retire(device)
        for name in rdma.missing(names):
            try:
                self._take(rdma, name)
            except TransferError as error:
                log.info("the RDMA device %s cannot be used: %s", name, error)

    def _take(self, rdma: RdmaOwner, name: str) -> None:
        device = self._system.open_device(name)
        try:
            rdma.add(device)
        except TransferError:
            device.close()
            raise
        log.info("a new RDMA device: %s", name)
