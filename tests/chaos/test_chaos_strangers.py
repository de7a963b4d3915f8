"""Bodies too large or senseless at gateways, strangers at transfer ports, under load."""

import itertools
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import httpx
import msgspec
import pytest
from tests.chaos.rounds import disturbed
from tests.chaos.site import ChaosSite
from tests.chaos.test_chaos_intruders import throw
from tests.chaos.watch import resident_mib
from tests.e2e.fault_rounds import Question
from tests.e2e.system import wait_for

from kvtide.bus.secret import load_secret
from kvtide.runtime import SystemClock
from kvtide.transfer import (
    Endpoint,
    EndpointAddress,
    ReadSlice,
    RegionHandle,
    TransferError,
)
from kvtide.transfer.handles import PROTOCOL
from kvtide.transfer.wire import MAGIC

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SENDS_S = 20.0
SENDERS = 2
MOST_GROWN_MIB = 96
MIB = 1 << 20
REFUSED = range(400, 429)
BAD_FIELDS: tuple[dict[str, Any], ...] = (
    {"n": 10**6},
    {"max_tokens": 10**9},
    {"max_tokens": 10**30},
    {"logprobs": 10**6},
    {"stop": ["a"] * 10_000},
    {"stop": ["a" * 100_000]},
    {"stop_token_ids": list(range(50_000))},
    {"logit_bias": {"x": 1}},
    {"prompt": []},
    {"prompt": [10**12]},
    {"prompt": [-1]},
    {"prompt": list(range(100_000))},
    {"prompt": {"a": 1}},
    {"temperature": -1},
    {"guided_regex": "("},
    {"guided_json": "{"},
    {"guided_json": "[" * 2000},
    {"structured_outputs": {"json": '{"not":' * 2000}},
    {"cache_salt": ""},
    {"model": 5},
)


def pieces(nbytes: int) -> Iterator[bytes]:
    """A body whose length nobody is told beforehand."""
    yield b'{"prompt": "'
    for _ in range(nbytes // MIB):
        yield b"a" * MIB
    yield b'"}'


def bodies(model: str) -> list[Callable[[], bytes | Iterator[bytes]]]:
    """Each makes a body that a gateway must refuse."""
    usual = {"model": model, "prompt": "x", "max_tokens": 1}
    spoilt = [json.dumps({**usual, **bad}).encode() for bad in BAD_FIELDS]
    raw = [
        *(b"", b"{", b"null", b"[1]", b"\xff\xfe\x00", os.urandom(4096)),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        json.dumps({**usual, "temperature": float("nan")}).encode(),
        b"a" * (64 * MIB),
    ]
    whole = [lambda body=body: body for body in (*spoilt, *raw)]
    return [*whole, lambda: pieces(64 * MIB)]


def test_bodies_too_large_and_senseless(
    site: ChaosSite, asked: Sequence[Question]
) -> None:
    """Each is refused by name or by size, none costs memory, and others are served."""
    pids = {f"gateway-{n}": site.cluster[f"gateway-{n}"].pid for n in (0, 1)}
    done = f"too large and senseless bodies sent to both gateways, {SENDS_S:.0f} s"
    told: Counter[str] = Counter()
    wrong: list[str] = []
    numbers = itertools.count()
    made = bodies(site.model)

    def send(end_s: float) -> None:
        for number in numbers:  # shared; each body goes out at least twice
            if number >= 2 * len(made) and time.monotonic() >= end_s:
                return
            body = made[number % len(made)]()
            url = site.gateways[number % 2].url
            try:
                answer = httpx.post(
                    f"{url}/v1/completions",
                    content=body,
                    headers={"content-type": "application/json"},
                    timeout=60,
                )
            except httpx.WriteError:  # it was told enough before it had said all
                told["hung up on"] += 1
                continue
            except httpx.TransportError as error:
                told[type(error).__name__] += 1
                continue
            told[str(answer.status_code)] += 1
            if answer.status_code not in REFUSED:
                wrong.append(f"body {number % len(made)}: {answer.text[:200]}")

    with disturbed(site, asked, "F20", done) as it:
        before = {name: resident_mib(pid) for name, pid in pids.items()}
        end_s = time.monotonic() + SENDS_S
        senders = [threading.Thread(target=send, args=(end_s,)) for _ in range(SENDERS)]
        for each in senders:
            each.start()
        for each in senders:
            each.join(240)
        assert not any(each.is_alive() for each in senders)
        it.load.answered(2)
        assert not wrong, wrong[:5]
        it.did(told.total())
        assert set(told) <= {"400", "404", "413", "422", "hung up on"}, told
        grown = {name: resident_mib(pid) - before[name] for name, pid in pids.items()}
        assert max(grown.values()) < MOST_GROWN_MIB, grown
        assert {name: site.cluster[name].pid for name in pids} == pids
        it.saw(", ".join(f"{count} {what}" for what, count in sorted(told.items())))
        it.saw(f"none grew by more than {max(grown.values()):.0f} MiB")


def transfer_addresses(site: ChaosSite) -> list[EndpointAddress]:
    """Where every role with a transfer port says that it is."""
    told = [node["beat"]["transfer"] for node in site.status()["nodes"]]
    return [EndpointAddress(**each) for each in told if each]


def arenas(site: ChaosSite) -> list[tuple[EndpointAddress, RegionHandle]]:
    """The stores' memory, as their beats say it: with the right to read it."""
    found: list[tuple[EndpointAddress, RegionHandle]] = []
    for node in site.status()["nodes"]:
        beat = node["beat"]
        for each in beat["arenas"]:
            handle = msgspec.convert(each, RegionHandle)
            found.append((EndpointAddress(**beat["transfer"]), handle))
    return found


def forged(handle: RegionHandle, chance: random.Random) -> RegionHandle:
    """The same region; the right to it is made up or altered."""
    if chance.random() < 0.5:
        capability = chance.randbytes(len(handle.capability))
    else:
        at = chance.randrange(len(handle.capability))
        raw = bytearray(handle.capability)
        raw[at] ^= 1 << chance.randrange(8)
        capability = bytes(raw)
    return RegionHandle(
        handle.node,
        handle.epoch,
        handle.region,
        handle.length,
        capability,
        shm_name="",
    )


def tries(endpoint: Endpoint, address: EndpointAddress, handle: RegionHandle) -> bytes:
    """What a read of the region's beginning brings; nothing, where it is refused."""
    into = memoryview(bytearray(4096))
    try:
        peer = endpoint.connect_blocking(address, timeout_s=20)
        peer.read([ReadSlice(handle, 0, into)], timeout_s=20).wait_blocking()
    except TransferError:
        return b""
    return bytes(into)


def test_strangers_at_the_transfer_ports(
    site: ChaosSite, asked: Sequence[Question]
) -> None:
    """Garbage, another secret, a forged right: turned away and counted, no byte told."""
    chance = random.Random(21)  # noqa: S311 - to do it again
    done = "garbage, another secret and forged capabilities at all transfer ports"
    secret = load_secret(site.cluster.state_dir / "secret")
    told: Counter[str] = Counter()
    with disturbed(site, asked, "F21", done) as it, ExitStack() as stack:

        def endpoint(node: str, secret: bytes) -> Endpoint:
            made = Endpoint(
                node=node, epoch=1, secret=secret, clock=SystemClock(), shm_dir=None
            )
            return stack.enter_context(made)

        before = site.counted("kvtide_transfer_refused_total")
        stranger = endpoint("stranger", os.urandom(32))
        member = endpoint("member", secret)
        addresses = transfer_addresses(site)
        assert len(addresses) >= 6, addresses
        own = arenas(site)
        assert all(tries(member, *each) for each in own), "the right one reads"
        end_s = time.monotonic() + SENDS_S
        while time.monotonic() < end_s:
            hello = MAGIC + bytes([PROTOCOL]) + chance.randbytes(60)
            throwers = [
                threading.Thread(target=throw, args=(each.host, each.port, data))
                for each in addresses
                for data in (hello, chance.randbytes(200))
            ]
            for each in throwers:
                each.start()
                told["garbage"] += 1
            for address in addresses:
                _, handle = chance.choice(own)
                assert tries(stranger, address, handle) == b"", "a stranger reads"
                told["another secret"] += 1
            for address, handle in own:
                assert tries(member, address, forged(handle, chance)) == b""
                told["forged"] += 1
            for each in throwers:
                each.join(30)
        it.did(told.total())
        strangers = told["garbage"] + told["another secret"]

        def refused() -> float:
            return site.counted("kvtide_transfer_refused_total") - before

        # who has closed is counted when the port gets to it
        wait_for(
            lambda: refused() >= strangers, 30, f"{strangers} are counted; {refused()}"
        )
        it.load.answered(2)
        it.saw(", ".join(f"{count} {what}" for what, count in told.items()))
        it.saw(f"{refused():.0f} counted as turned away, no byte was read")
