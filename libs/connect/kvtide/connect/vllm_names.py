# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""What a vLLM's blocks are called in the pool; imports neither vLLM nor torch."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from kvtide.connect.gateway_keys import GatewayNames
from kvtide.connect.prefix_plan import Claim, Geometry
from kvtide.kv import KeySpace, ModelFacts

MAX_SPACES = 4096

SpaceOf = Callable[[ModelFacts, Claim], KeySpace]
"""The keys that gateways derive for the requests of a claim."""


class RequestNames:
    """The names of each request's full blocks, for one thread.

    They are vLLM's own hashes; with ``facts``, those that carry gateways' keys, but for
    requests whose KV depends on more than tokens, adapter, tenant and salt.
    """

    def __init__(
        self, geometry: Geometry, facts: ModelFacts | None, space_of: SpaceOf
    ) -> None:
        """``facts`` are what the worker announces: blocks as large as the leader's."""
        sizes = [group.block_tokens for group in geometry.groups]
        fits = (
            facts is not None
            and bool(sizes)
            and sizes[geometry.leader] == facts.block_tokens
            and facts.block_tokens % geometry.hash_tokens == 0
        )
        self._facts = facts if fits else None
        self._hash_tokens = geometry.hash_tokens
        self._space_of = space_of
        self._spaces: OrderedDict[Claim, KeySpace] = OrderedDict()
        self._requests: dict[str, GatewayNames] = {}

    def __len__(self) -> int:
        """Requests whose names are kept."""
        return len(self._requests)

    def of(self, request: Any, claim: Claim) -> Sequence[bytes]:
        """A request's names; they grow with it until it is forgotten."""
        more = (
            request.mm_features or getattr(request, "prompt_embeds", None) is not None
        )
        if self._facts is None or more:
            return request.block_hashes
        found = self._requests.get(request.request_id)
        if found is None:
            space = self._space(self._facts, claim)
            found = GatewayNames(
                space, request.all_token_ids, request.block_hashes, self._hash_tokens
            )
            self._requests[request.request_id] = found
        return found

    def forget(self, request: str) -> None:
        """It is over, or its blocks are taken from it."""
        self._requests.pop(request, None)

    def clear(self) -> None:
        """Names of all requests are made anew."""
        self._requests.clear()

    def _space(self, facts: ModelFacts, claim: Claim) -> KeySpace:
        if claim.adapter:
            facts = facts.adapted("", claim.adapter)
        found = self._spaces.pop(claim, None) or self._space_of(facts, claim)
        self._spaces[claim] = found
        if len(self._spaces) > MAX_SPACES:
            self._spaces.popitem(last=False)
        return found
