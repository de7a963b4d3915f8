"""The spaces that an engine's requests use, made when first needed."""

from collections import OrderedDict
from collections.abc import Sequence

from kvtide.connect.client import EngineClient
from kvtide.connect.prefix_plan import Claim
from kvtide.connect.shape import BlockShape
from kvtide.connect.space import EngineSpace, ForeignSpace

MAX_SPACES = 4096


class SpaceBook:
    """(cache group, claim) → its space. For one thread at a time, or under a lock."""

    def __init__(
        self,
        client: EngineClient,
        engines: Sequence[EngineSpace],
        shapes: Sequence[BlockShape],
    ) -> None:
        """One engine space and one shape for each group."""
        self._client = client
        self._engines = engines
        self._shapes = shapes
        self._spaces: OrderedDict[tuple[int, Claim], ForeignSpace] = OrderedDict()

    def space(self, group: int, claim: Claim) -> ForeignSpace:
        """The space of a request's blocks in a group."""
        found = self._spaces.pop((group, claim), None)
        if found is None:
            found = self._client.space(
                self._engines[group],
                self._shapes[group],
                tenant=claim.tenant,
                salt=claim.salt,
                adapter=claim.adapter,
            )
        self._spaces[group, claim] = found
        if len(self._spaces) > MAX_SPACES:
            self._spaces.popitem(last=False)
        return found
