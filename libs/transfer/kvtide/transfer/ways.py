"""The ways to a peer: rails for its hosts, RDMA devices and foreign engine, as they are now."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvtide.runtime import Clock
from kvtide.transfer.detours import Detours
from kvtide.transfer.dial import Dialer
from kvtide.transfer.dispatch import Dispatcher, MakeCarrier
from kvtide.transfer.engines.carrier import EngineCarrier
from kvtide.transfer.engines.slabs import Slabs
from kvtide.transfer.plan import PIECE_BYTES, REQUEST_BYTES, SHARED_BYTES
from kvtide.transfer.rail import TCP_TIER
from kvtide.transfer.rdma import RdmaCarrier
from kvtide.transfer.rdma_reaches import Owner, Reaches
from kvtide.transfer.rdma_staging import SLOT_BYTES
from kvtide.transfer.schedule import Rail
from kvtide.transfer.tcp import TcpCarrier
from kvtide.transfer.topology import Topology
from kvtide.transfer.verbs import Device

log = logging.getLogger("kvtide.transfer")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What this end has: ``card_towards`` names our card on the way to a host."""

    topology: Topology
    lanes: int
    clock: Clock
    card_towards: Callable[[str], str]


class Ways:
    """See the module. Thread-safe.

    The i-th of our devices talks to the i-th of the peer's.
    """

    def __init__(
        self,
        dialer: Dialer,
        here: Surroundings,
        owner: Owner,
        devices: Sequence[Device | None],
        slabs: Slabs | None = None,
    ) -> None:
        """``devices`` are ours, () where RDMA is not wanted; ``owner`` is the peer.

        ``slabs`` are of a foreign engine that both ends have, None without one.
        """
        self._dialer = dialer
        self._here = here
        self._owner = owner
        self.detours = Detours(dialer.address.node, "rdma", here.clock)
        """Of regions that the peer does not give to RDMA."""
        self._lock = threading.Lock()
        self._devices = tuple(devices)
        self.slabs = slabs
        self._theirs = 0
        self._heard = False
        self._hosts = dialer.hosts
        self._names: set[str] = set()
        self._dispatcher: Dispatcher | None = None
        self.path = "tcp"
        """How most bytes will go."""
        self.limits = (PIECE_BYTES, REQUEST_BYTES)
        """Bytes of a piece and of a request."""
        self.alike = False
        """Whether it makes no difference by which rail a request goes."""

    def rails(self, theirs: int) -> list[tuple[Rail, MakeCarrier]]:
        """The first ones, for a peer that said it has so many devices.

        What was heard by then goes for more.
        """
        with self._lock:
            if not self._heard:
                self._theirs = theirs
            wanted = self._wanted()
            self._names = set(wanted)
        return list(wanted.values())

    def used_by(self, dispatcher: Dispatcher) -> None:
        """These rails are the dispatcher's; it has what is there now from here on."""
        with self._lock:
            self._dispatcher = dispatcher
            self._adapt(dispatcher)

    def change(
        self,
        *,
        theirs: int | None = None,
        hosts: Sequence[str] | None = None,
        devices: Sequence[Device | None] | None = None,
    ) -> None:
        """Have rails for what is there now; None: as before. Not for a rail's thread.

        Before there is a dispatcher it is only remembered.
        """
        with self._lock:
            self._heard = True
            if theirs is not None:
                self._theirs = theirs
            if hosts is not None:
                self._hosts = tuple(hosts)
            if devices is not None:
                self._devices = tuple(devices)
            if self._dispatcher is not None:
                self._adapt(self._dispatcher)

    def _adapt(self, dispatcher: Dispatcher) -> None:
        wanted = self._wanted()
        new = [wanted[name] for name in wanted if name not in self._names]
        old = [name for name in self._names if name not in wanted]
        self._names = set(wanted)
        for name in old:
            log.info("a way to %s is gone: %s", self._dialer.address.node, name)
            dispatcher.remove(name)
        for rail, make in new:
            log.info("a way to %s: %s", self._dialer.address.node, rail.name)
            dispatcher.add(rail, make)

    def _usable(self) -> list[tuple[int, Device]]:
        return [
            (index, device)
            for index, device in enumerate(self._devices[: self._theirs])
            if device is not None
        ]

    def _wanted(self) -> dict[str, tuple[Rail, MakeCarrier]]:
        usable = self._usable()
        # several hosts differ: smaller is fairer
        piece_bytes = SHARED_BYTES if len(self._hosts) > 1 else PIECE_BYTES
        self.path, self.limits = "tcp", (piece_bytes, REQUEST_BYTES)
        slabs = self.slabs
        self.alike = len(self._hosts) == 1 and not usable and slabs is None
        if usable:
            self.path, self.limits = "rdma", (SLOT_BYTES, SLOT_BYTES)
        found = {device.name: self._rdma(index, device) for index, device in usable}
        if slabs is not None:
            name = slabs.engine.name
            self.path, self.limits = name, (SLOT_BYTES, SLOT_BYTES)
            for index in range(self._here.lanes):
                found[f"{name}#{index}"] = self._engine(slabs, index)
        for index in range(self._here.lanes):
            for host in self._hosts:
                found[f"{host}#{index}"] = self._tcp(host, index)
        return found

    def _rdma(self, index: int, device: Device) -> tuple[Rail, MakeCarrier]:
        node, clock = self._dialer.address.node, self._here.clock
        reaches = Reaches(self._owner, clock, node, index, self.detours)
        carrier = partial(
            RdmaCarrier,
            node,
            device,
            index,
            self._owner,
            reaches,
            self._dialer.given_up,
            clock,
        )
        penalties = self._here.topology.penalties(device.name)
        return Rail(device.name, penalties=penalties, most_bytes=SLOT_BYTES), carrier

    def _engine(self, slabs: Slabs, index: int) -> tuple[Rail, MakeCarrier]:
        name = f"{slabs.engine.name}#{index}"
        thread = f"transfer-{name}-{self._dialer.address.node}"
        carrier = partial(EngineCarrier, thread, self._dialer, slabs)
        return Rail(name, most_bytes=SLOT_BYTES), carrier

    def _tcp(self, host: str, index: int) -> tuple[Rail, MakeCarrier]:
        thread = f"transfer-out-{self._dialer.address.node}-{host}-{index}"
        carrier = partial(TcpCarrier, thread, self._dialer.only(host))
        penalties: Mapping[str, float] = {}
        if len(self._hosts) > 1 and self._here.topology.crosses:
            card = self._here.card_towards(host)
            penalties = self._here.topology.penalties(card)
        return Rail(f"{host}#{index}", TCP_TIER, penalties), carrier
