"""What fetching a copy from another store takes: commands out, what came of them in."""

from dataclasses import dataclass

from kvtide.kv import Located


@dataclass(frozen=True, slots=True)
class FetchHeader:
    """Read and check the header of ``source``; say ``HeaderFetched``."""

    number: int
    source: Located


@dataclass(frozen=True, slots=True)
class HeaderFetched:
    """``raw`` is the whole header as ``source`` announced it; None: it can't be had.

    ``corrupt``: the bytes were there and are not what was announced.
    """

    number: int
    raw: bytes | None
    corrupt: bool = False


@dataclass(frozen=True, slots=True)
class FetchBody:
    """Copy all parts of ``source`` into the slot at ``offset``, and check them.

    They lie behind the header ``raw``, of which the copy gets its own with
    ``generation``. Say ``BodyFetched``.
    """

    number: int
    source: Located
    raw: bytes
    slot: int
    offset: int
    generation: int


@dataclass(frozen=True, slots=True)
class BodyFetched:
    """All bytes are in the slot and right; ``header_xxh3`` is None if they are not."""

    number: int
    header_xxh3: int | None
    corrupt: bool = False


ArrivalEvent = HeaderFetched | BodyFetched
ArrivalCommand = FetchHeader | FetchBody
