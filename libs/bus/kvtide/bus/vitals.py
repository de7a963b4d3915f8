"""What this process says of itself in its next beat. Safe from any thread."""

import threading
from dataclasses import dataclass

from kvtide.bus.codec import PROTOCOL
from kvtide.bus.messages import (
    Beat,
    ConductorLoad,
    DecodeLoad,
    GatewayLoad,
    Load,
    NodeState,
    PrefillLoad,
    StoreLoad,
)
from kvtide.kv import ModelFacts, NodeRef, Role
from kvtide.transfer import EndpointAddress, RegionHandle

_ROLE_OF: dict[type[Load], Role] = {
    PrefillLoad: Role.PREFILL,
    DecodeLoad: Role.DECODE,
    StoreLoad: Role.STORE,
    GatewayLoad: Role.GATEWAY,
    ConductorLoad: Role.CONDUCTOR,
}


@dataclass(slots=True)
class _Said:
    """The parts of a beat that change."""

    state: NodeState = NodeState.LOADING
    steps: int = 0
    http: str = ""
    transfer: EndpointAddress | None = None
    arenas: tuple[RegionHandle, ...] = ()
    models: tuple[ModelFacts, ...] = ()
    worker_class: str = ""


class Vitals:
    """The state that beats are made of; ``changed`` grows with each change."""

    def __init__(
        self, roles: tuple[Role, ...], host: str, started_wall_s: float
    ) -> None:
        """``host`` is equal for nodes that share memory."""
        self._lock = threading.Lock()
        self._roles = roles
        self._capable = roles
        self.host = host
        self._started_wall_s = started_wall_s
        self._said = _Said()
        self._load: dict[Role, Load] = {}
        self._seq = 0
        self.changed = 0

    @property
    def state(self) -> NodeState:
        """What the node is ready for."""
        return self._said.state

    def set_state(self, state: NodeState) -> bool:
        """Whether that changed it."""
        with self._lock:
            if state is self._said.state:
                return False
            self._said.state = state
            self.changed += 1
            return True

    def set_load(self, *loads: Load) -> bool:
        """Replace the loads of these roles; whether that changed anything."""
        with self._lock:
            fresh = {_ROLE_OF[type(load)]: load for load in loads}
            if all(self._load.get(role) == load for role, load in fresh.items()):
                return False
            self._load.update(fresh)
            self.changed += 1
            return True

    def set_roles(self, roles: tuple[Role, ...]) -> None:
        """The roles that it takes work of."""
        with self._lock:
            self._roles = roles
            self.changed += 1

    def set_models(self, models: tuple[ModelFacts, ...]) -> None:
        """The models that it serves."""
        with self._lock:
            self._said.models = models
            self.changed += 1

    def set_worker_class(self, name: str) -> None:
        """Those that are equally fast."""
        with self._lock:
            self._said.worker_class = name
            self.changed += 1

    def set_arenas(self, arenas: tuple[RegionHandle, ...]) -> None:
        """A store's arenas, as read capabilities."""
        with self._lock:
            self._said.arenas = arenas
            self.changed += 1

    def set_http(self, http: str) -> None:
        """Where its health and metrics are."""
        with self._lock:
            self._said.http = http
            self.changed += 1

    def set_transfer(self, address: EndpointAddress) -> None:
        """Where its transfer endpoint is."""
        with self._lock:
            self._said.transfer = address
            self.changed += 1

    def count_steps(self, count: int) -> None:
        """The engine moved on. Cheap: called for every step."""
        with self._lock:
            self._said.steps += count

    def forget_load(self) -> None:
        """Everything that was held is given up."""
        with self._lock:
            self._load.clear()
            self.changed += 1

    def beat(self, node: NodeRef) -> Beat:
        """The next beat of ``node``; its number grows."""
        with self._lock:
            self._seq += 1
            said = self._said
            return Beat(
                node=node,
                roles=self._roles,
                capable=self._capable,
                seq=self._seq,
                host=self.host,
                state=said.state,
                steps=said.steps,
                load=tuple(load for _, load in sorted(self._load.items())),
                transfer=said.transfer,
                arenas=said.arenas,
                models=said.models,
                http=said.http,
                protocol=PROTOCOL,
                started_wall_s=self._started_wall_s,
                worker_class=said.worker_class,
            )
