"""The cluster as the pages draw it: nodes, what joined and left, the newest figures. Pure."""

from collections import deque

import msgspec

from kvtide.bus import Changed, Gone, Joined, Member, Restarted, RosterEvent
from kvtide.bus.messages import (
    ConductorLoad,
    DecodeLoad,
    GatewayLoad,
    PrefillLoad,
    StoreLoad as Store,
)
from kvtide.kv import NodeId

KEPT_HAPPENINGS = 200
_SOUND = ("off", "opening", "ready")


class NodeView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node in a row: its roles' loads side by side. Bytes, tokens, milliseconds."""

    node: str
    epoch: int
    roles: tuple[str, ...]
    host: str
    state: str
    busy: float = 0.0
    queued: int = 0
    running: int = 0
    waiting: int = 0
    queue_ms: float = 0.0
    step_ms: float = 0.0
    kv_used: int = 0
    kv_capacity: int = 0
    dram_used: int = 0
    dram_capacity: int = 0
    ssd_used: int = 0
    ssd_total: int = 0
    ssd_state: str = ""
    ssd_reason: str = ""
    quarantined: int = 0
    open_requests: int = 0
    indexed_blocks: int = 0
    exact: bool = True
    http: str = ""


class Happening(msgspec.Struct, frozen=True, kw_only=True):
    """A node joined, left, came back in another life, or changed its state or disk's."""

    at_s: float
    kind: str
    node: str
    text: str


class ClusterChange(msgspec.Struct, frozen=True, kw_only=True):
    """What a page needs to know after ``version``. ``full``: forget all before."""

    version: int
    full: bool
    nodes: list[NodeView]
    gone: list[str]
    happenings: list[Happening]


class Picture:
    """Folds the roster's events; each change has a number, so that pages get only news."""

    def __init__(self) -> None:
        """Nobody is there."""
        self.version = 0
        self._nodes: dict[NodeId, tuple[int, NodeView]] = {}
        self._gone: deque[tuple[int, str]] = deque(maxlen=KEPT_HAPPENINGS)
        self._happenings: deque[tuple[int, Happening]] = deque(maxlen=KEPT_HAPPENINGS)

    def heard(self, event: RosterEvent, wall_s: float) -> None:
        """A node joined, changed, restarted or went."""
        match event:
            case Joined(member):
                self._set(member)
                self._happened(wall_s, "joined", member, _roles(member))
            case Changed(before, member):
                self._set(member)
                if before.beat.state is not member.beat.state:
                    state = member.beat.state.value
                    self._happened(wall_s, state, member, f"is {state}")
                elif before.beat.roles != member.beat.roles:
                    self._happened(wall_s, "roles", member, _roles(member))
                was, now = _ssd(before), _ssd(member)
                if was is not None and now is not None and was != now:
                    kind = "ssd" if now[0] in _SOUND else "ssd_fault"
                    why = f": {now[1]}" if now[1] else ""
                    self._happened(wall_s, kind, member, f"SSD is {now[0]}{why}")
            case Restarted(_, member):
                self._set(member)
                self._happened(wall_s, "restarted", member, "began a new life")
            case Gone(member, reason):
                self.version += 1
                self._nodes.pop(member.node, None)
                self._gone.append((self.version, member.node))
                said = {
                    "goodbye": "ended: it or its supervisor said so",
                    "silent": "fell silent",
                }
                text = said.get(reason.value, "hangs")
                self._happened(wall_s, reason.value, member, text)

    def since(self, version: int) -> ClusterChange:
        """What changed after ``version``; everything for 0, or one too old."""
        oldest = self._gone[0][0] if len(self._gone) == self._gone.maxlen else 0
        full = version <= 0 or version < oldest or version > self.version
        after = 0 if full else version
        return ClusterChange(
            version=self.version,
            full=full,
            nodes=[view for number, view in self._nodes.values() if number > after],
            gone=[] if full else [node for n, node in self._gone if n > after],
            happenings=[each for n, each in self._happenings if n > after],
        )

    @property
    def open_requests(self) -> int:
        """Requests without their terminal answer, at all gateways."""
        return sum(view.open_requests for _, view in self._nodes.values())

    def _set(self, member: Member) -> None:
        self.version += 1
        self._nodes[member.node] = (self.version, node_view(member))

    def _happened(self, wall_s: float, kind: str, member: Member, text: str) -> None:
        self.version += 1
        happening = Happening(at_s=wall_s, kind=kind, node=member.node, text=text)
        self._happenings.append((self.version, happening))


def node_view(member: Member) -> NodeView:
    """A live node's row."""
    beat = member.beat
    row: dict[str, object] = {}
    for load in beat.load:
        match load:
            case PrefillLoad():
                row |= {
                    "busy": load.busy_share,
                    "queued": load.queued,
                    "queue_ms": round(load.queue_ms, 1),
                    "running": load.running,
                }
            case DecodeLoad():
                row |= {
                    "busy": max(load.busy_share, float(str(row.get("busy", 0)))),
                    "waiting": load.waiting,
                    "running": load.running,
                    "step_ms": round(load.step_ms, 1),
                    "kv_used": load.kv_tokens_used + load.kv_tokens_promised,
                    "kv_capacity": load.kv_tokens_capacity,
                }
            case Store():
                row |= {
                    "dram_used": load.used_bytes,
                    "dram_capacity": load.capacity_bytes,
                    "ssd_used": load.ssd_used_bytes,
                    "ssd_total": load.ssd_total_bytes,
                    "ssd_state": load.ssd_state,
                    "ssd_reason": load.ssd_reason,
                    "quarantined": load.quarantined_slots,
                }
            case GatewayLoad():
                row |= {"open_requests": load.open_requests}
            case ConductorLoad():
                row |= {"indexed_blocks": load.indexed_blocks, "exact": load.exact}
    known = {
        "node": member.node,
        "epoch": member.ref.epoch,
        "roles": tuple(role.value for role in beat.roles),
        "host": beat.host,
        "state": beat.state.value,
        "http": beat.http,
    }
    return msgspec.convert(known | row, NodeView)


def _ssd(member: Member) -> tuple[str, str] | None:
    """State and reason of a store's SSD tier; None: it is no store."""
    for load in member.beat.load:
        if isinstance(load, Store):
            return load.ssd_state, load.ssd_reason
    return None


def _roles(member: Member) -> str:
    return " and ".join(role.value for role in member.beat.roles) or "no role"
