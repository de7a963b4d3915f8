"""Blocks on SSD, sealed: nobody without the tenant's key reads them, nor takes others."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from tests.unit.ssd_driver import NODE, SMALL, SsdDriver, key_of, part_of, tags_of
from tests.unit.test_ssd_tier import rules

from kvtide.kv import BlockKey
from kvtide.runtime import ConfigError, SystemClock
from kvtide.store.key_encryption import (
    KeyEncryptionKey,
    NotUnwrappedError,
    load_kek,
)
from kvtide.store.settings import StoreSettings
from kvtide.store.ssd.errors import FormatError, KeysAwayError, LockedError
from kvtide.store.ssd.files import FilesSpec, TierFiles
from kvtide.store.ssd.format import (
    ENVELOPE_BYTES,
    FRAME_BYTES,
    PAGE_BYTES,
    Envelope,
    Frame,
    record_bytes,
)
from kvtide.store.ssd.health import TierState
from kvtide.store.ssd.sealing import SECRET_BYTES, Seals, TenantKey
from kvtide.store.tenant_keys import check_start

DIRECTORY = b"d" * 16


class KeysOfTest:
    """``TenantKeys`` in memory. ``gone``: destroyed; ``away``: nobody answers."""

    def __init__(self, kek_id: str = "kek") -> None:
        self.kek_id = kek_id
        self.away = False
        self.gone: set[bytes] = set()
        self.made: dict[bytes, TenantKey] = {}

    def open(self) -> str:
        if self.away:
            raise KeysAwayError("nobody answers")
        return self.kek_id

    def of_tenant(self, tenant: bytes) -> TenantKey:
        if self.away or tenant in self.gone:
            raise LockedError("destroyed")
        if tenant not in self.made:
            made = TenantKey(tenant, os.urandom(16), os.urandom(SECRET_BYTES))
            self.made[tenant] = made
        return self.made[tenant]

    def of_id(self, key_id: bytes) -> TenantKey:
        for key in self.made.values():
            if key.key_id == key_id and key.tenant not in self.gone:
                return key
        raise LockedError("unknown")

    def forget(self, tenant: bytes) -> None:
        del tenant


class SealedDriver(SsdDriver):
    """The driver with keys; ``keys`` None: as a store without encryption."""

    def __init__(self, path: Path, *, plain: bool = True) -> None:
        self.keys: KeysOfTest | None = KeysOfTest()
        self.plain = plain
        super().__init__(path, rules(sealed=True))

    def make_files(self) -> TierFiles:
        spec = FilesSpec(self.path, NODE, key_id=7, keys=self.keys, plain=self.plain)
        return TierFiles(spec, self.arena, SystemClock())


@pytest.fixture
def store(tmp_path: Path) -> SealedDriver:
    """Blocks of two tenants are on the SSD."""
    made = SealedDriver(tmp_path / "ssd")
    fill(made)
    return made


def fill(store: SsdDriver) -> None:
    for number in range(1, 40):
        store.put([key_of(number)], tenant=number % 2)
        store.quiet()


def on_ssd(store: SsdDriver) -> list[BlockKey]:
    return [key_of(n) for n in range(1, 40) if store.on_ssd(key_of(n))]


def restart(store: SsdDriver) -> None:
    store.stop()
    store.start()


def disk(store: SsdDriver) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(store.path.glob("*.seg")))


def test_blocks_are_read_again_after_a_restart_and_the_disk_shows_none(
    store: SealedDriver,
) -> None:
    keys = on_ssd(store)
    assert keys
    assert all(store.read(keys[:4]))
    restart(store)
    assert set(on_ssd(store)) == set(keys)
    assert all(store.read(keys[:4]))
    raw = disk(store)
    for key in keys:
        assert part_of(key, 0, SMALL) not in raw
    assert tags_of(1).tenant not in raw
    assert b"KVTB" not in raw  # no block's header either


def test_a_tenant_whose_key_is_destroyed_is_not_served_and_others_are(
    store: SealedDriver,
) -> None:
    keys = on_ssd(store)
    theirs = {key for key in keys if key[-1] % 2}
    assert theirs < set(keys)
    store.stop()
    assert store.keys is not None
    store.keys.gone.add(tags_of(1).tenant)
    store.start()
    assert store.machine.ssd.health.state is TierState.READY
    assert set(on_ssd(store)) == set(keys) - theirs
    some = [key for key in keys if key not in theirs][:2]
    assert all(store.read(some))


def test_a_key_that_goes_while_the_store_runs_makes_misses_and_no_trouble(
    store: SealedDriver,
) -> None:
    theirs = [key for key in on_ssd(store) if key[-1] % 2]
    assert store.keys is not None
    store.keys.gone.add(tags_of(1).tenant)
    assert store.read(theirs[:2]) == [False, False]
    assert not any(store.on_ssd(key) for key in theirs[:2])
    # new ones of it are evicted as without an SSD; the others' go on
    for number in range(100, 140):
        store.put([key_of(number)], tenant=number % 2)
        store.quiet()
    assert store.machine.ssd.health.state is TierState.READY
    come = [n for n in range(100, 140) if store.on_ssd(key_of(n))]
    assert come
    assert all(n % 2 == 0 for n in come)


def test_without_the_keys_the_tier_is_out_until_they_are_there(
    store: SealedDriver,
) -> None:
    keys = on_ssd(store)
    store.stop()
    assert store.keys is not None
    store.keys.away = True
    store.start()
    assert store.machine.ssd.health.state is TierState.OUT
    assert "nobody answers" in store.machine.ssd.health.reason
    store.keys.away = False
    store.wait(100.0)
    assert set(on_ssd(store)) == set(keys)


def test_another_wrapping_key_is_said(store: SealedDriver) -> None:
    store.stop()
    assert store.keys is not None
    store.keys.kek_id = "other"
    store.start()
    assert store.machine.ssd.health.state is TierState.OUT
    assert "another key" in store.machine.ssd.health.reason


@pytest.mark.parametrize("plain", [True, False])
def test_blocks_from_before_are_read_or_refused_and_move_as_sealed_ones(
    tmp_path: Path, *, plain: bool
) -> None:
    before = SsdDriver(tmp_path / "ssd", rules())
    fill(before)
    keys = on_ssd(before)
    before.stop()
    store = SealedDriver(tmp_path / "ssd", plain=plain)
    assert on_ssd(store) == (keys if plain else [])
    assert store.read(keys[:2]) == [plain, plain]
    for number in range(200, 320):
        store.put([key_of(number)], tenant=1)
        store.quiet()
    later = [key for key in map(key_of, range(200, 320)) if store.on_ssd(key)]
    assert later
    assert all(store.read(later[-3:]))
    store.stop()


def test_a_store_without_keys_finds_nothing_in_sealed_segments(
    store: SealedDriver,
) -> None:
    store.stop()
    plain = SsdDriver(store.path, rules())
    assert plain.machine.ssd.health.state is TierState.READY
    assert on_ssd(plain) == []
    plain.stop()


def test_a_changed_byte_makes_a_miss(store: SealedDriver) -> None:
    places = [
        FRAME_BYTES + 3,  # the key's id
        FRAME_BYTES + 33,  # the count
        FRAME_BYTES + ENVELOPE_BYTES + 1,  # the header
        FRAME_BYTES + ENVELOPE_BYTES + SMALL.header_bytes + 3,  # its tag
        FRAME_BYTES + ENVELOPE_BYTES + SMALL.slot_bytes + 20,  # the last tag
    ]
    keys = on_ssd(store)[: len(places)]
    for key, at in zip(keys, places, strict=True):
        (old,) = store.edit(store.place(key), at, b"\0")
        store.edit(store.place(key), at, bytes([old ^ 1]))
    for key in keys:
        assert store.read([key]) == [False]
        assert not store.on_ssd(key)
    restart(store)
    assert not any(map(store.on_ssd, keys))


def test_a_record_in_anothers_place_is_none(store: SealedDriver) -> None:
    """Its frame is mended to say it belongs there; the seal says it does not."""
    one, two = on_ssd(store)[:2]
    place = store.place(two)
    raw = _record(store, one)
    frame = Frame(
        place.segment,
        place.offset,
        store.machine.ssd.books.entries.lsn(_row(store, two)),
        SMALL.slot_bytes,
        SMALL.header_bytes,
        written_ms=1,
        sealed=True,
    )
    seed = int.from_bytes(_directory_id(store)[:8], "little")
    covered = raw[FRAME_BYTES : FRAME_BYTES + ENVELOPE_BYTES]
    store.edit(place, 0, frame.encode(covered, seed) + raw[FRAME_BYTES:])
    assert store.read([two]) == [False]


def _row(store: SsdDriver, key: BlockKey) -> int:
    row = store.machine.ssd.books.entries.find(key)
    assert row is not None
    return row


def _record(store: SsdDriver, key: BlockKey) -> bytes:
    place = store.place(key)
    path = store.path / f"{place.segment:016x}.seg"
    return path.read_bytes()[place.offset : place.offset + place.length]


def _directory_id(store: SsdDriver) -> bytes:
    return (store.path / "superblock").read_bytes()[16:32]


def test_no_nonce_comes_twice_over_lives_of_a_directory(store: SealedDriver) -> None:
    """A segment's number may come again after a restart: nonces have nothing of it."""
    used: dict[tuple[bytes, bytes, int], tuple[bytes, int, int]] = {}
    lives: set[bytes] = set()
    for first in (300, 330, 360):
        for each in range(first, first + 30):
            store.put([key_of(each)], tenant=1)
            store.quiet()
        for key in map(key_of, range(300, first + 30)):
            if store.on_ssd(key):
                envelope = Envelope.decode(_record(store, key)[FRAME_BYTES:])
                nonce = (envelope.key_id, envelope.life, envelope.count)
                place = store.place(key)
                record = (bytes(key), place.segment, place.offset)
                assert used.setdefault(nonce, record) == record
                lives.add(envelope.life)
        restart(store)
    assert len(lives) == 3
    assert len(used) > 40


# ---- the pure parts


def frame_of(slot_bytes: int, header_bytes: int) -> Frame:
    return Frame(3, PAGE_BYTES, 9, slot_bytes, header_bytes, 77, sealed=True)


@settings(max_examples=60, deadline=None)
@given(
    header=st.binary(min_size=1, max_size=300),
    parts=st.binary(max_size=3000),
    flip=st.integers(0, 1 << 30),
)
def test_what_is_sealed_opens_and_no_other_bytes_do(
    header: bytes, parts: bytes, flip: int
) -> None:
    keys = KeysOfTest()
    seals = Seals(keys, DIRECTORY)
    image = memoryview(bytearray(header + parts))
    frame = frame_of(len(image), len(header))
    record = memoryview(bytearray(record_bytes(len(image), sealed=True)))
    end = seals.seal(frame, b"t" * 16, image).into(record)
    assert end <= len(record)
    out = memoryview(bytearray(len(image)))
    Seals(keys, DIRECTORY).open(frame, record, out)
    assert out == image
    assert seals.open_header(frame, record) == header
    with pytest.raises(FormatError):
        Seals(keys, b"e" * 16).open(frame, record, out)
    elsewhere = Frame(3, 2 * PAGE_BYTES, 9, len(image), len(header), 77, sealed=True)
    with pytest.raises(FormatError):
        seals.open(elsewhere, record, out)
    at = FRAME_BYTES + flip % (end - FRAME_BYTES)
    record[at] ^= 1 + flip % 255
    if FRAME_BYTES + 40 <= at < FRAME_BYTES + ENVELOPE_BYTES:
        return  # zeros that the frame's own sum covers
    with pytest.raises((FormatError, LockedError)):
        seals.open(frame, record, out)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=400))
def test_unwrapping_takes_nothing_but_what_it_wrapped(data: bytes) -> None:
    kek = KeyEncryptionKey(b"k" * 32)
    with pytest.raises(NotUnwrappedError):
        kek.unwrap(data, b"purpose")
    wrapped = kek.wrap(data, b"purpose")
    assert kek.unwrap(wrapped, b"purpose") == data
    for other in (KeyEncryptionKey(b"j" * 32), kek):
        purpose = b"purpose" if other is not kek else b"another"
        with pytest.raises(NotUnwrappedError):
            other.unwrap(wrapped, purpose)


@pytest.mark.parametrize("text", ["", "xyz", "ab" * 31, "0x" + "ab" * 32])
def test_what_is_no_key_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kek"
    with pytest.raises(ConfigError, match="openssl rand"):
        load_kek(StoreSettings(ssd_key_file=path))
    path.write_text(text)
    with pytest.raises(ConfigError, match="openssl rand") as caught:
        load_kek(StoreSettings(ssd_key_file=path))
    assert text not in str(caught.value) or not text
    path.write_text("ab" * 32 + "\n")
    kek = load_kek(StoreSettings(ssd_key_file=path))
    assert kek is not None
    assert "ab" * 8 not in repr(kek)


def test_a_store_does_not_start_over_blocks_of_another_key(
    store: SealedDriver,
) -> None:
    store.stop()
    mine, other = KeyEncryptionKey(b"m" * 32), KeyEncryptionKey(b"o" * 32)
    (store.path / "sealed").write_text(mine.id + "\n")
    check_start(store.path, mine)
    with pytest.raises(ConfigError, match="another key"):
        check_start(store.path, other)
    with pytest.raises(ConfigError, match="are encrypted"):
        check_start(store.path, None)
    check_start(store.path.parent, None)
