"""What the bytes that were read must be. Pure."""

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from kvtide.kv import (
    BlockHeader,
    HeaderForm,
    HeaderMismatchError,
    Layout,
    Located,
    SpaceTags,
)
from kvtide.pool.outcomes import MissReason, ReadOutcome

_STALE_FIELDS = ("key", "generation")


class BadBytes(Exception):  # noqa: N818 - inside this package: becomes a ReadOutcome
    """The bytes are not those that were promised."""

    def __init__(self, reason: MissReason, detail: str) -> None:
        """Say what differs."""
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def checked_header(
    raw: bytes | bytearray, located: Located, tags: SpaceTags, layout: Layout
) -> BlockHeader:
    """The header in private bytes, if it is the one that ``located`` promises.

    Raises:
        BadBytes: it is not: evicted, reused, torn, corrupt, or of another space.
    """
    if xxh3_64_intdigest(raw) != located.header_xxh3:
        raise BadBytes(MissReason.STALE, "the header's checksum differs")
    try:
        header = BlockHeader.decode(raw)
        header.check(
            key=located.key,
            tags=tags,
            generation=located.slot.generation,
            layout=layout,
        )
    except HeaderMismatchError as error:
        stale = error.field in _STALE_FIELDS
        reason = MissReason.STALE if stale else MissReason.FOREIGN
        raise BadBytes(reason, str(error)) from error
    return header


def check_parts(
    header: BlockHeader,
    numbers: Sequence[int],
    lengths: Sequence[int],
    xxh3: Sequence[int],
) -> None:
    """Compare parts that were read with the header's table.

    Raises:
        BadBytes: a part's length or checksum differs.
    """
    entries = [header.parts[number] for number in numbers]
    promised = [(entry.length, entry.xxh3) for entry in entries]
    if promised == list(zip(lengths, xxh3, strict=True)):
        return
    for number, length, found in zip(numbers, lengths, xxh3, strict=True):
        entry = header.parts[number]
        if entry.length != length:
            raise BadBytes(
                MissReason.FOREIGN,
                f"part {number} has {entry.length} bytes, wanted {length}",
            )
        if entry.xxh3 != found:
            raise BadBytes(MissReason.CORRUPT, f"the checksum of part {number} differs")


class BlockCheck:
    """What blocks of one space must be, and what is said of good ones; for many."""

    def __init__(self, tags: SpaceTags, layout: Layout) -> None:
        """Of the space that the reader is in."""
        self.tags = tags
        self.layout = layout
        self.header_bytes = layout.header_bytes
        self.part_bytes = layout.part_bytes
        self.slot_bytes = layout.slot_bytes
        self._form = HeaderForm(tags, layout)
        self._token_bytes = layout.token_bytes
        self._good = ReadOutcome()

    def is_promised(
        self,
        located: Located,
        raw: bytes | bytearray,
        lengths: Sequence[int],
        xxh3: Sequence[int],
    ) -> bool:
        """Whether a header, whose checksum is right, and all parts are what was promised.

        There is but one header with this key, generation and space for parts of these
        lengths and sums: it is made, and compared whole. False says only that
        ``checked_header`` and ``check_parts`` must find out.
        """
        tokens, odd = divmod(lengths[0], self._token_bytes)
        if odd or not 0 < tokens <= self.layout.block_tokens:
            return False
        if lengths.count(lengths[0]) != len(lengths) or len(xxh3) != self.layout.parts:
            return False
        generation = located.slot.generation
        return raw == self._form.encode(located.key, generation, tokens, xxh3)

    def outcome(self, nbytes: int, path: str) -> ReadOutcome:
        """Of a good one: the same for all that are alike."""
        if self._good.nbytes != nbytes or self._good.path != path:
            self._good = ReadOutcome(nbytes=nbytes, path=path)
        return self._good
