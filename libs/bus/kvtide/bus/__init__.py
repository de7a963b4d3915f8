"""The bus: typed messages between all processes, and who is there.

``Bus`` (see ``interface``) is the seam; ``NatsBus`` and ``MemoryBus`` are behind it.
``Node`` is what every role stands on. Messages are in ``kvtide.bus.messages``, one file
per hop.
"""

from kvtide.bus.beater import NodeTimes, TaskBeater, ThreadBeater
from kvtide.bus.codec import PROTOCOL, Codec, DropReason, decode_plain
from kvtide.bus.core import LinkedBus
from kvtide.bus.errors import (
    BusClosed,
    BusError,
    BusTimeout,
    Disconnected,
    EpochError,
    Interrupted,
    NoResponder,
    WireError,
)
from kvtide.bus.follower import BlockFollower, BlockSink
from kvtide.bus.following import BlockFollowing, FollowTimes
from kvtide.bus.identity import Identity
from kvtide.bus.interface import Bus, Handler, Incoming, Later, Lost, Subscription
from kvtide.bus.limits import BusLimits
from kvtide.bus.memory import MemoryBus, MemoryHub
from kvtide.bus.metrics import BusMetrics
from kvtide.bus.nats_bus import NatsBus
from kvtide.bus.nats_client import NatsPass
from kvtide.bus.nats_link import NatsLink
from kvtide.bus.network import FaultyNetwork, NetworkFaults, PerfectNetwork
from kvtide.bus.node import Node
from kvtide.bus.opening import open_node, transfer_tls
from kvtide.bus.roster import (
    Changed,
    Gone,
    GoneReason,
    Joined,
    Member,
    Restarted,
    Roster,
    RosterEvent,
    RosterTimes,
)
from kvtide.bus.secret import load_secret
from kvtide.bus.subjects import HOPS, Hop, Subjects
from kvtide.bus.subscription import LinkedSubscription

__all__ = [
    "HOPS",
    "PROTOCOL",
    "BlockFollower",
    "BlockFollowing",
    "BlockSink",
    "Bus",
    "BusClosed",
    "BusError",
    "BusLimits",
    "BusMetrics",
    "BusTimeout",
    "Changed",
    "Codec",
    "Disconnected",
    "DropReason",
    "EpochError",
    "FaultyNetwork",
    "FollowTimes",
    "Gone",
    "GoneReason",
    "Handler",
    "Hop",
    "Identity",
    "Incoming",
    "Interrupted",
    "Joined",
    "Later",
    "LinkedBus",
    "LinkedSubscription",
    "Lost",
    "Member",
    "MemoryBus",
    "MemoryHub",
    "NatsBus",
    "NatsLink",
    "NatsPass",
    "NetworkFaults",
    "NoResponder",
    "Node",
    "NodeTimes",
    "PerfectNetwork",
    "Restarted",
    "Roster",
    "RosterEvent",
    "RosterTimes",
    "Subjects",
    "Subscription",
    "TaskBeater",
    "ThreadBeater",
    "WireError",
    "decode_plain",
    "load_secret",
    "open_node",
    "transfer_tls",
]
