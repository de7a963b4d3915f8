"""Which deletions a store that runs has yet to carry out."""

from collections.abc import Sequence

from kvtide.kv import BlockKey
from kvtide.store.deletion_watch import OVERLAP_S, SKEW_S, DeletionBook
from kvtide.store.ssd.deletions import Deletions
from kvtide.store.ssd.events import DeletedSpace, RemovedBlock, Tombstone
from kvtide.store.tombstones import Read

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


def test_what_the_ssd_was_opened_by_is_done() -> None:
    start_s = START_MS / 1e3
    known = (space(b"a", START_MS - 10), RemovedBlock(BlockKey(b"k" * 16), START_MS))
    book = DeletionBook.at(start_s, Read(known, whole=True))
    assert news(book, *known) == []
    # after it was opened, by a clock that is late; and the same tenant's again
    late, again = space(b"b", START_MS - 900_000), space(b"a", START_MS + 1)
    assert news(book, *known, late, again) == [late, again]
    assert news(book, space(b"c", round((start_s - OVERLAP_S) * 1e3) - 1)) == []


def test_an_ssd_that_was_opened_without_the_catalog_hears_of_old_deletions() -> None:
    known = space(b"a", 10)
    book = DeletionBook.at(START_MS / 1e3, Read((known,), whole=False))
    assert book.since_s == 0
    old = space(b"b", 20)
    assert news(book, known, old) == [old]


def test_memory_alone_has_nothing_of_before() -> None:
    book = DeletionBook.at(START_MS / 1e3, None)
    assert news(book, space(b"a", START_MS - round(SKEW_S * 1e3) - 1)) == []
    late = space(b"a", START_MS - round(SKEW_S * 1e3))
    assert news(book, late) == [late]
