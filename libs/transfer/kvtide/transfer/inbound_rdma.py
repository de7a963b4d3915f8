"""What a peer asks about RDMA on a connection: to set up, and whether its writes arrived."""

from xxhash import xxh3_64_intdigest

from kvtide.runtime import Clock
from kvtide.transfer.claims import claim_all, release_all, wanted_access
from kvtide.transfer.errors import Corrupt, Refused
from kvtide.transfer.fence import Shut
from kvtide.transfer.handles import Access, Operation
from kvtide.transfer.interface import Observer
from kvtide.transfer.rdma_owner import OwnerPairs, RdmaOwner
from kvtide.transfer.rdma_wire import (
    pack_pair,
    pack_reach,
    unpack_check,
    unpack_pair,
)
from kvtide.transfer.regions import RegionTable, check_range
from kvtide.transfer.wire import Kind, unpack_ask


class InboundRdma:
    """Of one connection, for its thread; ``rdma`` is None where there is none."""

    def __init__(
        self,
        rdma: RdmaOwner | None,
        shut: Shut,
        table: RegionTable,
        clock: Clock,
        observer: Observer | None,
    ) -> None:
        """Nothing is set up."""
        self._rdma = rdma
        self._pairs: OwnerPairs | None = None if rdma is None else rdma.pairs(shut)
        self._table = table
        self._clock = clock
        self._observer = observer

    def close(self) -> None:
        """The connection is over, and the peer's queue pairs with it."""
        if self._pairs is not None:
            self._pairs.close()

    def answer(self, kind: Kind, body: bytes) -> bytes:
        """The body of the answer to a request of an RDMA kind.

        Raises:
            TransferError: what to answer instead.
        """
        rdma, pairs = self._rdma, self._pairs
        if kind is Kind.RDMA_DEVICES:
            return bytes([0 if rdma is None else len(rdma.devices)])
        if rdma is None or pairs is None:
            raise Refused("no RDMA here")
        if kind is Kind.RDMA_PAIR:
            index, remote, lane = unpack_pair(body)
            return pack_pair(index, pairs.connect(index, remote, lane), lane)
        if kind is Kind.RDMA_REACH:
            return self._reach(rdma, body)
        self._check(body)
        return b""

    def _reach(self, rdma: RdmaOwner, body: bytes) -> bytes:
        ask = unpack_ask(body)
        access = wanted_access(ask)
        grants = claim_all(self._table, ask, access)
        try:
            (grant,) = grants
            reach = rdma.reach(
                grant,
                ask.grants[0][1],
                write=access is Access.WRITE,
                now_s=self._clock.monotonic(),
            )
        finally:
            release_all(self._table, grants)
        return pack_reach(reach)

    def _check(self, body: bytes) -> None:
        """Raise Corrupt unless what was written lies in memory as it was sent."""
        ask, digests = unpack_check(body)
        grants = claim_all(self._table, ask, Access.WRITE)
        total = 0
        try:
            for index, (at, offset, length) in enumerate(ask.pieces):
                region = grants[at].region
                if region.staged:
                    raise Refused("device memory goes by TCP", slice_index=index)
                check_range(offset, length, region.length, index)
                found = xxh3_64_intdigest(region.view[offset : offset + length])
                if found != digests[index]:
                    raise Corrupt("written bytes differ", slice_index=index)
                total += length
        finally:
            release_all(self._table, grants)
        if self._observer is not None:
            self._observer.served("rdma", ask.purpose, Operation.WRITE, total)
