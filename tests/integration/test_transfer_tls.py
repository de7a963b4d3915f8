"""Transfers over TLS: both ends need a certificate, and still the secret."""

import asyncio
import os
import pickle
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.integration.transfer_proxy import Notes, throw

from kvtide.runtime import ConfigError, SystemClock
from kvtide.transfer import (
    Access,
    Endpoint,
    ReadSlice,
    Refused,
    TlsFiles,
    TransferError,
    WriteSlice,
)

SECRET = b"the secret of this test's cluster"
MIB = 1 << 20

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl")


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(  # noqa: S603
        ["openssl", *words],  # noqa: S607
        cwd=folder,
        check=True,
        capture_output=True,
    )


def certificates(folder: Path) -> TlsFiles:
    """An authority of its own, and a certificate that it signed."""
    folder.mkdir()
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        folder,
        *("req", "-x509", *curve, "-days", "2", "-subj", "/CN=authority"),
        *("-keyout", "ca.key", "-out", "ca.pem"),
    )
    openssl(
        folder,
        *("req", *curve, "-subj", "/CN=node", "-keyout", "node.key"),
        *("-out", "node.csr"),
    )
    openssl(
        folder,
        *("x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
        *("-CAcreateserial", "-days", "2", "-out", "node.pem"),
    )
    return TlsFiles(folder / "node.pem", folder / "node.key", folder / "ca.pem")


def make(node: str, tls: TlsFiles | None, notes: Notes | None = None) -> Endpoint:
    return Endpoint(
        node=node,
        epoch=1,
        secret=SECRET,
        clock=SystemClock(),
        shm_dir=None,
        tls=tls,
        observer=notes,
    )


async def test_both_ways(tmp_path: Path) -> None:
    tls = certificates(tmp_path / "a")
    data = os.urandom(3 * MIB + 7)
    async with make("owner", tls) as owner, make("reader", tls) as reader:
        region = owner.register(bytearray(data), name="arena")
        peer = await reader.connect(owner.address)
        handle = region.handle(Access.WRITE)
        into = memoryview(bytearray(len(data)))
        half = len(data) // 2
        slices = [
            ReadSlice(handle, 0, into[:half]),
            ReadSlice(handle, half, into[half:]),
        ]
        await peer.read(slices, timeout_s=30)
        assert into == data
        news = memoryview(os.urandom(len(data)))
        await peer.write([WriteSlice(handle, 0, news)], timeout_s=30, notify=b"news")
        assert region.view == news


async def test_who_is_refused(tmp_path: Path) -> None:
    ours, others = certificates(tmp_path / "a"), certificates(tmp_path / "b")
    async with make("owner", ours) as owner:
        async with make("plain", None) as plain:
            with pytest.raises(TransferError):
                await plain.connect(owner.address, timeout_s=3)
        async with make("foreign", others) as foreign:
            with pytest.raises(Refused, match="TLS"):
                await foreign.connect(owner.address)
        async with make("reader", ours) as reader:
            await reader.connect(owner.address)
    async with make("owner", None) as owner, make("reader", ours) as reader:
        with pytest.raises(TransferError):
            await reader.connect(owner.address, timeout_s=3)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        # a hello that promises more than there is, and one that is nonsense
        bytes.fromhex("16030102000100fc0303"),
        bytes.fromhex("16030102000100fc0303") + bytes(600),
        pickle.dumps({"a": [1, 2, 3]}, protocol=4),
        bytes(5000),
        b"",
    ],
)
async def test_strangers_on_a_port_with_tls(tmp_path: Path, data: bytes) -> None:
    tls = certificates(tmp_path / "a")
    notes = Notes()
    async with make("owner", tls, notes) as owner:
        await asyncio.to_thread(throw, owner.address.port, data)
        async with asyncio.timeout(40):
            while not notes.refusals:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        async with make("reader", tls) as reader:
            region = owner.register(b"bytes", name="arena")
            peer = await reader.connect(owner.address)
            into = memoryview(bytearray(5))
            await peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=10)
            assert bytes(into) == b"bytes"


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TLS"):
        make("a", TlsFiles(tmp_path / "x", tmp_path / "y", tmp_path / "z"))
