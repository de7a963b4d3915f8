"""Transfers between hosts: network namespaces with two links that get slow or cut.

There is no netem in some kernels: a token bucket makes a link slow, nft drops packets
at random, and a link is cut by taking it down.
"""

# ruff: noqa: S603, S607, T201 - it runs `ip` and itself

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvtide.runtime import SystemClock
from kvtide.transfer import (
    Access,
    Endpoint,
    EndpointAddress,
    ReadSlice,
    RegionHandle,
    WriteSlice,
)

SECRET = b"the secret of this test's cluster"
MIB = 1 << 20
BLOCK = bytes(range(256)) * 4096


def can_make_hosts() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return False
    name = f"kvprobe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], check=False).returncode:
        return False
    subprocess.run(["ip", "netns", "del", name], check=True)
    return True


pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not can_make_hosts(), reason="needs root, ip and tc"),
]


def run(*words: str) -> None:
    subprocess.run(words, check=True)


class Hosts:
    """Two hosts, "a" and "b", joined by links 0 and 1: 10.91.<link>.1 and .2."""

    def __init__(self) -> None:
        self.names = {side: f"kv{side}{os.getpid()}" for side in "ab"}
        self._children: list[subprocess.Popen[str]] = []
        for name in self.names.values():
            run("ip", "netns", "add", name)
            self.inside(name, "ip", "link", "set", "lo", "up")
        for link in (0, 1):
            ends = [f"l{link}", "netns", self.names["a"]]
            peer = ["peer", "name", f"l{link}", "netns", self.names["b"]]
            run("ip", "link", "add", *ends, "type", "veth", *peer)
            for number, name in enumerate(self.names.values(), 1):
                address = f"10.91.{link}.{number}/24"
                self.inside(name, "ip", "addr", "add", address, "dev", f"l{link}")
                self.inside(name, "ip", "link", "set", f"l{link}", "up")

    def inside(self, name: str, *words: str) -> None:
        run("ip", "netns", "exec", name, *words)

    def slow(self, link: int, rate: str) -> None:
        """What "a" sends over the link comes no faster."""
        limits = ["rate", rate, "burst", "64kb", "latency", "20ms"]
        words = ["tc", "qdisc", "replace", "dev", f"l{link}", "root", "tbf", *limits]
        self.inside(self.names["a"], *words)

    def lossy(self, link: int, percent: int) -> None:
        """Some of what comes to "b" over the link is dropped."""
        rule = f'iifname "l{link}" numgen random mod 100 < {percent} drop'
        rules = (
            "table ip lossy {\nchain in {\ntype filter hook input priority 0;\n"
            f"{rule}\n}}\n}}\n"
        )
        self.inside(self.names["b"], "nft", rules)

    def cut(self, link: int) -> None:
        self.inside(self.names["b"], "ip", "link", "set", f"l{link}", "down")

    def start(self, side: str, *arguments: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [
                *("ip", "netns", "exec", self.names[side]),
                *(sys.executable, __file__, *arguments),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._children.append(child)
        return child

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                pipe.close()
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    yield hosts
    hosts.close()


def line_of(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, "the process ended"
    return json.loads(line)


def tell(child: subprocess.Popen[str], *words: Any) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(words) + "\n")
    child.stdin.flush()


class Pair:
    """An owner on host "a" and a reader on host "b"."""

    def __init__(self, hosts: Hosts, mib: int) -> None:
        owner = hosts.start("a", "own", str(mib))
        self.reader = hosts.start("b", "read", json.dumps(line_of(owner)))
        assert line_of(self.reader) == "connected"

    def read(self, mib: int, operation: str = "read") -> dict[str, int]:
        """Move ``mib`` MiB, checked; the bytes by host that it took."""
        self.begin(mib, operation)
        return self.end()

    def begin(self, mib: int, operation: str = "read") -> None:
        tell(self.reader, operation, mib)

    def end(self) -> dict[str, int]:
        result = line_of(self.reader)
        assert result.pop("right"), result
        return result


FAST, SLOW = "10.91.0.1", "10.91.1.1"


def test_equal_links_share(hosts: Hosts) -> None:
    for link in (0, 1):
        hosts.slow(link, "400mbit")
    moved = Pair(hosts, 64).read(64)
    assert moved[FAST] + moved[SLOW] == 64 * MIB
    assert min(moved.values()) > 16 * MIB


def test_a_slow_link_gets_less(hosts: Hosts) -> None:
    hosts.slow(0, "800mbit")
    hosts.slow(1, "20mbit")
    moved = Pair(hosts, 64).read(64)
    assert moved[FAST] + moved[SLOW] == 64 * MIB
    # 40 times as fast, but on a busy machine the processes are what is slow
    assert moved[FAST] > 1.5 * moved[SLOW]


def test_a_cut_link_is_left(hosts: Hosts) -> None:
    for link in (0, 1):
        hosts.slow(link, "200mbit")
    pair = Pair(hosts, 128)
    pair.begin(128)
    hosts.cut(1)
    moved = pair.end()
    assert moved[FAST] + moved[SLOW] == 128 * MIB
    assert moved[FAST] > moved[SLOW]
    again = pair.read(16, "write")
    assert again[FAST] - moved[FAST] == 17 * MIB


@pytest.mark.skipif(not shutil.which("nft"), reason="needs nft")
def test_a_lossy_link(hosts: Hosts) -> None:
    hosts.lossy(1, 25)
    moved = Pair(hosts, 32).read(32)
    assert moved[FAST] + moved[SLOW] == 32 * MIB
    assert moved[FAST] > moved[SLOW]


# ---- the processes on the hosts


def plain(value: EndpointAddress | RegionHandle) -> dict[str, Any]:
    found = {name: getattr(value, name) for name in value.__slots__}
    return {k: v.hex() if isinstance(v, bytes) else v for k, v in found.items()}


async def own(mib: int) -> None:
    async with Endpoint(
        node="owner",
        epoch=1,
        secret=SECRET,
        clock=SystemClock(),
        listen_host="0.0.0.0",
        advertise_host=f"{FAST},{SLOW}",
        shm_dir=None,
    ) as endpoint:
        region = endpoint.register(bytearray(BLOCK * mib), name="arena")
        handle = plain(region.handle())
        writable = endpoint.register(bytearray(BLOCK * mib), name="target")
        target = plain(writable.handle(Access.WRITE))
        said = {"address": plain(endpoint.address), "read": handle, "write": target}
        print(json.dumps(said), flush=True)
        await asyncio.to_thread(sys.stdin.read)


def handle_of(data: dict[str, Any]) -> RegionHandle:
    capability = bytes.fromhex(data.pop("capability"))
    return RegionHandle(**data, capability=capability)


async def read(said: dict[str, Any]) -> None:
    async with Endpoint(
        node="reader",
        epoch=1,
        secret=SECRET,
        clock=SystemClock(),
        listen_host="0.0.0.0",
        shm_dir=None,
    ) as endpoint:
        peer = await endpoint.connect(EndpointAddress(**said["address"]))
        handles = {name: handle_of(said[name]) for name in ("read", "write")}
        print(json.dumps("connected"), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            operation, mib = json.loads(line)
            data = bytearray(mib * MIB)
            view = memoryview(data)
            handle = handles[operation]
            if operation == "read":
                await peer.read([ReadSlice(handle, 0, view)], timeout_s=120)
            else:
                # zeros over there, then read back by the same handle
                await peer.write([WriteSlice(handle, 0, view)], timeout_s=120)
                data = bytearray(b"x" * MIB)
                last = ReadSlice(handle, (mib - 1) * MIB, memoryview(data))
                await peer.read([last], timeout_s=120)
            right = data == (BLOCK * mib if operation == "read" else bytes(MIB))
            moved: dict[str, int] = {}
            for rail in peer.rails():
                host = rail.name.split("#")[0]
                moved[host] = moved.get(host, 0) + rail.moved_bytes
            print(json.dumps({**moved, "right": right}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "own":
        asyncio.run(own(int(sys.argv[2])))
    else:
        asyncio.run(read(json.loads(sys.argv[2])))
