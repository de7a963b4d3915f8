"""Moves bytes between registered memories of processes, wherever they are.

An ``Endpoint`` registers regions and gives out handles; whoever holds a handle
connects to the endpoint's address and reads (or writes) ranges, through shared
memory on the same host and TCP elsewhere, verified either way. See ``interface``
for the rules of ownership and completion.
"""

from kvtide.transfer.cuda import DeviceMemory
from kvtide.transfer.endpoint import Endpoint
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
    "Fault",
    "FaultPlan",
    "MemoryEndpoint",
    "MemoryFabric",
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
    "huge_pages",
    "shm_host",
    "sweep_shm",
]
