"""Whatever comes over the network is a frame, a message, an event or an error of ours."""

import pytest
from tests.contract.record_wire import record
from tests.unit.fuzzing import ROUNDS, Target, fuzz

from kvtide.bus import Codec, WireError, decode_plain
from kvtide.connect.kv_events import (
    BlockRemoved,
    KvEventBatch,
    KvEventError,
    decode_batch,
    encode_batch,
)
from kvtide.kv import BlockHeader, HeaderMismatchError
from kvtide.transfer.errors import TransferError
from kvtide.transfer.rdma_wire import unpack_check, unpack_pair, unpack_reach
from kvtide.transfer.wire import (
    Ask,
    FrameError,
    Kind,
    Status,
    pack,
    pack_ask,
    pack_mapped,
    split_ask,
    unpack_ask,
    unpack_fault,
    unpack_head,
    unpack_lanes,
    unpack_mapped,
    unpack_ways,
)

ASK = pack_ask(Ask([(7, b"c" * 32)], [(0, 0, 64)], "kv", "", [b"l" * 16]))
EVENTS = encode_batch(KvEventBatch(1.0, (BlockRemoved((7, b"h")),), 0))
CODEC = Codec()
MESSAGES = tuple(bytes.fromhex(text) for text in record().values())


def frame(data: bytes) -> object:
    """As a connection reads it: a head of a known length first."""
    if len(data) < len(pack(b"k" * 32, Kind.ANSWER, 1, b"")):
        return None
    return unpack_head(data)


TARGETS = [
    Target("bus", CODEC.open, (WireError,), MESSAGES),
    Target("plain", decode_plain, (WireError,), MESSAGES[:5]),
    Target("head", frame, (FrameError,), (pack(b"k" * 32, Kind.READ, 1, ASK),)),
    Target("ask", unpack_ask, (FrameError,), (ASK,)),
    Target("split", split_ask, (FrameError,), (ASK,)),
    Target("lanes", unpack_lanes, (FrameError,), (b"l" * 32,)),
    Target("mapped", unpack_mapped, (FrameError,), (pack_mapped(9, 1.5, "name"),)),
    Target("ways", unpack_ways, (FrameError,), (b"\x01a,b",)),
    Target("pair", unpack_pair, (FrameError,)),
    Target("reach", unpack_reach, (FrameError,)),
    Target("header", BlockHeader.decode, (HeaderMismatchError,)),
    Target("kv events", decode_batch, (KvEventError,), (EVENTS,)),
    Target("check", unpack_check, (FrameError,), (b"\x01\x00" + b"d" * 8 + ASK,)),
]


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_any_bytes_are_read_or_refused(target: Target, rounds: int) -> None:
    fuzz(target, rounds)


@pytest.mark.parametrize("status", list(Status))
def test_any_answer_is_an_error_that_can_be_told(status: Status) -> None:
    def read(data: bytes) -> object:
        if status is Status.OK:
            return None
        error = unpack_fault(status, data)
        assert isinstance(error, TransferError)
        return str(error)

    fuzz(Target("fault", read, ()), 20)
