"""Errors of the store.

KvtideError
└── StoreError
    └── SlotStateError   a slot was asked to do what its state does not allow (a bug)
"""

from kvtide.runtime import KvtideError


class StoreError(KvtideError):
    """The store can't do this."""


class SlotStateError(StoreError):
    """A slot was asked to do what its state does not allow: a bug, not an input.

    ``slot`` is the slot's number.
    """

    def __init__(self, message: str, *, slot: int) -> None:
        """Keep the slot beside the message."""
        super().__init__(f"slot {slot}: {message}")
        self.slot = slot
