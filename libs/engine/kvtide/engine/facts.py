"""The facts of a loaded model, which the engine makes; imports no torch."""

from kvtide.kv import ModelFacts
from kvtide.kv.model import LAYOUT_VERSION

__all__ = ["LAYOUT_VERSION", "ModelFacts"]
