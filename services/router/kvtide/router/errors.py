"""Errors of an engine's agent.

KvtideError
└── EngineAnswerError  the engine answered, but not what was asked for
"""

from kvtide.runtime import KvtideError


class EngineAnswerError(KvtideError):
    """The engine answered, but not what was asked for."""

    def __init__(self, message: str, *, code: str = "engine") -> None:
        """``code`` is a short stable word."""
        super().__init__(message)
        self.code = code
