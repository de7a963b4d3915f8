"""The rights that a request names, checked and counted as uses."""

from collections.abc import Sequence

from kvtide.transfer.errors import TransferError
from kvtide.transfer.handles import Access
from kvtide.transfer.regions import Grant, RegionTable
from kvtide.transfer.wire import Ask, FrameError


def claim_all(table: RegionTable, ask: Ask, access: Access) -> list[Grant]:
    """All rights of a request; to be given to ``release_all``.

    Raises:
        AccessDenied: one of them is none; its slice is an index of the request.
    """
    grants: list[Grant] = []
    try:
        for index, (region, capability) in enumerate(ask.grants):
            try:
                grants.append(table.claim(region, capability, access))
            except TransferError as error:
                error.slice_index = next(
                    (at for at, piece in enumerate(ask.pieces) if piece[0] == index),
                    None,
                )
                raise
    except TransferError:
        release_all(table, grants)
        raise
    return grants


def release_all(table: RegionTable, grants: Sequence[Grant]) -> None:
    """Count the uses out."""
    for grant in grants:
        table.release(grant)


def wanted_access(ask: Ask) -> Access:
    """Of a request for a whole region: the one piece's offset says it."""
    if len(ask.grants) != 1 or len(ask.pieces) != 1:
        raise FrameError("a malformed request")
    return Access.WRITE if ask.pieces[0][1] else Access.READ
