"""A peer over sockets, and over shared memory where the host is the same."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvtide.runtime import Clock
from kvtide.transfer.alarm import Alarm
from kvtide.transfer.asking import Asking
from kvtide.transfer.control import Control
from kvtide.transfer.copier import AT_ONCE_BYTES, Copier, Mover, SharedMover
from kvtide.transfer.detours import Detours
from kvtide.transfer.dial import Dialer
from kvtide.transfer.dispatch import Dispatcher, RailReport
from kvtide.transfer.engines.slabs import Slabs
from kvtide.transfer.errors import (
    Refused,
    StaleEpoch,
    TransferError,
    Unreachable,
)
from kvtide.transfer.files import FileMover
from kvtide.transfer.handles import (
    Operation,
    ReadSlice,
    RegionHandle,
    WriteSlice,
)
from kvtide.transfer.interface import Observer, TransferPeer
from kvtide.transfer.lone import (
    MOST_COPIED_BYTES,
    SMALL_BYTES,
    is_plain,
    read_shared,
    write_shared,
)
from kvtide.transfer.mappings import Mappings
from kvtide.transfer.near import Near
from kvtide.transfer.plan import REQUEST_BYTES
from kvtide.transfer.rail import TCP_TIER
from kvtide.transfer.requests import Batch, Request, in_loop
from kvtide.transfer.routes import Routes
from kvtide.transfer.shm import Attached
from kvtide.transfer.transfer import Transfer
from kvtide.transfer.verbs import Device
from kvtide.transfer.ways import Surroundings, Ways
from kvtide.transfer.wire import Kind, check_handle, unpack_ways

log = logging.getLogger("kvtide.transfer")

MAP_TIMEOUT_S = 5.0
NOTIFY_TIMEOUT_S = 10.0

MOST_UNDER_WAY = 65_536
"""Transfers with one peer at a time; each holds memory of its caller anyway."""

SMALL_TOGETHER_BYTES = 16 << 20
"""Small pieces in shared memory are copied by one thread up to this many bytes."""


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """What an endpoint gives to its peers."""

    clock: Clock
    copiers: Executor
    observer: Observer | None
    alarm: Alarm
    shm_dir: Path | None
    rdma: Sequence[Device | None]
    slabs: Slabs | None
    here: Surroundings
    locate: Callable[[Sequence[memoryview]], str] | None


class SocketPeer(TransferPeer):
    """See ``TransferPeer``. Made by ``Endpoint.connect``."""

    def __init__(
        self, dialer: Dialer, setup: PeerSetup, left: Callable[["SocketPeer"], None]
    ) -> None:
        """``left`` is called once when the peer is gone."""
        self.node = dialer.address.node
        self.epoch = dialer.address.epoch
        self._dialer = dialer
        self._clock = setup.clock
        self._setup = setup
        self._left = left
        self._lock = threading.Lock()
        self._under_way: set[Transfer] = set()
        self._end: TransferError | None = None
        # a peer that does not answer must not keep transfers with others waiting
        self._asking = Asking(self.node)
        files = FileMover(self.node, setup.clock, self._ask_to_map)
        self._files = self._copier_for(files)
        shared: SharedMover | None = None
        self._mappings: Mappings | None = None
        self._copier: Copier | None = None
        self._dispatcher: Dispatcher | None = None
        self._control = Control(
            dialer,
            region_gone=self._region_gone,
            ways=self._hear_of_ways,
            peer_gone=self._lost,
        )
        self._ways = Ways(
            dialer,
            setup.here,
            self._control,
            setup.rdma if setup.shm_dir is None else (),
            setup.slabs if setup.shm_dir is None else None,
        )
        if setup.shm_dir is not None:
            self._mappings = Mappings(
                setup.shm_dir, self.node, setup.clock, self._ask_to_map
            )
            detours = Detours(self.node, SharedMover.path, setup.clock)
            shared = SharedMover(self._mappings, detours)
            self._copier = self._copier_for(shared)
        self._routes = Routes(files, shared)

    def _copier_for(self, mover: Mover) -> Copier:
        return Copier(
            mover, self._setup.copiers, self._asking, self.node, self._by_network
        )

    def open(self, deadline_s: float) -> None:
        """Connect by then; raises as ``TransferEndpoint.connect``."""
        self._control.open(max(0.0, deadline_s - self._clock.monotonic()))
        try:
            wanted = self._copier is None and any(self._setup.rdma)
            left_s = max(0.0, deadline_s - self._clock.monotonic())
            theirs = self._devices_there(left_s) if wanted else 0
            left_s = max(0.0, deadline_s - self._clock.monotonic())
            self._look_for_engine(left_s)
        except TransferError:
            self._control.close()
            raise
        dispatcher = Dispatcher(
            self.node,
            self._ways.rails(theirs),
            self._setup.clock,
            self._setup.alarm,
            self._setup.observer,
            self._lost,
        )
        with self._lock:
            self._dispatcher = dispatcher
        self._ways.used_by(dispatcher)
        if self._end is not None:
            dispatcher.finish(self._end)
        log.info("peer %s epoch %d by %s", self.node, self.epoch, self.path)

    def _devices_there(self, timeout_s: float) -> int:
        """How many RDMA devices the peer has."""
        answer = self._control.ask(Kind.RDMA_DEVICES, b"", timeout_s)
        theirs = answer[0] if answer else 0
        if not theirs:
            log.info("peer %s has no RDMA: TCP is used", self.node)
        return theirs

    def _look_for_engine(self, timeout_s: float) -> None:
        """Use our foreign engine only where the peer has the same."""
        slabs = self._ways.slabs
        if slabs is None:
            return
        ours = slabs.engine.name
        theirs = self._control.ask(Kind.ENGINE_NAME, b"", timeout_s).decode("ascii")
        if theirs != ours:
            log.info("peer %s has no %s: TCP is used", self.node, ours)
            self._ways.slabs = None

    def devices_changed(self, devices: Sequence[Device | None]) -> None:
        """Our RDMA devices are these now; by the endpoint. May block for a moment.

        Raises:
            Unreachable, TimedOut: the peer does not say what it has.
        """
        if self._dispatcher is not None and self._copier is None:
            theirs = self._devices_there(MAP_TIMEOUT_S) if any(devices) else 0
            self._ways.change(theirs=theirs, devices=devices)

    @property
    def path(self) -> str:
        """See ``TransferPeer.path``."""
        return "shm" if self._copier is not None else self._ways.path

    @property
    def gone(self) -> bool:
        """See ``TransferPeer.gone``."""
        return self._end is not None

    def map(self, handle: RegionHandle) -> memoryview:
        """See ``TransferPeer.map``."""
        check_handle(handle, self.node, self.epoch, 0)
        if self._mappings is None:
            raise Refused("the peer is on another host", node=self.node, path="tcp")
        writable = handle.capability[0] > 1
        return self._mappings.reach(handle, writable=writable).view

    async def map_async(self, handle: RegionHandle) -> memoryview:
        """See ``TransferPeer.map_async``."""
        loop = asyncio.get_running_loop()
        try:
            asked = loop.run_in_executor(self._asking, partial(self.map, handle))
        except RuntimeError as error:
            raise Unreachable("the peer is gone", node=self.node) from error
        return await asked

    def close(self) -> None:
        """See ``TransferPeer.close``."""
        self._finish(Unreachable("the peer was closed", node=self.node))
        self._control.close()
        self._asking.shutdown()
        if self._dispatcher is not None:
            self._dispatcher.join()

    def rails(self) -> list[RailReport]:
        """What is known of each way to the peer, shared memory excepted."""
        return [] if self._dispatcher is None else self._dispatcher.reports()

    def near(self, handle: RegionHandle, *, purpose: str) -> Near | None:
        """See ``TransferPeer.near``."""
        mappings = self._mappings
        same = handle.node == self.node and handle.epoch == self.epoch
        if mappings is None or not same or type(handle.capability) is not bytes:
            return None
        started_s = self._clock.monotonic()

        def reach() -> Attached | None:
            if self._end is not None:
                return None
            return mappings.at_hand(handle, writable=False)

        def done(nbytes: int) -> None:
            observer = self._setup.observer
            if observer is not None:
                spent_s = self._clock.monotonic() - started_s
                observer.transferred("shm", purpose, Operation.READ, nbytes, spent_s)

        return None if reach() is None else Near(reach, handle.length, done)

    # ---- submission

    def _start(self, transfer: Transfer, batch: Batch, notify: bytes) -> None:
        dispatcher = self._dispatcher
        if dispatcher is None:
            raise Unreachable("the peer is not connected", node=self.node)
        if len(self._under_way) >= MOST_UNDER_WAY:
            raise Refused(
                f"{MOST_UNDER_WAY} transfers are under way: wait for some first",
                node=self.node,
            )
        writes = transfer.operation is Operation.WRITE
        paths = self._routes.of_all(batch.handles, writes=writes)
        limits = self._ways.limits
        if paths[:1] == ["shm"] and batch.nbytes <= len(paths) * SMALL_BYTES:
            # threads that copy small pieces side by side only wait for one another
            limits = (limits[0], SMALL_TOGETHER_BYTES)
        requests = batch.requests(transfer, paths, limits)
        locate, detours = self._setup.locate, self._ways.detours
        if locate is not None:
            for request in requests:
                request.location = locate(request.views)
        if detours:
            for request in requests:
                if any((handle, writes) in detours for handle in request.handles):
                    request.least_tier = TCP_TIER
        self._under_way.add(transfer)
        finale = partial(self._notify_later, notify) if notify else None
        transfer.begin(len(requests), dispatcher.abort, self._help, finale, self._ended)
        self._hand_out(dispatcher, requests)

    def _start_lone(self, transfer: Transfer, place: ReadSlice | WriteSlice) -> bool:
        """See ``TransferPeer``: the usual case, with nothing in its way."""
        handle, _, memory = place
        dispatcher = self._dispatcher
        if (
            not is_plain(place, self.node, self.epoch)
            or (memory.readonly and transfer.operation is Operation.READ)
            or dispatcher is None
            or self._end is not None
            or transfer.deadline_s <= transfer.started_s
            or type(transfer.purpose) is not str
            or type(transfer.trace) is not str
        ):
            return False
        transfer.nbytes = len(memory)
        writes = transfer.operation is Operation.WRITE
        path = self._routes.of(handle, writes=writes)
        if path == "shm":
            return self._copy_lone(transfer, place)
        if path != "tcp" or not self._ways.alike or self._setup.locate is not None:
            return False
        return self._send_lone(dispatcher, transfer, place)

    def _copy_lone(self, transfer: Transfer, place: ReadSlice | WriteSlice) -> bool:
        handle, offset, memory = place
        if self._mappings is None or len(memory) > MOST_COPIED_BYTES:
            return False
        if len(memory) > AT_ONCE_BYTES and in_loop():
            return False
        writes = transfer.operation is Operation.WRITE
        there = self._mappings.at_hand(handle, writable=writes)
        if there is None or offset + len(memory) > len(there.view):
            return False
        move = write_shared if writes else read_shared
        xxh3 = move(there, offset, memory)
        if xxh3 is None:
            return False
        transfer.done_at_once(xxh3, "shm")
        self._ended(transfer)
        return True

    def _send_lone(
        self,
        dispatcher: Dispatcher,
        transfer: Transfer,
        place: ReadSlice | WriteSlice,
    ) -> bool:
        handle, offset, memory = place
        if len(memory) > REQUEST_BYTES or len(self._under_way) >= MOST_UNDER_WAY:
            return False
        request = Request(transfer, None, [memory], [handle], [offset], len(memory))
        self._under_way.add(transfer)
        transfer.begin(1, dispatcher.abort, dispatcher.help, None, self._ended)
        carrier = dispatcher.at_once(request)
        if carrier is None:
            dispatcher.submit([request])
        else:
            transfer.finish = partial(carrier.finish, request)
        return True

    def _hand_out(self, dispatcher: Dispatcher, requests: list[Request]) -> None:
        if len(requests) == 1 and requests[0].path == "tcp":
            dispatcher.submit(requests)
            return
        if len(requests) == 1 and requests[0].path == "shm" and self._copier:
            self._copier.submit(requests)
            return
        shared = [each for each in requests if each.path == "shm"]
        files = [each for each in requests if each.path == "file"]
        network = [each for each in requests if each.path == "tcp"]
        if shared and self._copier is not None:
            self._copier.submit(shared)
        if files:
            self._files.submit(files)
        if network:
            dispatcher.submit(network)

    def _by_network(self, request: Request) -> None:
        """What the short way does not reach."""
        request.path = "tcp"
        if self._dispatcher is not None:
            self._dispatcher.submit([request])

    def _notify_later(self, message: bytes, transfer: Transfer) -> None:
        try:
            self._asking.submit(self._notify, message, transfer)
        except Refused as error:
            transfer.conclude(error)
        except RuntimeError:
            # the peer is closed, and its threads with it
            transfer.conclude(Unreachable("closed", node=self.node))

    def _notify(self, message: bytes, transfer: Transfer) -> None:
        if transfer.hopeless():
            # nobody hears of a transfer that has failed
            transfer.conclude(None)
            return
        left_s = min(NOTIFY_TIMEOUT_S, max(0.0, transfer.remaining_s()))
        try:
            self._control.ask(Kind.NOTIFY, message, left_s)
        except TransferError as error:
            transfer.conclude(error)
        else:
            transfer.conclude(None)

    def _help(self, transfer: Transfer) -> None:
        for copier in (self._copier, self._files):
            if copier is not None and copier.busy:
                copier.help(transfer)
        if self._dispatcher is not None:
            self._dispatcher.help(transfer)

    # ---- shared memory

    def _ask_to_map(self, body: bytes) -> bytes:
        return self._control.ask(Kind.MAP, body, MAP_TIMEOUT_S)

    def _region_gone(self, region: int) -> None:
        if self._copier is not None:
            self._copier.mover.forget(region)
        self._files.mover.forget(region)

    def _hear_of_ways(self, body: bytes) -> None:
        """News of the peer's; from the control connection's thread, which must go on."""
        theirs, hosts = unpack_ways(body)
        try:
            self._asking.submit(self._change_ways, theirs, hosts)
        except (Refused, RuntimeError) as error:
            log.info("%s has other ways, too late: %s", self.node, error)

    def _change_ways(self, theirs: int, hosts: Sequence[str]) -> None:
        self._ways.change(theirs=theirs if self._copier is None else 0, hosts=hosts)

    # ---- ends and errors

    def _lost(self, error: TransferError) -> None:
        """The peer's process is gone."""
        log.info("peer %s epoch %d is gone: %s", self.node, self.epoch, error)
        reason = type(error) if isinstance(error, StaleEpoch) else Unreachable
        self._finish(reason(f"the peer is gone: {error.message}", node=self.node))

    def _finish(self, error: TransferError) -> None:
        with self._lock:
            if self._end is not None:
                return
            self._end = error
            transfers = list(self._under_way)
            dispatcher = self._dispatcher
        for transfer in transfers:
            transfer.fail(error)
        if dispatcher is not None:
            dispatcher.finish(error)
        if self._copier is not None:
            self._copier.close(error)
        self._files.close(error)
        # what is queued still runs, and hears that the peer is gone
        self._asking.shutdown(wait=False)
        self._left(self)

    def _ended(self, transfer: Transfer) -> None:
        self._under_way.discard(transfer)
        observer = self._setup.observer
        if observer is None:
            return
        path, purpose, operation = transfer.path, transfer.purpose, transfer.operation
        if transfer.failure is not None:
            observer.failed(path, purpose, operation, transfer.failure.kind)
        else:
            seconds = self._setup.clock.monotonic() - transfer.started_s
            observer.transferred(path, purpose, operation, transfer.nbytes, seconds)
