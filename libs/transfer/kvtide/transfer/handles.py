"""The values that transfers are made of; all plain, so that any codec carries them."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

PROTOCOL = 5
"""Version of the wire protocol; both ends must have the same."""


class Access(IntEnum):
    """What a capability allows. WRITE includes READ."""

    READ = 1
    WRITE = 2


class Priority(IntEnum):
    """Which transfer goes first; lower values first."""

    FOREGROUND = 0
    BACKGROUND = 1


class Operation(StrEnum):
    """The direction of a transfer, seen from the one who asked."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class EndpointAddress:
    """Where and who an endpoint is.

    ``host`` may be several hosts, separated by commas: several ways to the endpoint.

    ``shm_host`` is the identity of its shared-memory directory (kernel boot, file
    system, directory), "" when it has none: two endpoints with equal non-empty
    ``shm_host`` share memory, others use the network.
    """

    node: str
    epoch: int
    host: str
    port: int
    shm_host: str
    protocol: int


@dataclass(frozen=True, slots=True)
class RegionHandle:
    """What an owner gives away so that others may reach one of its regions.

    Holding it is the right: ``capability`` is a keyed MAC over node, epoch, region,
    access and expiry. ``shm_name`` is the file in the owner's shared-memory
    directory, "" when the region can't be mapped.
    """

    node: str
    epoch: int
    region: int
    length: int
    capability: bytes
    shm_name: str


class ReadSlice(NamedTuple):
    """Copy ``len(into)`` bytes at ``offset`` of the region into ``into``.

    ``into`` is private, writable, contiguous memory. From submission until the
    transfer has ended (also when cancelled) it belongs to the transfer.
    """

    handle: RegionHandle
    offset: int
    into: memoryview


class WriteSlice(NamedTuple):
    """Copy ``source`` to ``offset`` of the region.

    ``source`` must not change until the transfer has ended.
    """

    handle: RegionHandle
    offset: int
    source: memoryview


@dataclass(frozen=True, slots=True)
class TransferResult:
    """A transfer that is complete.

    ``xxh3[i]`` is ``xxhash.xxh3_64_intdigest`` of slice i: of a read, the bytes as
    they lie in the caller's memory; of a write, the bytes of the source. ``path``
    is the transport that carried them ("tcp" if not all went the same way).
    """

    xxh3: tuple[int, ...]
    bytes: int
    path: str
