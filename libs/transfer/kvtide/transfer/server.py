"""The port: accepts peers, proves them, and serves their reads and writes.

A thread for each connection: it blocks in the kernel with the GIL free, and bytes go
between the socket and the region with no copy of ours in between.
"""

import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvtide.runtime import Clock
from kvtide.runtime.tracing import NO_TRACES, Tracer
from kvtide.transfer.census import Census
from kvtide.transfer.channel import Channel
from kvtide.transfer.engines.slabs import Slabs
from kvtide.transfer.errors import Refused, TimedOut, TransferError
from kvtide.transfer.fence import Shut
from kvtide.transfer.handshake import Session, Verdict, receive
from kvtide.transfer.inbound import Inbound
from kvtide.transfer.interface import Notified, Observer, PeerGone
from kvtide.transfer.rdma_owner import RdmaOwner
from kvtide.transfer.regions import Region, RegionTable
from kvtide.transfer.tls import Tls, channel_for

log = logging.getLogger("kvtide.transfer")

HANDSHAKE_S = 5.0
MOST_UNPROVED = 64


@dataclass(frozen=True, slots=True)
class Identity:
    """Who we are and what proves it."""

    node: str
    epoch: int
    key: bytes
    tls: Tls | None


def check_identity(node: str, epoch: int) -> None:
    """Raise ValueError for a name or an epoch that no frame has room for."""
    if not 1 <= len(node.encode()) <= 255:  # noqa: PLR2004
        message = "a node's name has 1 to 255 bytes"
        raise ValueError(message)
    if not 0 <= epoch < 1 << 64:
        message = f"an epoch is a number of 64 bits, not {epoch}"
        raise ValueError(message)


class Server:
    """The listening socket and all inbound connections of one endpoint."""

    def __init__(
        self,
        identity: Identity,
        table: RegionTable,
        clock: Clock,
        *,
        observer: Observer | None,
        most_connections: int,
        peer_gone: PeerGone,
        notified: Notified,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        """Nothing is opened before ``start``."""
        self._identity = identity
        self._table = table
        self._clock = clock
        self._observer = observer
        self._peer_gone = peer_gone
        self._notified = notified
        self._tracer = tracer
        self._lock = threading.Lock()
        # a core that only receives has time to hash for those that send
        self._hasher = ThreadPoolExecutor(1, "transfer-hash")
        self._census = Census(most_connections)
        self._shut = Shut()
        self._inbound: dict[Channel, Inbound | None] = {}
        self._threads: set[threading.Thread] = set()
        self._unproved = 0
        self._closing = False
        self._told = b""
        self._listener: socket.socket | None = None
        self._rdma: RdmaOwner | None = None
        self._slabs: Slabs | None = None
        self._acceptor: threading.Thread | None = None

    def start(
        self, host: str, port: int, rdma: RdmaOwner | None, slabs: Slabs | None
    ) -> int:
        """Listen; the port that it is.

        Raises:
            OSError: the address can't be used.
        """
        self._rdma, self._slabs = rdma, slabs
        listener = socket.create_server((host, port), backlog=128)
        self._listener = listener
        self._acceptor = threading.Thread(
            target=self._accept, args=(listener,), name="transfer-accept", daemon=True
        )
        self._acceptor.start()
        return int(listener.getsockname()[1])

    def close(self) -> None:
        """End the listener and all connections, and wait for their threads."""
        with self._lock:
            self._closing = True
            channels = list(self._inbound)
            threads = list(self._threads)
        if self._listener is not None:
            # closing alone does not wake a blocked accept
            try:
                self._listener.shutdown(socket.SHUT_RDWR)
            except OSError:
                log.debug("listener was closed already")
            if self._acceptor is not None:
                self._acceptor.join()
            self._listener.close()
        for channel in channels:
            channel.shutdown()
        for thread in threads:
            thread.join()
        self._hasher.shutdown()

    def region_gone(self, region: Region) -> None:
        """Tell all peers that mapped the region."""
        for inbound in self._proved():
            inbound.region_gone(region.number)

    def tell_ways(self, body: bytes) -> None:
        """Tell all peers of other ways to us, later ones too; see ``wire.pack_ways``.

        By one thread at a time.
        """
        with self._lock:
            self._told = body
        for inbound in self._proved():
            inbound.tell_ways(body)

    def _tell_what_was_told(self, inbound: Inbound) -> None:
        """To a peer that came with an address of before, or between two words."""
        told = b""
        while told != self._told:
            told = self._told
            inbound.tell_ways(told)

    def drop_users(self, region: Region) -> None:
        """Cut the connections that use the region now."""
        for inbound in self._proved():
            if inbound.uses(region.number):
                inbound.channel.shutdown()

    def _proved(self) -> list[Inbound]:
        with self._lock:
            return [each for each in self._inbound.values() if each is not None]

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, where = listener.accept()
            except OSError as error:
                if self._closing:
                    return
                # out of descriptors, or the caller left already: both pass
                log.warning("accept failed: %s", error)
                threading.Event().wait(0.1)
                continue
            try:
                self._admit_stranger(sock, f"{where[0]}:{where[1]}")
            except Exception:
                # one connection less, but the port goes on
                log.exception("taking a connection failed")
                sock.close()

    def _admit_stranger(self, sock: socket.socket, where: str) -> None:
        reason = ""
        with self._lock:
            if self._closing:
                sock.close()
            elif self._unproved >= MOST_UNPROVED:
                sock.close()
                reason = "too many connections wait for their proof"
            else:
                reason = self._begin(sock, where)
        if reason:
            self._refused(where, reason)

    def _begin(self, sock: socket.socket, where: str) -> str:
        """Give a connection its thread; why it can't be, else "". With the lock held."""
        channel = channel_for(sock, self._identity.tls, server=True)
        thread = threading.Thread(
            target=self._run,
            args=(channel, where),
            name=f"transfer-in-{where}",
            daemon=True,
        )
        self._unproved += 1
        self._inbound[channel] = None
        self._threads.add(thread)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            # the limit of threads, which passes
            self._unproved -= 1
            del self._inbound[channel]
            self._threads.discard(thread)
            channel.close()
            return f"there is no thread for it: {error}"
        return ""

    def _run(self, channel: Channel, where: str) -> None:
        session: Session | None = None
        try:
            session = self._prove(channel, where)
            if session is not None:
                self._serve(channel, session)
        except Exception:
            log.exception("serving %s failed", where)
        finally:
            with self._lock:
                self._inbound.pop(channel, None)
                self._threads.discard(threading.current_thread())
                last = session is not None and self._census.leave(
                    session.node, session.epoch
                )
            channel.close()
            if last and session is not None:
                self._peer_gone(session.node, session.epoch)

    def _prove(self, channel: Channel, where: str) -> Session | None:
        deadline_s = self._clock.monotonic() + HANDSHAKE_S

        def check() -> None:
            if self._clock.monotonic() > deadline_s:
                raise TimedOut(f"no proof within {HANDSHAKE_S:g} s")

        admitted: list[tuple[str, int]] = []

        def admit(node: str, epoch: int) -> Verdict:
            with self._lock:
                verdict = self._census.admit(node, epoch)
            if verdict is Verdict.WELCOME:
                admitted.append((node, epoch))
            return verdict

        identity = self._identity
        us = (identity.node, identity.epoch)
        session: Session | None = None
        try:
            channel.open(check)
            session = receive(channel, identity.key, us, admit, check)
        except (TransferError, OSError) as error:
            self._refused(where, str(error))
            return None
        finally:
            with self._lock:
                self._unproved -= 1
                if session is None:
                    for node, epoch in admitted:
                        self._census.leave(node, epoch)
        return session

    def _serve(self, channel: Channel, session: Session) -> None:
        inbound = Inbound(
            channel,
            session,
            self._table,
            self._clock,
            self._observer,
            self._rdma,
            self._slabs,
            self._notified,
            self._hasher,
            self._shut,
            self._tracer,
        )
        with self._lock:
            if self._closing:
                return
            self._inbound[channel] = inbound
            older = [
                each
                for each in self._inbound.values()
                if each is not None
                and self._census.outdated(each.session.node, each.session.epoch)
            ]
        for each in older:
            each.channel.shutdown()
        self._tell_what_was_told(inbound)
        try:
            inbound.run()
        except Refused as error:
            self._refused(session.node, str(error))
        except (TransferError, OSError) as error:
            log.debug("connection of %s ended: %s", session.node, error)

    def _refused(self, where: str, reason: str) -> None:
        log.warning("refused %s: %s", where, reason)
        if self._observer is not None:
            self._observer.refused(reason)
