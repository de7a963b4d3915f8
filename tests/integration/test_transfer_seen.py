"""What operators see of transfers: metrics by path and purpose, and traces."""

# ruff: noqa: ASYNC110, S108 - conditions are polled with a deadline, in /dev/shm

import asyncio
import logging
import os
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from tests.integration.transfer_proxy import CLOCK, MIB, SECRET, Breaker, Proxy, through

from kvtide.transfer import (
    Access,
    AccessDenied,
    Corrupt,
    Endpoint,
    PrometheusObserver,
    ReadSlice,
    WriteSlice,
)


class Seen:
    """An endpoint's metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.observer = PrometheusObserver(self.registry)

    def __call__(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"kvtide_transfer_{name}", labels)
        return 0.0 if value is None else value

    async def until(self, expected: float, name: str, **labels: str) -> None:
        """The owner counts after its answer, in its own thread."""
        async with asyncio.timeout(40):
            while self(name, **labels) < expected:
                await asyncio.sleep(0.005)
        assert self(name, **labels) == expected


def make(node: str, seen: Seen, shm_dir: Path | None = None) -> Endpoint:
    return Endpoint(
        node=node,
        epoch=1,
        secret=SECRET,
        clock=CLOCK,
        shm_dir=shm_dir,
        observer=seen.observer,
    )


async def test_bytes_by_path_and_purpose(tmp_path: Path) -> None:
    ours, theirs = Seen(), Seen()
    shm = Path("/dev/shm")
    async with make("owner", theirs, shm) as owner, make("reader", ours, shm) as reader:
        (tmp_path / "segment").write_bytes(bytes(MIB))
        shared = owner.allocate(MIB, name="shared")
        private = owner.register(bytearray(MIB), name="private")
        file = owner.register_file(tmp_path / "segment", name="file", writable=True)
        peer = await reader.connect(owner.address)
        into = memoryview(bytearray(MIB))
        for region, path, purpose, size in (
            (shared, "shm", "reuse", 1000),
            (shared, "shm", "hand-over", 2000),
            (private, "tcp", "replica", 3000),
            (private, "tcp", "drain", 4000),
            (file, "file", "blob", 5000),
        ):
            handle = region.handle(Access.WRITE)
            read, write = (
                ReadSlice(handle, 0, into[:size]),
                WriteSlice(handle, 0, into[:size]),
            )
            for _ in range(2):
                await peer.read([read], timeout_s=10, purpose=purpose)
            await peer.write([write], timeout_s=10, purpose=purpose)
            labels = {"path": path, "purpose": purpose}
            for operation, count in (("read", 2), ("write", 1)):
                each = {**labels, "operation": operation}
                assert ours("bytes_total", **each, side="client") == count * size
                assert ours("operations_total", **each, side="client") == count
                assert ours("seconds_count", **each) == count
                if path == "tcp":
                    served = {**each, "side": "server"}
                    await theirs.until(count * size, "bytes_total", **served)
                    await theirs.until(count, "operations_total", **served)


async def test_failures_retries_and_refusals_are_counted() -> None:
    ours, theirs = Seen(), Seen()
    async with make("owner", theirs) as owner, make("reader", ours) as reader:
        region = owner.register(bytearray(os.urandom(MIB)), name="arena")
        into = memoryview(bytearray(MIB))
        slices = [ReadSlice(region.handle(), 0, into)]
        labels = {"path": "tcp", "purpose": "hand-over"}
        done = {**labels, "operation": "read", "side": "client"}
        with closing(Proxy(owner.address.port)) as proxy:
            peer = await reader.connect(through(proxy, owner))
            proxy.change = Breaker("flip", times=1)
            await peer.read(slices, timeout_s=20, purpose="hand-over")
            assert into == region.view
            assert ours("retries_total", **labels, kind="corrupt") == 1
            # once for all its tries
            assert ours("bytes_total", **done) == MIB
            proxy.change = Breaker("flip", times=10**9)
            with pytest.raises(Corrupt):
                await peer.read(slices, timeout_s=20, purpose="hand-over")
            failed = {**labels, "operation": "read"}
            assert ours("errors_total", **failed, kind="corrupt") == 1
            assert ours("bytes_total", **done) == MIB
            proxy.change = lambda chunk, _: chunk
            write = [WriteSlice(region.handle(), 0, into)]
            with pytest.raises(AccessDenied):
                await peer.write(write, timeout_s=20, purpose="drain")
        denied = {"path": "tcp", "purpose": "drain", "operation": "write"}
        assert ours("errors_total", **denied, kind="access_denied") == 1
        # a stranger
        _, writer = await asyncio.open_connection("127.0.0.1", owner.address.port)
        before = theirs("refused_total")
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await theirs.until(before + 1, "refused_total")
        writer.close()


async def test_traces_go_with_reads_and_writes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with make("owner", Seen()) as owner, make("reader", Seen()) as reader:
        region = owner.register(bytearray(5), name="arena")
        peer = await reader.connect(owner.address)
        into = memoryview(bytearray(5))
        handle = region.handle(Access.WRITE)
        read = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        write = "00-aaf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
        with caplog.at_level(logging.DEBUG, "kvtide.transfer"):
            await peer.read([ReadSlice(handle, 0, into)], timeout_s=10)
            await peer.read([ReadSlice(handle, 0, into)], timeout_s=10, trace=read)
            await peer.write([WriteSlice(handle, 0, into)], timeout_s=10, trace=write)
            expected = [(read, "read", 5, "reader"), (write, "write", 5, "reader")]
            found: list[object] = []
            async with asyncio.timeout(40):
                while len(found) < len(expected):
                    served = [vars(r) for r in caplog.records if r.message == "served"]
                    found = [
                        (s["trace"], s["operation"], s["bytes"], s["node"])
                        for s in served
                    ]
                    await asyncio.sleep(0.005)
        assert found == expected
