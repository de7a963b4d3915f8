"""Moves bytes between registered memories of processes, wherever they are.

An ``Endpoint`` registers regions and gives out handles; whoever holds a handle
connects to the endpoint's address and reads (or writes) ranges, through shared
memory on the same host and TCP or RDMA elsewhere, verified either way. See
``interface`` for the rules of ownership and completion.

Without an event loop:

>>> from kvtide.runtime import SystemClock
>>> from kvtide.transfer import Access, Endpoint, ReadSlice, WriteSlice
>>> secret, clock = b"what all of the cluster know", SystemClock()
>>> with (
...     Endpoint(node="owner", epoch=1, secret=secret, clock=clock) as owner,
...     Endpoint(node="reader", epoch=1, secret=secret, clock=clock) as reader,
... ):
...     region = owner.allocate(4096, name="arena")
...     region.view[:5] = b"hello"
...     # address and handle are plain values: send them by whatever you have
...     address, handle = owner.address, region.handle(Access.WRITE, ttl_s=60)
...     peer = reader.connect_blocking(address)
...     into = memoryview(bytearray(5))
...     result = peer.read([ReadSlice(handle, 0, into)], timeout_s=5).wait_blocking()
...     print(bytes(into), result.bytes)
...     news = memoryview(b"world")
...     write = peer.write([WriteSlice(handle, 0, news)], timeout_s=5)
...     print(write.wait_blocking().bytes, bytes(region.view[:5]))
b'hello' 5
5 b'world'

The same with asyncio, where a message rides with the bytes:

>>> import asyncio
>>> async def main():
...     heard = asyncio.Queue()
...     async with (
...         Endpoint(node="owner", epoch=1, secret=secret, clock=clock) as owner,
...         Endpoint(node="reader", epoch=1, secret=secret, clock=clock) as reader,
...     ):
...         region = owner.register(bytearray(b"hello"), name="greeting")
...         owner.on_notification(lambda *said: heard.put_nowait(said))
...         peer = await reader.connect(owner.address)
...         into = memoryview(bytearray(5))
...         slices = [ReadSlice(region.handle(), 0, into)]
...         await peer.read(slices, timeout_s=5, notify=b"thanks")
...         print(bytes(into), await heard.get())
>>> asyncio.run(main())
b'hello' ('reader', 1, b'thanks')
"""

from kvtide.transfer.cuda import DeviceMemory
from kvtide.transfer.endpoint import Endpoint
from kvtide.transfer.engines import (
    Engine,
    MooncakeEngine,
    NixlEngine,
    engine_named,
)
from kvtide.transfer.errors import (
    AccessDenied,
    Cancelled,
    Corrupt,
    OutOfBounds,
    Refused,
    StaleEpoch,
    TimedOut,
    TransferError,
    Unreachable,
)
from kvtide.transfer.files import SegmentFile
from kvtide.transfer.handles import (
    PROTOCOL,
    Access,
    EndpointAddress,
    Operation,
    Priority,
    ReadSlice,
    RegionHandle,
    TransferResult,
    WriteSlice,
)
from kvtide.transfer.interface import (
    Notified,
    Observer,
    PeerGone,
    TransferEndpoint,
    TransferPeer,
)
from kvtide.transfer.memory import MemoryEndpoint, MemoryFabric
from kvtide.transfer.memory_peer import Fault, FaultPlan
from kvtide.transfer.metrics import PrometheusObserver
from kvtide.transfer.near import Near
from kvtide.transfer.peer import SocketPeer
from kvtide.transfer.regions import Region
from kvtide.transfer.shm import huge_pages, shm_host, sweep_shm
from kvtide.transfer.tls import TlsFiles
from kvtide.transfer.topology import Topology
from kvtide.transfer.transfer import Transfer

Peer = TransferPeer
"""The short name: what ``connect`` gives, whatever the transport."""

__all__ = [
    "PROTOCOL",
    "Access",
    "AccessDenied",
    "Cancelled",
    "Corrupt",
    "DeviceMemory",
    "Endpoint",
    "EndpointAddress",
    "Engine",
    "Fault",
    "FaultPlan",
    "MemoryEndpoint",
    "MemoryFabric",
    "MooncakeEngine",
    "Near",
    "NixlEngine",
    "Notified",
    "Observer",
    "Operation",
    "OutOfBounds",
    "Peer",
    "PeerGone",
    "Priority",
    "PrometheusObserver",
    "ReadSlice",
    "Refused",
    "Region",
    "RegionHandle",
    "SegmentFile",
    "SocketPeer",
    "StaleEpoch",
    "TimedOut",
    "TlsFiles",
    "Topology",
    "Transfer",
    "TransferEndpoint",
    "TransferError",
    "TransferPeer",
    "TransferResult",
    "Unreachable",
    "WriteSlice",
    "engine_named",
    "huge_pages",
    "shm_host",
    "sweep_shm",
]
