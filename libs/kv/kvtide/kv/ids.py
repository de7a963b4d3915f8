"""Who and what things are: typed names that every layer shares."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

NodeId = NewType("NodeId", str)
"""A node's name; letters, digits, ``-`` and ``_`` only, so that it fits a subject."""

RequestId = NewType("RequestId", str)
"""A client request's name, the same in every log line, message and table."""

TenantId = NewType("TenantId", str)

BlockKey = NewType("BlockKey", bytes)
"""``KEY_BYTES`` bytes that name a full block and all the tokens before it."""

KEY_BYTES = 16


class Role(StrEnum):
    """What a process does. A process may have more than one (a worker with both)."""

    GATEWAY = "gateway"
    CONDUCTOR = "conductor"
    PREFILL = "prefill"
    DECODE = "decode"
    STORE = "store"


class Tier(StrEnum):
    """Where a copy of a block lies."""

    DRAM = "dram"
    SSD = "ssd"


@dataclass(frozen=True, slots=True, order=True)
class NodeRef:
    """One life of a node. A later life has a greater epoch; older ones are fenced."""

    node: NodeId
    epoch: int

    def ends_with(self, gone: "NodeRef") -> bool:
        """Whether this life is over when ``gone`` is: it is that one, or an earlier."""
        return self.node == gone.node and self.epoch <= gone.epoch


@dataclass(frozen=True, slots=True)
class RequestRef:
    """One placement of a request. Receivers drop attempts older than they know."""

    request: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Why something is held, and by whom: it ends with the request or the owner."""

    request: RequestId
    attempt: int
    owner: NodeRef
