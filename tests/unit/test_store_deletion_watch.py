"""Which deletions a store that runs has yet to carry out."""

from collections.abc import Sequence

from kvtide.kv import BlockKey
from kvtide.store.deletion_watch import OVERLAP_S, DeletionBook
from kvtide.store.ssd.deletions import Deletions
from kvtide.store.ssd.events import DeletedSpace, RemovedBlock, Tombstone

START_MS = 10_000_000


def space(tenant: bytes, until_ms: int) -> DeletedSpace:
    return DeletedSpace(tenant * 16, None, until_ms)


def news(book: DeletionBook, *found: Tombstone) -> Sequence[Tombstone]:
    return book.news(found, lambda _: False)


def test_each_is_carried_out_once_the_earliest_first() -> None:
    book = DeletionBook(START_MS)
    late, early = space(b"a", START_MS + 9), RemovedBlock(BlockKey(b"k" * 16), START_MS)
    assert news(book, late, early) == [early, late]
    book.done(early)
    assert news(book, late, early) == [late]  # it failed: again
    book.done(late)
    book.read([late, early])
    assert news(book, late, early) == []
    again = space(b"a", START_MS + 10)
    assert news(book, late, again) == [again]


def test_what_was_before_the_start_or_was_heard_is_none() -> None:
    book = DeletionBook(START_MS)
    assert news(book, space(b"a", START_MS - 1)) == []
    heard = Deletions([space(b"a", START_MS + 5)])
    assert book.news([space(b"a", START_MS + 5)], heard.has) == []
    later, other = space(b"a", START_MS + 6), space(b"b", START_MS + 5)
    assert book.news([later, other], heard.has) == [other, later]


def test_little_is_asked_for_again_and_little_is_kept() -> None:
    book = DeletionBook(START_MS)
    assert book.since_s == START_MS / 1e3
    overlap_ms = round(OVERLAP_S * 1e3)
    first, last = space(b"a", START_MS + 1), space(b"b", START_MS + 2 * overlap_ms)
    for each in (first, last):
        book.done(each)
    book.read([first, last])
    assert book.since_s * 1e3 == START_MS + overlap_ms
    late = space(b"c", START_MS + overlap_ms + 1)  # written long after its time
    assert news(book, late, last) == [late]
