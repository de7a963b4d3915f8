"""Bodies too large for the bus: a shelf to fetch them from, and the fetching."""

from collections import OrderedDict
from dataclasses import dataclass

import blake3

from kvtide.bus.codec import DIGEST_BYTES, BlobRef, DropReason
from kvtide.bus.errors import WireError
from kvtide.bus.limits import BusLimits
from kvtide.runtime import Clock, LimitError
from kvtide.transfer import Access, ReadSlice, Region, TransferEndpoint, TransferError

PURPOSE = "blob"
_LEAST_S = 0.01


@dataclass(slots=True)
class _Shelved:
    """A body that others may fetch until ``expires_s``.

    ``asked`` are the requests that it is the body of and that have no reply yet. One that
    was ``told``, and not asked, may be fetched by anyone until then.
    """

    region: Region
    length: int
    expires_s: float
    asked: int = 0
    told: bool = False


class BlobShelf:
    """The bodies that this process has offered, bounded in bytes, count and time.

    Equal bodies (a repeated request, one snapshot page for many) lie there once.
    """

    def __init__(
        self, endpoint: TransferEndpoint, clock: Clock, limits: BusLimits
    ) -> None:
        """Start empty."""
        self._endpoint = endpoint
        self._clock = clock
        self._limits = limits
        self._shelved: OrderedDict[bytes, _Shelved] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        """Bodies on the shelf."""
        return len(self._shelved)

    @property
    def nbytes(self) -> int:
        """Bytes on the shelf."""
        return self._bytes

    async def put(self, body: bytes, *, asked: bool = False) -> BlobRef:
        """Offer ``body`` to whoever gets the reference, for ``blob_ttl_s``.

        ``asked``: it is a request's; ``answered`` may end that sooner.

        Raises:
            LimitError: the body is too large, or the shelf is full.
        """
        await self.sweep()
        digest = blake3.blake3(body).digest()
        found = self._shelved.get(digest)
        if found is None:
            found = self._add(digest, body)
        ttl_s = self._limits.blob_ttl_s
        found.expires_s = self._clock.monotonic() + ttl_s
        self._shelved.move_to_end(digest)
        found.asked += asked
        found.told |= not asked
        return BlobRef(
            address=self._endpoint.address,
            handle=found.region.handle(Access.READ, ttl_s=ttl_s),
            length=len(body),
            blake3=digest,
        )

    def answered(self, ref: BlobRef) -> None:
        """A request is over, with a reply or without: its body is of no more use."""
        found = self._shelved.get(ref.blake3)
        if found is None:
            return
        found.asked -= 1
        if found.asked <= 0 and not found.told:
            found.expires_s = 0.0

    async def sweep(self) -> None:
        """Take away what has expired."""
        now_s = self._clock.monotonic()
        expired = [d for d, s in self._shelved.items() if s.expires_s <= now_s]
        await self._take(expired)

    async def clear(self) -> None:
        """Take everything away."""
        await self._take(list(self._shelved))

    def _add(self, digest: bytes, body: bytes) -> _Shelved:
        limits = self._limits
        if len(body) > limits.blob_bytes:
            raise LimitError(
                f"a message of {len(body)} bytes; the limit is {limits.blob_bytes}",
                limit="blob_bytes",
            )
        if self._bytes + len(body) > limits.shelf_bytes:
            raise LimitError(
                f"{self._bytes} bytes of large messages wait to be fetched",
                limit="shelf_bytes",
            )
        if len(self._shelved) >= limits.shelf_count:
            raise LimitError(
                f"{len(self._shelved)} large messages wait to be fetched",
                limit="shelf_count",
            )
        region = self._endpoint.register(body, name=f"blob-{digest.hex()[:12]}")
        shelved = _Shelved(region, len(body), 0.0)
        self._shelved[digest] = shelved
        self._bytes += len(body)
        return shelved

    async def _take(self, digests: list[bytes]) -> None:
        for digest in digests:
            shelved = self._shelved.pop(digest, None)
            if shelved is None:
                continue
            self._bytes -= shelved.length
            await self._endpoint.deregister(shelved.region)


async def fetch(
    endpoint: TransferEndpoint, ref: BlobRef, limits: BusLimits, clock: Clock
) -> bytearray:
    """A private copy of the body that ``ref`` names; its hash is yet to be checked.

    Raises:
        WireError: it is larger than allowed, or could not be fetched in time.
    """
    node = ref.address.node
    if not 0 < ref.length <= limits.blob_bytes or ref.length > ref.handle.length:
        raise WireError(
            f"a body of {ref.length} bytes is offered; at most {limits.blob_bytes}",
            reason=DropReason.BLOB,
            node=node,
        )
    if len(ref.blake3) != DIGEST_BYTES:
        raise WireError("the reference has no hash", reason=DropReason.BLOB, node=node)
    body = bytearray(ref.length)
    until_s = clock.monotonic() + limits.fetch_timeout_s
    try:
        peer = await endpoint.connect(ref.address, timeout_s=limits.fetch_timeout_s)
        left_s = max(until_s - clock.monotonic(), _LEAST_S)
        slices = [ReadSlice(ref.handle, 0, memoryview(body))]
        await peer.read(slices, timeout_s=left_s, purpose=PURPOSE)
    except TransferError as error:
        raise WireError(
            f"a large body could not be fetched: {error}",
            reason=DropReason.BLOB,
            node=node,
        ) from error
    return body
