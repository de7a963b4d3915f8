"""A proved connection whose requests' bytes go by a foreign engine.

A read: the owner copies the pieces into its slot and answers with their checksums, the
engine brings the slot, and the pieces are copied to where the caller wants them, hashed
there and compared. A write: the other way round, the owner compares.
"""

import time
from functools import partial

from kvtide.runtime import Clock
from kvtide.transfer.buffers import copy_and_hash
from kvtide.transfer.channel import Channel, Check
from kvtide.transfer.engines.seam import Flight
from kvtide.transfer.engines.slabs import SLAB_BYTES, SLOT_BYTES, SLOTS, Slab, Slabs
from kvtide.transfer.engines.wire import (
    Opened,
    pack_slot_ask,
    unpack_digests,
    unpack_opened,
)
from kvtide.transfer.errors import Refused, TransferError, Unreachable
from kvtide.transfer.fence import GivenUp
from kvtide.transfer.handshake import Session
from kvtide.transfer.line import Line
from kvtide.transfer.requests import Request
from kvtide.transfer.transfer import Transfer
from kvtide.transfer.wire import (
    HEAD_BYTES,
    FrameError,
    Kind,
    Status,
    pack,
    unpack_fault,
    unpack_head,
    verify,
)

_KEEN_ROUNDS = 40
_SHORT_S = 20e-6
_LONG_S = 500e-6


class EngineLine(Line):
    """See the module and ``Line``. ``open`` comes first, ``close`` last."""

    def __init__(
        self,
        channel: Channel,
        session: Session,
        node: str,
        clock: Clock,
        given_up: GivenUp,
        slabs: Slabs,
    ) -> None:
        """Speak with ``node``."""
        super().__init__(channel, session, node, clock, given_up)
        self.path = slabs.engine.name
        self._slabs = slabs
        self._engine = slabs.engine
        self._free = list(range(SLOTS))
        # of the requests on the way, by frame
        self._slots: dict[int, int] = {}
        self._flights: list[Flight] = []
        self._slab: Slab | None = None
        self._there = Opened(0, 0, b"")
        self._peer = ""

    def open(self, check: Check) -> None:
        """Agree with the owner on slots.

        Raises:
            Refused, Unreachable, OSError: it is not to be.
        """
        self._last_id += 1
        frame = pack(self._session.send_key, Kind.ENGINE_OPEN, self._last_id, b"")
        self.channel.send([frame], check)
        self._there = unpack_opened(self._answer(self._last_id, check))
        if self._there.length != SLAB_BYTES:
            raise Refused("the peer's slots are of another size", node=self._node)
        self._slab = self._slabs.take()
        self._peer = self._engine.meet(self._there.description)

    def close(self) -> None:
        """See ``Line.close``; what the engine still does is left to end."""
        super().close()
        slab, self._slab = self._slab, None
        if slab is not None:
            self._slabs.give_back(slab, self._flights)

    def send_now(self, request: Request) -> bool:
        """See ``Line.send_now``: never."""
        del request
        return False

    def send(self, request: Request, waiter: Transfer | None) -> None:
        """See ``Line.send``."""
        self._stillness.restart()
        self._last_id += 1
        request.frame_id = self._last_id
        if not self._free or request.nbytes > SLOT_BYTES:
            raise Unreachable("no slot for it", node=self._node, path=self.path)
        slot = self._free.pop()
        self._slots[request.frame_id] = slot
        check = partial(self._check, request.transfer, waiter)
        kind, digests = Kind.ENGINE_READ, list[int]()
        if request.writes:
            kind = Kind.ENGINE_WRITE
            request.lanes = self._given_up.lanes()
            digests = self._bring(request, slot, check)
        body = pack_slot_ask(slot, digests, request.ask())
        frame = pack(self._session.send_key, kind, request.frame_id, body)
        self.channel.send([frame], check)

    def _bring(self, request: Request, slot: int, check: Check) -> list[int]:
        """Have a write's bytes in the owner's slot; their checksums."""
        digests: list[int] = []
        here = self._memory.slot(slot, request.nbytes)
        at = 0
        for view in request.views:
            end = at + len(view)
            digests.append(copy_and_hash(here[at:end], view, lambda: False))
            at = end
        self._fly(request, slot, check)
        request.moved(digests)
        return digests

    def receive(
        self, request: Request, waiter: Transfer | None
    ) -> TransferError | None:
        """See ``Line.receive``."""
        self._stillness.restart()
        check = partial(self._check, request.transfer, waiter)
        slot = self._slots.pop(request.frame_id)
        try:
            body = self._answer(request.frame_id, check)
        except _Fault as fault:
            self._free.append(slot)
            return self._fault(request, fault.error)
        if request.writes:
            self._given_up.left(request.lanes)
            self._free.append(slot)
            return None
        sent = unpack_digests(body, len(request.views))
        self._stillness.restart()
        self._fly(request, slot, check)
        wrong = self._place(request, slot, sent)
        self._free.append(slot)
        return wrong

    def _place(
        self, request: Request, slot: int, sent: tuple[int, ...]
    ) -> TransferError | None:
        """Copy what was brought to where it belongs; what is wrong with it."""
        here = self._memory.slot(slot, request.nbytes)
        found: list[int] = []
        at = 0
        for index, view in enumerate(request.views):
            end = at + len(view)
            found.append(copy_and_hash(view, here[at:end], lambda: False))
            if found[-1] != sent[index]:
                return self._corrupt(request.slice_index(index))
            at = end
        request.moved(found)
        return None

    @property
    def _memory(self) -> Slab:
        if self._slab is None:
            raise Unreachable("the connection is closed", node=self._node)
        return self._slab

    def _fly(self, request: Request, slot: int, check: Check) -> None:
        """Move a slot's bytes by the engine, and wait for it.

        Raises:
            Unreachable: it failed, or ``check`` gave up.
        """
        if not request.nbytes:
            return
        at = slot * SLOT_BYTES
        flight = self._engine.begin(
            self._peer,
            writes=request.writes,
            here=self._memory.address + at,
            there=self._there.address + at,
            length=request.nbytes,
        )
        self._flights.append(flight)
        rounds = 0
        while not flight.landed():
            check()
            rounds += 1
            time.sleep(_SHORT_S if rounds < _KEEN_ROUNDS else _LONG_S)
        self._flights.remove(flight)

    def _answer(self, frame_id: int, check: Check) -> bytes:
        """The body of the next answer, which must be to that frame.

        Raises:
            _Fault: what the owner has to say against it.
            OSError, TransferError: the connection is of no use any more.
        """
        head = unpack_head(self.channel.receive(HEAD_BYTES, check))
        body = self.channel.receive(head.body_length, check)
        verify(self._session.receive_key, head, body)
        if head.kind is not Kind.ANSWER or head.request_id != frame_id:
            raise FrameError("an answer to something else")
        if head.status is not Status.OK:
            raise _Fault(unpack_fault(head.status, body))
        return body


class _Fault(Unreachable):
    """What the owner answered instead."""

    def __init__(self, error: TransferError) -> None:
        super().__init__(error.message, node=error.node)
        self.error = error
