"""One proved inbound connection: answers its requests in order, in one thread."""

import logging
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import Executor

from xxhash import xxh3_64_intdigest

from kvtide.runtime import Clock
from kvtide.runtime.tracing import NO_SPAN, Span, SpanKind, Tracer
from kvtide.transfer.channel import Channel, Stillness
from kvtide.transfer.claims import claim_all, release_all, wanted_access
from kvtide.transfer.cuda import Window
from kvtide.transfer.engines.owner import InboundEngine
from kvtide.transfer.engines.slabs import Slabs
from kvtide.transfer.engines.wire import SlotAsk, pack_digests, unpack_slot_ask
from kvtide.transfer.errors import (
    Corrupt,
    Refused,
    TimedOut,
    TransferError,
    Unreachable,
)
from kvtide.transfer.fence import Shut
from kvtide.transfer.handles import Access, Operation
from kvtide.transfer.handshake import Session, Use
from kvtide.transfer.hashed import HASH_FIRST_BYTES, receive_hashed, send_hashed
from kvtide.transfer.inbound_rdma import InboundRdma
from kvtide.transfer.interface import Notified, Observer
from kvtide.transfer.rdma_owner import RdmaOwner
from kvtide.transfer.regions import Grant, RegionTable, check_range
from kvtide.transfer.shm import unbacked
from kvtide.transfer.wire import (
    HEAD_BYTES,
    Ask,
    Head,
    Kind,
    Status,
    pack,
    pack_fault,
    pack_good,
    pack_mapped,
    split_ask,
    unpack_ask,
    unpack_head,
    unpack_lanes,
    verify,
)

log = logging.getLogger("kvtide.transfer")

STALL_S = 30.0
_DRAIN_BYTES = 256 << 10
_AHEAD_BYTES = 4096
_MOST_RIGHTS = 1024


def _patiently() -> None:
    """Go on waiting."""


class Inbound:
    """See the module. ``region_gone`` may come from any thread."""

    def __init__(
        self,
        channel: Channel,
        session: Session,
        table: RegionTable,
        clock: Clock,
        observer: Observer | None,
        rdma: RdmaOwner | None,
        slabs: Slabs | None,
        notified: Notified,
        hasher: Executor,
        shut: Shut,
        tracer: Tracer,
    ) -> None:
        """Serve ``session`` on ``channel`` when run."""
        self.channel = channel
        self.session = session
        self._table = table
        self._clock = clock
        self._observer = observer
        self._rdma = InboundRdma(rdma, shut, table, clock, observer)
        self._engine = InboundEngine(slabs)
        self._notified = notified
        self._hasher = hasher
        self._shut = shut
        self._tracer = tracer
        self._send_lock = threading.Lock()
        self._mapped_lock = threading.Lock()
        self._mapped: set[int] = set()
        self._windows: list[Window] = []
        self._using: Sequence[Grant] = ()
        self._last_id = 0
        # what requests for one piece begin with: region, capability, purpose
        self._rights: dict[bytes, tuple[int, bytes, str]] = {}
        self._stillness = Stillness(channel, clock)

    def run(self) -> None:
        """Serve until the connection ends.

        Raises:
            Refused: the peer broke the protocol.
            Unreachable: the peer gave the connection up before.
            ChannelClosedError, OSError: the connection ended, as all do.
        """
        try:
            if not self._shut.enter(self.session.lane, self.channel.shutdown):
                raise Unreachable("the peer gave it up", node=self.session.node)
            while True:
                self._next()
        finally:
            self._shut.leave(self.session.lane)
            self._rdma.close()
            self._engine.close()

    def _next(self) -> None:
        channel = self.channel
        # idle for as long as it likes
        data = channel.receive_ahead(_AHEAD_BYTES, _patiently)
        if len(data) < HEAD_BYTES:
            data += channel.receive(HEAD_BYTES - len(data), _patiently)
        self._stillness.restart()
        head = unpack_head(data)
        end = HEAD_BYTES + head.body_length
        if len(data) < end:
            data += channel.receive(end - len(data), self._check)
        elif len(data) > end:
            channel.put_back(data[end:])
        body = data[HEAD_BYTES:end]
        verify(self.session.receive_key, head, body)
        if head.request_id <= self._last_id:
            raise Refused("a frame came twice", node=self.session.node)
        self._last_id = head.request_id
        if head.kind is not Kind.READ or not self._read_lone(head.request_id, body):
            self._answer(head, body)

    def uses(self, region: int) -> bool:
        """Whether a request under way uses the region."""
        return any(grant.region.number == region for grant in self._using)

    def region_gone(self, region: int) -> None:
        """Tell the peer, if it mapped the region."""
        # not the lock of sending: what another connection reads slowly is no reason to wait
        with self._mapped_lock:
            if region not in self._mapped:
                return
            self._mapped.discard(region)
        try:
            self._send(Kind.REGION_GONE, 0, struct.pack("<Q", region))
        except (TransferError, OSError):
            self.channel.shutdown()

    def tell_ways(self, body: bytes) -> None:
        """Tell the peer our ways in, as they are now; only where it listens for news."""
        if self.session.use is not Use.CONTROL:
            return
        try:
            self._send(Kind.WAYS, 0, body)
        except (TransferError, OSError):
            self.channel.shutdown()

    def _check(self) -> None:
        if self._stillness.seconds() > STALL_S:
            raise TimedOut(f"no progress for {STALL_S:g} s", node=self.session.node)

    def _answer(self, head: Head, body: bytes) -> None:
        match head.kind:
            case Kind.READ:
                ask = unpack_ask(body)
                with self._traced(ask, "read"):
                    self._read(head.request_id, ask)
            case Kind.WRITE:
                ask = unpack_ask(body)
                with self._traced(ask, "write"):
                    self._write(head.request_id, ask)
            case Kind.MAP:
                self._map(head.request_id, unpack_ask(body))
            case Kind.PING:
                self._send(Kind.ANSWER, head.request_id, b"")
            case Kind.NOTIFY:
                self._notified(self.session.node, self.session.epoch, body)
                self._send(Kind.ANSWER, head.request_id, b"")
            case (
                Kind.RDMA_DEVICES
                | Kind.RDMA_PAIR
                | Kind.RDMA_REACH
                | Kind.RDMA_CHECK
                | Kind.FENCE
            ):
                self._about_rdma(head, body)
            case (
                Kind.ENGINE_NAME
                | Kind.ENGINE_OPEN
                | Kind.ENGINE_READ
                | Kind.ENGINE_WRITE
            ):
                self._by_engine(head, body)
            case Kind.REGION_GONE | Kind.WAYS | Kind.ANSWER:
                raise Refused("a client sent a server's frame", node=self.session.node)

    def _traced(self, ask: Ask, operation: str) -> Span:
        if not ask.trace:
            return NO_SPAN
        return self._tracer.span(
            f"transfer {operation}",
            ask.trace,
            SpanKind.SERVER,
            purpose=ask.purpose,
            pieces=len(ask.pieces),
            node=self.session.node,
        )

    def _claim(self, ask: Ask, access: Access) -> list[Grant]:
        grants = claim_all(self._table, ask, access)
        self._using = grants
        return grants

    def _release(self, grants: Sequence[Grant]) -> None:
        windows, self._windows = self._windows, []
        for window in windows:
            window.close()
        self._using = ()
        release_all(self._table, grants)

    def _views(
        self, ask: Ask, grants: Sequence[Grant], *, fill: bool
    ) -> list[memoryview]:
        """The memory of all pieces; a GPU's, as it is now if ``fill``, by windows."""
        views: list[memoryview] = []
        for index, (at, offset, length) in enumerate(ask.pieces):
            region = grants[at].region
            check_range(offset, length, region.length, index)
            if region.stage is None:
                if not region.backed(offset, length, write=not fill):
                    raise unbacked(length, index)
                views.append(region.view[offset : offset + length])
                continue
            window = region.stage.window(offset, length, fill=fill)
            self._windows.append(window)
            views.append(window.view)
        return views

    def _read_lone(self, request_id: int, body: bytes) -> bool:
        """Answer a request for one small piece; False: nothing was done."""
        start, grant_at, offset, length = split_ask(body)
        if grant_at or length > HASH_FIRST_BYTES:
            return False
        right = self._rights.get(start)
        if right is None:
            right = self._learn_right(start, body)
            if right is None:
                return False
        region_number, capability, purpose = right
        try:
            grant = self._table.claim(region_number, capability, Access.READ)
        except TransferError:
            return False
        region = grant.region
        try:
            if region.stage is not None or offset + length > region.length:
                return False
            if not region.backed(offset, length, write=False):
                return False
            self._using = (grant,)
            view = region.view[offset : offset + length]
            digest = xxh3_64_intdigest(view)
            head = pack_good(self.session.send_key, request_id)
            with self._send_lock:
                trailer = digest.to_bytes(8, "little")
                self.channel.send((head, view, trailer), self._check)
        finally:
            self._using = ()
            self._table.release(grant)
        if self._observer is not None:
            self._observer.served("tcp", purpose, Operation.READ, length)
        return True

    def _learn_right(self, start: bytes, body: bytes) -> tuple[int, bytes, str] | None:
        ask = unpack_ask(body)
        if ask.trace or len(ask.pieces) != 1 or len(ask.grants) != 1:
            return None
        if len(self._rights) >= _MOST_RIGHTS:
            self._rights.clear()
        right = (*ask.grants[0], ask.purpose)
        self._rights[start] = right
        return right

    def _read(self, request_id: int, ask: Ask) -> None:
        try:
            grants = self._claim(ask, Access.READ)
        except TransferError as error:
            self._fault(request_id, error)
            return
        try:
            views = self._views(ask, grants, fill=True)
            self._send_pieces(request_id, views)
        except TransferError as error:
            if isinstance(error, TimedOut):
                raise
            self._fault(request_id, error)
            return
        finally:
            self._release(grants)
        self._served(ask, Operation.READ, sum(map(len, views)))

    def _send_pieces(self, request_id: int, views: Sequence[memoryview]) -> None:
        head = pack(self.session.send_key, Kind.ANSWER, request_id, b"")
        with self._send_lock:
            send_hashed(self.channel, head, views, self._check, self._hasher)

    def _write(self, request_id: int, ask: Ask) -> None:
        total = sum(length for _, _, length in ask.pieces)
        grants: list[Grant] = []
        try:
            if ask.lanes:
                self._shut.shut(ask.lanes)
            grants = self._claim(ask, Access.WRITE)
            views = self._views(ask, grants, fill=False)
        except TransferError as error:
            self._release(grants)
            self._drain(total + 8 * len(ask.pieces))
            self._fault(request_id, error)
            return
        try:
            wrong = self._receive_pieces(views)
        finally:
            self._release(grants)
        if wrong is not None:
            self._fault(request_id, wrong)
            return
        self._send(Kind.ANSWER, request_id, b"")
        self._served(ask, Operation.WRITE, total)

    def _receive_pieces(self, views: Sequence[memoryview]) -> TransferError | None:
        """Fill the views; what is wrong with them, if anything."""
        found, sent = receive_hashed(self.channel, views, self._check)
        if found != sent:
            pairs = zip(sent, found, strict=True)
            wrong = next(at for at, (a, b) in enumerate(pairs) if a != b)
            return Corrupt("written bytes differ", slice_index=wrong)
        try:
            for window in self._windows:
                window.commit()
        except TransferError as error:
            return error
        return None

    def _drain(self, total: int) -> None:
        scratch = memoryview(bytearray(min(total, _DRAIN_BYTES)))
        while total:
            part = scratch[: min(total, len(scratch))]
            self.channel.receive_into([part], self._check)
            total -= len(part)

    def _map(self, request_id: int, ask: Ask) -> None:
        try:
            grants = self._claim(ask, wanted_access(ask))
        except TransferError as error:
            self._fault(request_id, error)
            return
        (grant,) = grants
        with self._mapped_lock:
            self._mapped.add(grant.region.number)
        self._release(grants)
        region = grant.region
        left_s = grant.left_s(self._clock.monotonic())
        body = pack_mapped(region.length, left_s, region.shm_name)
        self._send(Kind.ANSWER, request_id, body)

    def _about_rdma(self, head: Head, body: bytes) -> None:
        answer = b""
        try:
            if head.kind is Kind.FENCE:
                self._shut.shut(unpack_lanes(body))
            else:
                answer = self._rdma.answer(head.kind, body)
        except TransferError as error:
            self._fault(head.request_id, error)
            return
        self._send(Kind.ANSWER, head.request_id, answer)

    def _by_engine(self, head: Head, body: bytes) -> None:
        answer = self._engine.name.encode()
        try:
            if head.kind is Kind.ENGINE_OPEN:
                answer = self._engine.open()
            elif head.kind is not Kind.ENGINE_NAME:
                answer = self._through_slot(head.kind, unpack_slot_ask(body))
        except TransferError as error:
            self._fault(head.request_id, error)
            return
        self._send(Kind.ANSWER, head.request_id, answer)

    def _through_slot(self, kind: Kind, wanted: SlotAsk) -> bytes:
        """Fill or empty a slot that the peer's engine reaches; the answer's body."""
        slot, digests, ask = wanted
        writes = kind is Kind.ENGINE_WRITE
        if writes and ask.lanes:
            self._shut.shut(ask.lanes)
        operation = Operation.WRITE if writes else Operation.READ
        with self._traced(ask, operation.value):
            grants = self._claim(ask, Access.WRITE if writes else Access.READ)
            answer = b""
            try:
                views = self._views(ask, grants, fill=not writes)
                if writes:
                    self._engine.empty(slot, views, digests)
                    for window in self._windows:
                        window.commit()
                else:
                    answer = pack_digests(self._engine.fill(slot, views))
            finally:
                self._release(grants)
        total = sum(length for _, _, length in ask.pieces)
        self._served(ask, operation, total, self._engine.name)
        return answer

    def _fault(self, request_id: int, error: TransferError) -> None:
        status, body = pack_fault(error)
        self._send(Kind.ANSWER, request_id, body, status)

    def _send(
        self, kind: Kind, request_id: int, body: bytes, status: Status = Status.OK
    ) -> None:
        frame = pack(self.session.send_key, kind, request_id, body, status)
        with self._send_lock:
            self.channel.send([frame], self._check)

    def _served(
        self, ask: Ask, operation: Operation, nbytes: int, path: str = "tcp"
    ) -> None:
        if ask.trace:
            log.debug(
                "served",
                extra={
                    "trace": ask.trace,
                    "operation": operation.value,
                    "bytes": nbytes,
                    "node": self.session.node,
                },
            )
        if self._observer is not None:
            self._observer.served(path, ask.purpose, operation, nbytes)
