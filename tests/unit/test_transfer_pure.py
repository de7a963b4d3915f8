"""The pure parts of the transfer library: plans, frames, capabilities, the census."""

from collections.abc import Sequence
from random import Random

import msgspec
import pytest
import xxhash
from hypothesis import given, settings, strategies as st

from kvtide.runtime import SystemClock
from kvtide.transfer import (
    Access,
    AccessDenied,
    Corrupt,
    EndpointAddress,
    Operation,
    OutOfBounds,
    Priority,
    Refused,
    RegionHandle,
    Transfer,
    TransferError,
)
from kvtide.transfer.buffers import SliceDigest, check_targets, plain_view
from kvtide.transfer.capability import CAPABILITY_BYTES, CapabilityMint, derive_key
from kvtide.transfer.census import Census
from kvtide.transfer.handshake import Verdict, look_of
from kvtide.transfer.hashed import batches_of
from kvtide.transfer.plan import Piece, cut, group
from kvtide.transfer.regions import check_range
from kvtide.transfer.requests import Batch
from kvtide.transfer.wire import (
    HEAD_BYTES,
    MOST_BODY_BYTES,
    Ask,
    FrameError,
    Kind,
    pack,
    pack_ask,
    pack_fault,
    pack_mapped,
    unpack_ask,
    unpack_fault,
    unpack_head,
    unpack_mapped,
    verify,
)

KEY = bytes(32)
# other work on the machine is no failure of ours
unhurried = settings(deadline=None)
u64 = st.integers(0, 2**64 - 1)


@unhurried
@given(
    st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 1500), st.integers(1, 9)
)
def test_groups_hold_every_piece_once(
    lengths: list[int], request_bytes: int, most_pieces: int
) -> None:
    pieces = cut(lengths)
    groups = list(group(pieces, request_bytes=request_bytes, most_pieces=most_pieces))
    assert [piece for each in groups for piece in each] == pieces
    for each in groups:
        assert 1 <= len(each) <= most_pieces
        total = sum(piece.length for piece in each)
        assert total <= request_bytes or len(each) == 1


@unhurried
@given(st.lists(st.binary(max_size=300), max_size=20), st.integers(1, 700))
def test_batches_are_the_views_in_order(blobs: list[bytes], size: int) -> None:
    views = [memoryview(blob) for blob in blobs]
    batches = list(batches_of(views, size))
    assert [view for batch in batches for view in batch] == views
    for batch in batches:
        assert sum(map(len, batch)) <= size or len(batch) == 1


def test_batches_keep_the_kernels_limit() -> None:
    views = [memoryview(b"x")] * 1500
    assert [len(each) for each in batches_of(views, 9999)] == [512, 512, 476]


@unhurried
@given(st.integers(-10, 50), st.integers(-10, 50), st.integers(0, 30))
def test_ranges(offset: int, length: int, size: int) -> None:
    inside = offset >= 0 and length >= 0 and offset + length <= size
    if inside:
        check_range(offset, length, size, 3)
        return
    with pytest.raises(OutOfBounds) as caught:
        check_range(offset, length, size, 3)
    assert caught.value.slice_index == 3


@unhurried
@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 10)), max_size=8))
def test_overlaps(ranges: list[tuple[int, int]]) -> None:
    memory = memoryview(bytearray(100))
    targets = [memory[start : start + length] for start, length in ranges]
    touched = [
        byte for start, length in ranges for byte in range(start, start + length)
    ]
    try:
        check_targets(targets)
    except OutOfBounds:
        assert len(touched) != len(set(touched))
    else:
        assert len(touched) == len(set(touched))


def test_plain_views() -> None:
    assert plain_view(b"abc") == b"abc"
    with pytest.raises(OutOfBounds):
        plain_view("no buffer")
    with pytest.raises(OutOfBounds):
        plain_view(memoryview(bytes(10))[::-1])


asks = st.builds(
    Ask,
    st.lists(
        st.tuples(u64, st.binary(min_size=CAPABILITY_BYTES, max_size=CAPABILITY_BYTES)),
        min_size=1,
        max_size=5,
    ),
    st.lists(st.tuples(st.just(0), u64, u64), max_size=50),
    st.text("abcxyz-", max_size=20),
    st.text("0123456789abcdef-", max_size=55),
    st.lists(st.binary(min_size=16, max_size=16), max_size=3).map(tuple),
)


@unhurried
@given(asks)
def test_ask_round_trip(ask: Ask) -> None:
    assert unpack_ask(pack_ask(ask)) == ask


@unhurried
@given(st.binary(max_size=200))
def test_any_body_is_an_ask_or_refused(body: bytes) -> None:
    try:
        ask = unpack_ask(body)
    except FrameError:
        return
    assert pack_ask(ask) == body or not (ask.purpose + ask.trace).isascii()


def test_a_piece_must_name_a_grant() -> None:
    with pytest.raises(FrameError):
        unpack_ask(pack_ask(Ask([(1, bytes(25))], [(1, 0, 0)], "")))


@unhurried
@given(asks, st.integers(0, 2000), st.integers(1, 255))
def test_any_flipped_byte_of_a_frame_is_found(ask: Ask, at: int, flip: int) -> None:
    frame = bytearray(pack(KEY, Kind.READ, 7, pack_ask(ask)))
    frame[at % len(frame)] ^= flip
    with pytest.raises(FrameError):
        read_frame(bytes(frame))


def test_frame_round_trip() -> None:
    assert read_frame(pack(KEY, Kind.PING, 9, b"body")) == (Kind.PING, 9, b"body")
    with pytest.raises(FrameError):
        read_frame(pack(b"x" * 32, Kind.PING, 9, b"body"))


def test_a_long_body_is_refused_before_it_is_read() -> None:
    frame = pack(KEY, Kind.READ, 1, bytes(MOST_BODY_BYTES + 1))
    with pytest.raises(FrameError, match="too long"):
        unpack_head(frame[:HEAD_BYTES])


def read_frame(frame: bytes) -> tuple[Kind, int, bytes]:
    head = unpack_head(frame[:HEAD_BYTES])
    body = frame[HEAD_BYTES:][: head.body_length]
    verify(KEY, head, body)
    return head.kind, head.request_id, body


@pytest.mark.parametrize("kind", TransferError.__subclasses__())
def test_faults_travel(kind: type[TransferError]) -> None:
    if kind.kind == "cancelled":
        return
    status, body = pack_fault(kind("because", slice_index=4))
    back = unpack_fault(status, body)
    assert type(back) is kind
    assert (back.message, back.slice_index) == ("because", 4)
    status, body = pack_fault(kind("because"))
    assert unpack_fault(status, body).slice_index is None


def test_faults_say_where() -> None:
    error = Corrupt("wrong", node="a", path="tcp", slice_index=2)
    assert str(error) == "wrong (node a, path tcp, slice 2)"
    assert str(Corrupt("wrong")) == "wrong"


@pytest.mark.parametrize("left_s", [None, 1.5])
def test_mapped_round_trip(left_s: float | None) -> None:
    assert unpack_mapped(pack_mapped(10, left_s, "name")) == (10, left_s, "name")


# ---- capabilities

MINT = CapabilityMint(derive_key(b"a secret of 16 bytes or more", "c"), "node", 3)


def allows(
    mint: CapabilityMint, capability: bytes, access: Access, now_s: float
) -> bool:
    try:
        mint.check(5, capability, access, now_s)
    except AccessDenied:
        return False
    return True


def test_what_a_capability_allows() -> None:
    read = MINT.mint(5, Access.READ, None)
    write = MINT.mint(5, Access.WRITE, 10.0)
    assert len(read) == CAPABILITY_BYTES
    assert allows(MINT, read, Access.READ, 1e9)
    assert not allows(MINT, read, Access.WRITE, 0)
    assert allows(MINT, write, Access.WRITE, 9.9)
    assert allows(MINT, write, Access.READ, 9.9)
    assert not allows(MINT, write, Access.WRITE, 10.0)
    assert MINT.check(5, write, Access.WRITE, 9.9) == 10.0
    assert MINT.check(5, read, Access.READ, 9.9) is None


def test_a_capability_is_bound() -> None:
    secret = b"a secret of 16 bytes or more"
    key = derive_key(secret, "c")
    mints: Sequence[CapabilityMint] = [
        CapabilityMint(key, "node", 4),
        CapabilityMint(key, "nod", 3),
        CapabilityMint(derive_key(secret, "d"), "node", 3),
        CapabilityMint(derive_key(secret + b"x", "c"), "node", 3),
    ]
    assert allows(MINT, MINT.mint(5, Access.READ, None), Access.READ, 0)
    assert not allows(MINT, MINT.mint(6, Access.READ, None), Access.READ, 0)
    for mint in mints:
        assert not allows(MINT, mint.mint(5, Access.READ, None), Access.READ, 0)


@unhurried
@given(st.integers(0, CAPABILITY_BYTES * 8 - 1))
def test_no_bit_of_a_capability_may_change(bit: int) -> None:
    capability = bytearray(MINT.mint(5, Access.READ, 10.0))
    capability[bit // 8] ^= 1 << bit % 8
    assert not allows(MINT, bytes(capability), Access.READ, 0)


@unhurried
@given(st.binary(max_size=60))
def test_guesses_fail(guess: bytes) -> None:
    assert not allows(MINT, guess, Access.READ, 0)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        derive_key(b"short", "c")


# ---- the census


def test_census() -> None:
    census = Census(3)
    assert census.admit("a", 5) is Verdict.WELCOME
    assert census.admit("a", 4) is Verdict.CLIENT_STALE
    assert census.admit("a", 5) is Verdict.WELCOME
    assert census.admit("a", 6) is Verdict.WELCOME
    assert census.admit("b", 1) is Verdict.TOO_MANY
    assert census.outdated("a", 5)
    assert not census.outdated("a", 6)
    assert not census.outdated("z", 0)
    assert not census.leave("a", 5)
    assert census.leave("a", 5)
    assert census.admit("b", 1) is Verdict.WELCOME
    assert len(census) == 2


@pytest.mark.parametrize(
    ("data", "look"),
    [(b"PRI * HTTP/2.0", "HTTP"), (b"\x16\x03\x01", "TLS"), (b"\x80\x04", "pickle")],
)
def test_looks(data: bytes, look: str) -> None:
    assert look in look_of(data)


# ---- what others send for us


def test_addresses_and_handles_are_plain() -> None:
    address = EndpointAddress("a", 1, "127.0.0.1", 7, "", 1)
    handle = RegionHandle("a", 1, 2, 3, b"cap", "name")
    for value in (address, handle):
        packed = msgspec.msgpack.encode(value)
        assert msgspec.msgpack.decode(packed, type=type(value)) == value


def test_refused_is_an_error_of_the_library() -> None:
    assert issubclass(Refused, TransferError)
    assert issubclass(FrameError, Refused)


# ---- pieces


@unhurried
@given(st.lists(st.integers(0, 500), max_size=20), st.integers(1, 99))
def test_pieces_cover_every_byte_once(lengths: list[int], piece_bytes: int) -> None:
    pieces = cut(lengths, piece_bytes)
    for index, length in enumerate(lengths):
        mine = [piece for piece in pieces if piece.slice_index == index]
        at = 0
        for piece in mine:
            assert piece.start == at
            at += piece.length
        assert at == length
        assert len(mine) == max(1, -(-length // piece_bytes))
        sizes = [piece.length for piece in mine]
        assert max(sizes) <= piece_bytes
        assert max(sizes) - min(sizes) <= 1
    assert [piece.slice_index for piece in pieces] == sorted(
        piece.slice_index for piece in pieces
    )


def test_a_slice_is_cut_no_smaller_than_needed() -> None:
    assert cut([10, 11], 10) == [Piece(0, 0, 10), Piece(1, 0, 5), Piece(1, 5, 6)]


@unhurried
@given(st.binary(max_size=2000), st.integers(1, 100), st.randoms())
def test_digest_of_pieces_in_any_order(
    data: bytes, piece_bytes: int, random: Random
) -> None:
    digest = SliceDigest(memoryview(data))
    pieces = cut([len(data)], piece_bytes)
    random.shuffle(pieces)
    for piece in pieces:
        digest.ready(piece.start, piece.length)
    assert digest.value() == xxhash.xxh3_64_intdigest(data)


# ---- a batch as requests


@unhurried
@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from(["shm", "tcp"])), max_size=30
    ),
    st.integers(1, 300),
    st.integers(1, 900),
)
def test_requests_hold_every_byte_of_a_batch_once(
    slices: list[tuple[int, str]], piece_bytes: int, request_bytes: int
) -> None:
    memory = memoryview(bytearray(sum(length for length, _ in slices)))
    views: list[memoryview] = []
    at = 0
    for length, _ in slices:
        views.append(memory[at : at + length])
        at += length
    handle = RegionHandle("a", 1, 2, 10**6, bytes(25), "")
    offsets = [7 * index for index in range(len(slices))]
    transfer = Transfer(
        slice_count=len(slices),
        nbytes=len(memory),
        operation=Operation.READ,
        purpose="reuse",
        priority=Priority.FOREGROUND,
        timeout_s=1,
        clock=SystemClock(),
    )
    paths = [path for _, path in slices]
    batch = Batch(views, [handle] * len(slices), offsets, len(memory))
    requests = batch.requests(transfer, paths, (piece_bytes, request_bytes))
    covered = [0] * len(slices)
    for request in requests:
        assert request.nbytes == sum(map(len, request.views))
        for index, piece in enumerate(request.pieces):
            assert request.path == paths[piece.slice_index]
            assert piece.start == covered[piece.slice_index]
            assert request.offsets[index] == offsets[piece.slice_index] + piece.start
            view = request.views[index]
            assert len(view) == piece.length
            view[:] = bytes([piece.slice_index + 1]) * piece.length
            covered[piece.slice_index] += piece.length
    assert covered == [length for length, _ in slices]
    assert bytes(memory) == b"".join(
        bytes([index + 1]) * length for index, (length, _) in enumerate(slices)
    )
