"""A typed face of Mooncake's transfer engine: what the transport needs, nothing more.

The engine (wheel ``mooncake-transfer-engine`` or ``…-non-cuda``) is imported when it is
opened; this module can always be imported.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

import importlib
import threading
from typing import Any

from kvtide.transfer.engines.seam import Engine, Flight
from kvtide.transfer.errors import Refused, Unreachable

_DONE = 1
MOST_NAME_BYTES = 256


class MooncakeEngine(Engine):
    """See ``Engine``. Peers find each other by address, without a metadata server.

    ``protocol`` and ``device`` are the engine's own ("tcp", "rdma", "efa", ...).
    """

    name = "mooncake"

    def __init__(self, protocol: str = "tcp", device: str = "") -> None:
        """Nothing is imported or started before ``open``."""
        self._protocol = protocol
        self._device = device
        self._engine: Any = None
        self._host = ""
        self._lock = threading.Lock()
        self._registered: list[int] = []

    def open(self, host: str) -> None:
        """See ``Engine.open``."""
        try:
            module = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise Refused(
                f"Mooncake's engine is not installed ({error}): "
                "pip install 'kvtide[mooncake]'",
                path=self.name,
            ) from error
        engine = module.TransferEngine()
        status = engine.initialize(host, "P2PHANDSHAKE", self._protocol, self._device)
        if status:
            raise Refused(
                f"Mooncake's engine does not start by {self._protocol}: {status}",
                path=self.name,
            )
        self._host, self._engine = host, engine

    def register(self, address: int, length: int) -> None:
        """See ``Engine.register``."""
        with self._lock:
            status = self._alive().register_memory(address, length)
            if status:
                raise Refused(
                    f"Mooncake's engine takes no memory: {status}", path=self.name
                )
            self._registered.append(address)

    def describe(self, address: int, length: int) -> bytes:
        """See ``Engine.describe``: the engine's own address, all that peers need."""
        del address, length
        return f"{self._host}:{self._alive().get_rpc_port()}".encode()

    def meet(self, description: bytes) -> str:
        """See ``Engine.meet``."""
        name = description.decode("ascii", "replace")
        host, _, port = name.rpartition(":")
        if len(description) > MOST_NAME_BYTES or not host or not port.isdigit():
            raise Refused("not an address of Mooncake's engine", path=self.name)
        return name

    def begin(
        self, peer: str, *, writes: bool, here: int, there: int, length: int
    ) -> Flight:
        """See ``Engine.begin``."""
        engine = self._alive()
        start = (
            engine.batch_transfer_async_write
            if writes
            else engine.batch_transfer_async_read
        )
        try:
            number = int(start(peer, [here], [there], [length]))
        except Exception as error:
            raise Unreachable(
                f"Mooncake's engine failed: {error}", path=self.name
            ) from error
        if number <= 0:
            raise Unreachable(
                f"Mooncake's engine does not reach {peer}", path=self.name
            )
        return _MooncakeFlight(engine, number)

    def _alive(self) -> Any:
        engine = self._engine
        if engine is None:
            raise Unreachable("Mooncake's engine is closed", path=self.name)
        return engine

    def close(self) -> None:
        """See ``Engine.close``; takes about a second, as its threads end."""
        with self._lock:
            engine, self._engine = self._engine, None
            if engine is None:
                return
            for address in self._registered:
                engine.unregister_memory(address)
            self._registered.clear()


class _MooncakeFlight(Flight):
    """A batch of one. Its number is worth nothing once an end was told."""

    def __init__(self, engine: Any, number: int) -> None:
        self._engine = engine
        self._number = number
        self._status = 0

    def landed(self) -> bool:
        if self._status == 0:
            try:
                self._status = int(self._engine.transfer_check_status(self._number))
            except Exception as error:
                raise Unreachable(
                    f"Mooncake's engine failed: {error}", path="mooncake"
                ) from error
        if self._status not in (0, _DONE):
            raise Unreachable(
                f"Mooncake's engine failed: {self._status}", path="mooncake"
            )
        return self._status == _DONE

    def over(self) -> bool:
        try:
            return self.landed()
        except Unreachable:
            return True
