"""Errors of prefill workers.

PrefillError
└── LoadFellShort   a step can't use the prefix that was being loaded
"""
# ruff: noqa: N818  names say what happened

from kvtide.runtime import KvtideError


class PrefillError(KvtideError):
    """Base of all errors of prefill workers."""


class LoadFellShort(PrefillError):
    """A layer of a reused prefix did not come while a step waited for it."""

    def __init__(self, layer: int) -> None:
        super().__init__(f"layer {layer} of the reused prefix did not come")
        self.layer = layer
