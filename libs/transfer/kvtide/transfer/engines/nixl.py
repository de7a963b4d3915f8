"""A typed face of NIXL's Python bindings: what the transport needs, and nothing more.

NIXL (wheel ``nixl-cu12`` or ``nixl-cu13``) is imported when an engine is opened; this
module can always be imported. The bindings are used, not the package's own agent: that
one logs by itself, and unpickles what peers send if asked to.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

import importlib
import logging
import secrets
import threading
from typing import Any

from kvtide.transfer.engines.seam import Engine, Flight
from kvtide.transfer.errors import Refused, Unreachable

log = logging.getLogger("kvtide.transfer")

MODULES = ("nixl_cu12", "nixl_cu13")


class NixlEngine(Engine):
    """See ``Engine``: a NIXL agent with one backend ("UCX", "LIBFABRIC", ...)."""

    name = "nixl"

    def __init__(self, backend: str = "UCX") -> None:
        """Nothing is imported or started before ``open``."""
        self._backend_name = backend
        self._bind: Any = None
        self._agent: Any = None
        self._backend = 0
        self._lock = threading.Lock()
        self._registered: list[Any] = []
        self._met: set[str] = set()
        self._in_air: set[_NixlFlight] = set()

    def open(self, host: str) -> None:
        """See ``Engine.open``; UCX finds its own addresses."""
        del host
        self._bind = bind = _bindings()
        config = bind.nixlAgentConfig()
        # an owner that waits must still answer where the network can't by itself
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = bind.NIXL_THREAD_SYNC_STRICT
        try:
            self._agent = bind.nixlAgent(f"kvtide-{secrets.token_hex(8)}", config)
            self._backend = int(self._agent.createBackend(self._backend_name, {}))
        except Exception as error:
            self._agent = None
            raise Refused(
                f"NIXL does not start with {self._backend_name}: {error}",
                path=self.name,
            ) from error

    def register(self, address: int, length: int) -> None:
        """See ``Engine.register``."""
        bind = self._bind
        what = bind.nixlRegDList(bind.DRAM_SEG, [(address, length, 0, "")])
        try:
            with self._lock:
                self._agent.registerMem(what, [self._backend])
                self._registered.append(what)
        except Exception as error:
            raise Refused(f"NIXL takes no memory: {error}", path=self.name) from error

    def describe(self, address: int, length: int) -> bytes:
        """See ``Engine.describe``: NIXL's metadata of this memory alone."""
        bind = self._bind
        what = bind.nixlRegDList(bind.DRAM_SEG, [(address, length, 0, "")])
        try:
            with self._lock:
                return bytes(self._agent.getLocalPartialMD(what, True, [self._backend]))
        except Exception as error:
            raise Refused(f"NIXL says nothing: {error}", path=self.name) from error

    def meet(self, description: bytes) -> str:
        """See ``Engine.meet``."""
        try:
            with self._lock:
                name = self._agent.loadRemoteMD(description).decode()
                self._met.add(name)
        except Exception as error:
            raise Refused(
                f"NIXL can't meet the peer: {error}", path=self.name
            ) from error
        return name

    def begin(
        self, peer: str, *, writes: bool, here: int, there: int, length: int
    ) -> Flight:
        """See ``Engine.begin``."""
        bind = self._bind
        ours = bind.nixlXferDList(bind.DRAM_SEG, [(here, length, 0)])
        theirs = bind.nixlXferDList(bind.DRAM_SEG, [(there, length, 0)])
        operation = bind.NIXL_WRITE if writes else bind.NIXL_READ
        with self._lock:
            if self._agent is None:
                raise Unreachable("NIXL is closed", path=self.name)
            try:
                request = self._agent.createXferReq(
                    operation, ours, theirs, peer, "", [self._backend]
                )
            except Exception as error:
                raise Unreachable(f"NIXL says {error}", path=self.name) from error
            flight = _NixlFlight(self, request)
            self._in_air.add(flight)
        flight.start()
        return flight

    def post(self, request: int) -> bool:
        """Start a request; whether it is done. For its flight."""
        with self._lock:
            return self._done(self._alive().postXferReq(request, ""))

    def state(self, request: int) -> bool:
        """Whether a request is done. For its flight."""
        with self._lock:
            return self._done(self._alive().getXferStatus(request))

    def _alive(self) -> Any:
        if self._agent is None:
            raise Unreachable("NIXL is closed", path=self.name)
        return self._agent

    def _done(self, status: Any) -> bool:
        if status == self._bind.NIXL_SUCCESS:
            return True
        if status != self._bind.NIXL_IN_PROG:
            raise Unreachable(f"NIXL says {status}", path=self.name)
        return False

    def release(self, flight: "_NixlFlight") -> None:
        """A flight is over."""
        with self._lock:
            self._in_air.discard(flight)
            self._drop(flight)

    def _drop(self, flight: "_NixlFlight") -> None:
        if self._agent is None:
            return
        try:
            self._agent.releaseXferReq(flight.request)
        except Exception as error:  # noqa: BLE001 - whatever it says, nothing is left to do
            log.info("NIXL does not let go of a request: %s", error)

    def close(self) -> None:
        """See ``Engine.close``: the agent ends its progress thread."""
        with self._lock:
            if self._agent is None:
                return
            for flight in self._in_air:
                self._drop(flight)
            self._in_air.clear()
            self._quietly_forget()
            # its destructor closes UCX: then no memory is touched any more
            self._agent = None

    def _quietly_forget(self) -> None:
        try:
            for name in self._met:
                self._agent.invalidateRemoteMD(name)
            for what in self._registered:
                self._agent.deregisterMem(what, [self._backend])
        except Exception as error:  # noqa: BLE001 - it is closed all the same
            log.info("NIXL does not forget: %s", error)
        self._met.clear()
        self._registered.clear()


class _NixlFlight(Flight):
    """A transfer request of an agent."""

    def __init__(self, engine: NixlEngine, request: int) -> None:
        self.request = request
        self._engine = engine
        self._ended = False
        self._good = False

    def start(self) -> None:
        self._step(self._engine.post)

    def landed(self) -> bool:
        if not self._ended:
            self._step(self._engine.state)
        return self._good

    def over(self) -> bool:
        try:
            self.landed()
        except Unreachable:
            return True
        return self._ended

    def _step(self, ask: Any) -> None:
        try:
            self._good = self._ended = bool(ask(self.request))
        except Exception as error:
            self._ended = True
            self._engine.release(self)
            if isinstance(error, Unreachable):
                raise
            raise Unreachable(f"NIXL says {error}", path="nixl") from error
        if self._ended:
            self._engine.release(self)


def _bindings() -> Any:
    problems: list[str] = []
    for name in MODULES:
        try:
            return importlib.import_module(f"{name}._bindings")
        except ImportError as error:
            problems.append(str(error))
    raise Refused(
        f"NIXL is not installed ({'; '.join(problems)}): pip install 'kvtide[nixl]'",
        path="nixl",
    )
