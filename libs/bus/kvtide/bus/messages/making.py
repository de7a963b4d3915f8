"""Prefill workers to one another: what each is computing, so that none does it again.

Lost ones cost a computation, nothing else: nobody waits longer for another's block than
computing it would take.
"""

from typing import Final

from kvtide.bus.messages.base import Message
from kvtide.kv import BlockKey, Located, NodeRef, RequestId

MOST_MAKING: Final = 1024


class BlocksMaking(Message, frozen=True, tag="blocks_making"):
    """These blocks will be in the pool in about ``left_ms``, the first ``MOST_MAKING``.

    ``waits``: the worker waits for another that makes them, and does so itself if that
    is given up. Of several that wait, the first by (worker, request, attempt) does.
    """

    prefill: NodeRef
    request: RequestId
    attempt: int
    keys: tuple[BlockKey, ...]
    left_ms: float
    waits: bool = False


class BlocksMade(Message, frozen=True, tag="blocks_made"):
    """These are in the pool now; once ``ended``, nothing more comes of the request."""

    prefill: NodeRef
    request: RequestId
    attempt: int
    located: tuple[Located, ...]
    ended: bool
