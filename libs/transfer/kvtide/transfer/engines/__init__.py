"""Transfer engines of others as one more way for bytes; see ``seam`` for what is asked."""

from kvtide.transfer.engines.mooncake import MooncakeEngine
from kvtide.transfer.engines.nixl import NixlEngine
from kvtide.transfer.engines.seam import Engine, Flight

__all__ = ["Engine", "Flight", "MooncakeEngine", "NixlEngine"]
