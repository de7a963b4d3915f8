"""Two processes move bytes, the owner without asyncio, the reader without it or with it."""

import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from tests.integration import transfer_blocking
from tests.integration.transfer_blocking import LENGTH, address_and_handle, endpoint

from kvtide.transfer import (
    Endpoint,
    EndpointAddress,
    ReadSlice,
    RegionHandle,
    WriteSlice,
)

WHOLE = bytes(range(256)) * (LENGTH // 256)
ENDS_S = 20


@contextmanager
def owner(folder: str) -> Generator[tuple[IO[str], str]]:
    """What the owner's process says, and its first line; it ends with its input."""
    command = [sys.executable, transfer_blocking.__file__, folder]
    with subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout, process.stdout.readline()
            process.stdin.close()
            assert process.wait(ENDS_S) == 0
        finally:
            process.kill()


@pytest.fixture(params=["shm", "tcp"])
def shm_dir(request: pytest.FixtureRequest) -> Path | None:
    return Path("/dev/shm") if request.param == "shm" else None  # noqa: S108


def test_without_asyncio(shm_dir: Path | None) -> None:
    with owner(str(shm_dir or "-")) as (said, line):
        with endpoint("reader", shm_dir) as reader:
            path = moved(reader, *address_and_handle(line))
            assert path == ("tcp" if shm_dir is None else "shm")
            assert said.readline() == "reader one and all\n"
        assert said.readline() == "reader is gone\n"
    names = [thread.name for thread in threading.enumerate()]
    assert [name for name in names if name.startswith("transfer")] == []


def moved(reader: Endpoint, address: EndpointAddress, handle: RegionHandle) -> str:
    """Reads all, writes a byte with words, reads it again; says by which way."""
    peer = reader.connect_blocking(address, timeout_s=ENDS_S)
    into = memoryview(bytearray(LENGTH))
    result = peer.read([ReadSlice(handle, 0, into)], timeout_s=ENDS_S).wait_blocking()
    assert bytes(into) == WHOLE
    write = [WriteSlice(handle, 7, memoryview(b"!"))]
    peer.write(write, timeout_s=ENDS_S, notify=b"one and all").wait_blocking()
    peer.read([ReadSlice(handle, 0, into)], timeout_s=ENDS_S).wait_blocking()
    assert bytes(into) == WHOLE[:7] + b"!" + WHOLE[8:]
    return result.path


async def test_with_asyncio(shm_dir: Path | None) -> None:
    with owner(str(shm_dir or "-")) as (_said, line):
        address, handle = address_and_handle(line)
        async with endpoint("reader", shm_dir) as reader:
            peer = await reader.connect(address, timeout_s=ENDS_S)
            into = memoryview(bytearray(LENGTH))
            await peer.read([ReadSlice(handle, 0, into)], timeout_s=ENDS_S)
            assert bytes(into) == WHOLE
