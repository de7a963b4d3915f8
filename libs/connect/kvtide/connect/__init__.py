"""Connectors: engines that people already run, on kvtide's pool.

``EngineClient`` is the one client that all of them stand on. Each engine's adapter is a
module of its own (``kvtide.connect.vllm``) that only that engine imports.
"""

from kvtide.connect.client import EngineClient
from kvtide.connect.counts import ClientCounts
from kvtide.connect.settings import ConnectSettings
from kvtide.connect.shape import BlockShape
from kvtide.connect.space import EngineSpace, ForeignSpace

__all__ = [
    "BlockShape",
    "ClientCounts",
    "ConnectSettings",
    "EngineClient",
    "EngineSpace",
    "ForeignSpace",
]
