"""Transfer engines of others as one more way for bytes; see ``seam`` for what is asked."""

from kvtide.transfer.engines.mooncake import MooncakeEngine
from kvtide.transfer.engines.nixl import NixlEngine
from kvtide.transfer.engines.seam import Engine, Flight


def engine_named(text: str) -> Engine | None:
    """The engine of a setting; "" is none. Nothing is imported or started yet.

    ``nixl`` or ``nixl:BACKEND``; ``mooncake`` or ``mooncake:PROTOCOL[:DEVICE]``.

    Raises:
        ValueError: it names no engine.
    """
    name, *words = text.split(":")
    match name, len(words):
        case "", 0:
            return None
        case "nixl", 0 | 1:
            return NixlEngine(*words)
        case "mooncake", 0 | 1 | 2:
            return MooncakeEngine(*words)
        case _:
            raise ValueError(f"{text!r} names no transfer engine: nixl or mooncake")


__all__ = ["Engine", "Flight", "MooncakeEngine", "NixlEngine", "engine_named"]
