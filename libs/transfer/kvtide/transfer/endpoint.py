"""An endpoint of this process: regions in shared memory, a port, peers."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtide.runtime import Clock
from kvtide.runtime.tracing import NO_TRACES, Tracer
from kvtide.transfer.alarm import Alarm
from kvtide.transfer.buffers import address_of, memory_at
from kvtide.transfer.capability import CapabilityMint, derive_key
from kvtide.transfer.cuda import (
    PREFIX as CUDA,
    DeviceMemory,
)
from kvtide.transfer.dial import Dialer
from kvtide.transfer.engines.seam import Engine
from kvtide.transfer.errors import (
    OutOfBounds,
    Refused,
    TimedOut,
    TransferError,
    Unreachable,
)
from kvtide.transfer.fence import GivenUp
from kvtide.transfer.handles import PROTOCOL, EndpointAddress
from kvtide.transfer.interface import Notified, Observer, PeerGone, TransferEndpoint
from kvtide.transfer.nics import card_towards
from kvtide.transfer.own_ways import OwnWays, System
from kvtide.transfer.peer import PeerSetup, SocketPeer
from kvtide.transfer.quiet import QuietObserver
from kvtide.transfer.regions import Region, RegionTable
from kvtide.transfer.registrar import Registrar
from kvtide.transfer.server import Identity, Server, check_identity
from kvtide.transfer.shm import shm_host, sweep_shm
from kvtide.transfer.teller import Teller
from kvtide.transfer.tls import TlsFiles, load as load_tls
from kvtide.transfer.topology import Topology, home
from kvtide.transfer.turns import Turns
from kvtide.transfer.upkeep import Upkeep
from kvtide.transfer.verbs import Device
from kvtide.transfer.ways import Surroundings
from kvtide.transfer.wire import pack_ways

log = logging.getLogger("kvtide.transfer")

DEREGISTER_S = 10.0
LONGEST_CONNECT_S = 3600.0
"""So long a wait is for ever; the system's calls take no infinite one."""
WATCH_S = 2.0
EXPIRE_S = 1.0


class Endpoint(TransferEndpoint):
    """See ``TransferEndpoint``. ``async with Endpoint(...)`` starts and ends it.

    ``secret`` is the cluster's; the keys for authentication and capabilities are
    derived from it. ``shm_dir=None`` turns shared memory off. ``lanes`` is the most
    data connections to one of a peer's hosts, ``copy_threads`` the threads that copy from shared
    memory. ``advertise_host`` is what peers connect to (default: ``listen_host``);
    several, separated by commas, are several ways in, and transfers use all of them
    (``listen_host`` is then "0.0.0.0"). "*" are all cards that are up, as they come and
    go; peers hear of it and use those that are there.
    ``rdma_devices`` are the RDMA devices to use, None: all that there are; the i-th of
    ours talks to the i-th of a peer's, as in a network with one rail per device. One that
    appears later is used, one that goes is left.
    ``tracer`` records what is served to requests that are part of a trace.
    ``engine`` carries what goes to peers on other hosts that have such a one too; it is
    opened and closed with the endpoint. Its bytes are not encrypted by ``tls``.
    ``tls`` encrypts all connections: a cluster has it everywhere or nowhere.
    ``topology`` says which cards are far from which memory (``topology.discover``);
    memory lies where its region says, and else at ``location`` (None: the NUMA node
    that this process runs on).
    """

    def __init__(
        self,
        *,
        node: str,
        epoch: int,
        secret: bytes,
        clock: Clock,
        listen_host: str = "127.0.0.1",
        port: int = 0,
        advertise_host: str | None = None,
        shm_dir: Path | None = Path("/dev/shm"),  # noqa: S108
        lanes: int = 2,
        copy_threads: int = 2,
        most_connections: int = 1024,
        observer: Observer | None = None,
        rdma_devices: Sequence[str] | None = (),
        topology: Topology | None = None,
        location: str | None = None,
        system: System | None = None,
        tls: TlsFiles | None = None,
        tracer: Tracer = NO_TRACES,
        engine: Engine | None = None,
    ) -> None:
        """Nothing is opened before ``start``.

        Raises:
            ValueError: the secret is short, the node's name is empty or long, or the
                epoch is negative or of more than 64 bits.
            ConfigError: the TLS files are missing or wrong.
        """
        check_identity(node, epoch)
        self.node, self.epoch = node, epoch
        self._clock, self._lanes, self._listen = clock, lanes, (listen_host, port)
        self._shm_host = shm_host(shm_dir)
        self._shm_dir = shm_dir if self._shm_host else None
        self._key = derive_key(secret, "authentication")
        mint = CapabilityMint(derive_key(secret, "capability"), node, epoch)
        self._table = RegionTable(mint, clock)
        self._observer = None if observer is None else QuietObserver(observer)
        self._topology = topology or Topology({})
        self._home = home() if location is None else location
        system = system or System()
        hosts = advertise_host or listen_host
        self._own = OwnWays(hosts, rdma_devices, system, engine, clock)
        self._registrar = Registrar(self._table, self._shm_dir, system.cuda)
        self._tls = None if tls is None else load_tls(tls)
        self._alarm = Alarm(clock)
        self._watch = Upkeep("watch", self._alarm, clock)
        # on time, however long the other takes
        self._expiry = Upkeep("expiry", self._alarm, clock)
        self._copiers = ThreadPoolExecutor(copy_threads, "transfer-copy")
        self._teller = Teller()
        self._server = Server(
            Identity(node, epoch, self._key, self._tls),
            self._table,
            clock,
            observer=self._observer,
            most_connections=most_connections,
            peer_gone=self._teller.gone,
            notified=self._teller.notified,
            tracer=tracer,
        )
        self._lock, self._turns = threading.Lock(), Turns(clock)
        self._peers: dict[tuple[str, int], SocketPeer] = {}
        self._ended_peers: list[SocketPeer] = []
        self._given_up: dict[str, GivenUp] = {}
        # regions that peers still used when they were taken back
        self._used: list[Region] = []
        self._address: EndpointAddress | None = None
        self._closed = False

    @property
    def address(self) -> EndpointAddress:
        """See ``TransferEndpoint.address``."""
        if self._address is None:
            message = "the endpoint is not started"
            raise RuntimeError(message)
        return self._address

    async def start(self) -> None:
        """See ``TransferEndpoint.start``.

        Raises:
            OSError: the port is taken, or the host is not ours; the message says.
            Refused, Unreachable: an RDMA device or engine that was asked for can't be used.
        """
        self._begin(asyncio.get_running_loop())

    def start_blocking(self) -> None:
        """``start`` without asyncio; done by ``with Endpoint(...)``, which ends it too.

        ``on_notification`` and ``on_peer_gone`` are then called in a thread of the
        endpoint's, one after the other. Raises as ``start``.
        """
        self._begin(None)

    def __enter__(self) -> Self:
        """Start."""
        self.start_blocking()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close_blocking()

    def _begin(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._teller.start(loop)
        if self._shm_dir is not None:
            removed = sweep_shm(self._shm_dir)
            if removed:
                log.info("removed %d leftovers from %s", len(removed), self._shm_dir)
        self._own.open()
        try:
            port = self._server.start(*self._listen, self._own.rdma, self._own.slabs)
        except OSError:
            self._own.close()
            raise
        self._address = EndpointAddress(
            self.node,
            self.epoch,
            ",".join(self._own.hosts),
            port,
            self._shm_host,
            PROTOCOL,
        )
        if self._own.changing:
            self._watch.every(WATCH_S, self.look_again)
        if self._own.rdma is not None:
            self._expiry.every(EXPIRE_S, self._expire)

    async def close(self) -> None:
        """See ``TransferEndpoint.close``."""
        await asyncio.to_thread(self.close_blocking)

    def close_blocking(self) -> None:
        """``close`` for threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers = [*self._peers.values(), *self._ended_peers]
        self._teller.close()
        for peer in peers:
            peer.close()
        self._server.close()
        self._copiers.shutdown()
        self._watch.close()
        self._expiry.close()
        self._alarm.close()
        self._own.close()
        for region in self._table.regions():
            self._table.retire(region)
            region.dispose()
        for region in self._used:
            region.dispose()
        self._registrar.close()

    def look_again(self) -> None:
        """Use the cards and devices that are there now, not those that are gone.

        Transfers under way go on by what is left. Done by itself every ``WATCH_S``
        seconds where that can matter. Blocks for moments; for threads.
        """
        if not self._own.look(self._use_devices) or self._address is None:
            return
        hosts, devices = self._own.hosts, self._own.devices
        self._address = replace(self._address, host=",".join(hosts))
        self._use_devices(devices)
        self._server.tell_ways(pack_ways(len(devices), hosts))

    def _use_devices(self, devices: Sequence[Device | None]) -> None:
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            try:
                peer.devices_changed(devices)
            except TransferError as error:
                log.info("%s does not answer: %s", peer.node, error)

    def _expire(self) -> None:
        if self._own.rdma is not None:
            self._own.rdma.expire(self._clock.monotonic())

    def location_of(self, views: Sequence[memoryview]) -> str:
        """Where memory of ours lies: as its region says, else where this process is."""
        first = next((view for view in views if len(view)), None)
        known = None if first is None else self._table.location_of(address_of(first))
        return known or self._home

    def allocate(self, length: int, *, name: str, location: str = "cpu:0") -> Region:
        """See ``TransferEndpoint.allocate``."""
        return self._registrar.allocate(length, name=name, location=location)

    def register(self, buffer: object, *, name: str, location: str = "cpu:0") -> Region:
        """See ``TransferEndpoint.register``.

        At "cuda:<index>" the buffer is a GPU's memory (see ``cuda.device_memory``), and
        peers reach it by TCP through pinned memory of the host; it has no view.

        Raises:
            Refused: NVIDIA's driver, or that GPU, is not there.
            OutOfBounds: the buffer is not such memory, or not contiguous.
        """
        return self._registrar.register(buffer, name=name, location=location)

    def register_address(
        self, address: int, length: int, *, name: str, location: str = "cpu:0"
    ) -> Region:
        """``register`` for memory that is known by its address alone, writable.

        Raises:
            OutOfBounds: no address or length.
        """
        if address <= 0 or length <= 0:
            raise OutOfBounds(f"region {name!r} needs an address and a length")
        buffer: object = DeviceMemory(address, length)
        if not location.startswith(CUDA):
            buffer = memory_at(address, length)
        return self._registrar.register(buffer, name=name, location=location)

    def register_file(self, path: Path, *, name: str, writable: bool = False) -> Region:
        """Let peers reach a whole file, as long as it is now.

        Peers that see the same file on this host read it directly, around the page
        cache where the file system allows (path "file"); others through us. The file
        must not shrink before ``deregister``.

        Raises:
            Unreachable: it can't be opened.
            TransferError: it is empty.
        """
        return self._registrar.register_file(path, name=name, writable=writable)

    async def deregister(self, region: Region) -> None:
        """See ``TransferEndpoint.deregister``."""
        await asyncio.to_thread(self.deregister_blocking, region)

    def deregister_blocking(self, region: Region) -> None:
        """``deregister`` for threads."""
        self._table.retire(region)
        used = self._still_used(region)
        if self._own.rdma is not None:
            self._own.rdma.forget(region.number)
        self._server.region_gone(region)
        if used is not None and region.staged:
            # a GPU's copy may still need its pinned memory
            self._used.append(region)
        else:
            # memory of ours stays mapped while somebody looks at it
            region.dispose()
        if used is not None:
            raise used

    def _still_used(self, region: Region) -> TimedOut | None:
        try:
            self._table.wait_unused(region, DEREGISTER_S)
        except TimedOut:
            # a peer that reads this slowly loses its connection instead
            self._server.drop_users(region)
            try:
                self._table.wait_unused(region, DEREGISTER_S)
            except TimedOut as error:
                return error
        return None

    async def connect(
        self, address: EndpointAddress, *, timeout_s: float = 5.0
    ) -> SocketPeer:
        """See ``TransferEndpoint.connect``."""
        peer = self._cached(address)
        if peer is not None:
            return peer
        # the time until a thread is free counts too
        deadline_s = self._clock.monotonic() + min(timeout_s, LONGEST_CONNECT_S)
        return await asyncio.get_running_loop().run_in_executor(
            None, partial(self._connect, address, deadline_s)
        )

    def connect_blocking(
        self, address: EndpointAddress, *, timeout_s: float = 5.0
    ) -> SocketPeer:
        """See ``TransferEndpoint.connect_blocking``."""
        deadline_s = self._clock.monotonic() + min(timeout_s, LONGEST_CONNECT_S)
        return self._connect(address, deadline_s)

    def _connect(self, address: EndpointAddress, deadline_s: float) -> SocketPeer:
        """One budget for the turn to dial, the dialling and the first questions."""
        if address.protocol != PROTOCOL:
            raise Refused(
                f"the peer speaks protocol {address.protocol}, we speak {PROTOCOL}",
                node=address.node,
            )
        with self._turns.of((address.node, address.epoch), deadline_s):
            return self._cached(address) or self._open(address, deadline_s)

    def on_peer_gone(self, callback: PeerGone) -> None:
        """See ``TransferEndpoint.on_peer_gone``."""
        self._teller.on_gone(callback)

    def on_notification(self, callback: Notified) -> None:
        """See ``TransferEndpoint.on_notification``."""
        self._teller.on_notified(callback)

    def _cached(self, address: EndpointAddress) -> SocketPeer | None:
        with self._lock:
            if self._closed:
                raise Unreachable("the endpoint is closed", node=address.node)
            peer = self._peers.get((address.node, address.epoch))
        # one that has just gone may not have left yet
        return None if peer is None or peer.gone else peer

    def _open(self, address: EndpointAddress, deadline_s: float) -> SocketPeer:
        near = bool(self._shm_host) and address.shm_host == self._shm_host
        here = Surroundings(self._topology, self._lanes, self._clock, card_towards)
        setup = PeerSetup(
            self._clock,
            self._copiers,
            self._observer,
            self._alarm,
            self._shm_dir if near else None,
            self._own.devices,
            self._own.slabs,
            here,
            self.location_of if self._topology.crosses else None,
        )
        hosts = tuple(address.host.split(","))
        with self._lock:
            # what an earlier connection to the node left behind must not be forgotten
            given_up = self._given_up.setdefault(address.node, GivenUp())
        dialer = Dialer(
            address,
            hosts,
            self.node,
            self.epoch,
            self._key,
            self._clock,
            self._tls,
            given_up,
        )
        peer = SocketPeer(dialer, setup, self._peer_left)
        peer.open(deadline_s)
        with self._lock:
            ended, self._ended_peers = self._ended_peers, []
            closed = self._closed
            if not closed:
                self._peers[address.node, address.epoch] = peer
        for each in ended:
            each.close()
        if closed:
            peer.close()
            raise Unreachable("the endpoint is closed", node=address.node)
        return peer

    def _peer_left(self, peer: SocketPeer) -> None:
        """A peer is gone; its threads are collected at the next chance."""
        key = (peer.node, peer.epoch)
        with self._lock:
            if self._peers.get(key) is peer:
                del self._peers[key]
            if not self._closed:
                self._ended_peers.append(peer)
