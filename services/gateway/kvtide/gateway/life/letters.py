"""The messages that a request's attempts send, made from what was asked for."""

from collections.abc import Sequence

import msgspec

from kvtide.bus.messages import Admit, DecodeWork, PictureWork, Placed, PrefillWork
from kvtide.gateway.life.spec import RequestSpec
from kvtide.kv import BlockKey, KeySpace, NodeId


class Letters:
    """Writes for one request. Keys of blocks that received tokens fill are added."""

    def __init__(self, spec: RequestSpec, space: KeySpace) -> None:
        """``space`` is the key space that ``spec.keys`` were made in."""
        self._spec = spec
        self._space = space

    def keys(self, received: Sequence[int]) -> tuple[BlockKey, ...]:
        """The keys of the full blocks of the prompt and what was received."""
        spec = self._spec
        if not received or spec.pictures:
            return spec.keys
        start = len(spec.keys) * self._space.layout.block_tokens
        parent = spec.keys[-1] if spec.keys else None
        rest = (*spec.prompt[start:], *received)
        return spec.keys + self._space.chain(rest, parent=parent)

    def admit(
        self, attempt: int, received: Sequence[int], excluded: Sequence[NodeId]
    ) -> Admit:
        """Ask for a placement of the prompt and what was received."""
        spec = self._spec
        return Admit(
            request=spec.request,
            attempt=attempt,
            gateway=spec.gateway,
            tenant=spec.tenant,
            model=spec.model,
            keys=self.keys(received),
            prompt_tokens=len(spec.prompt) + len(received),
            max_new_tokens=spec.max_new_tokens - len(received),
            excluded=tuple(excluded),
            ttft_ms=spec.ttft_ms,
            tbt_ms=spec.tbt_ms,
            priority=spec.priority,
            digest=spec.digest,
        )

    def checked(self, placed: Placed, received: Sequence[int]) -> Placed:
        """The placement without copies that are not of this request's blocks.

        The first copy under another key than its block's ends what is reused: KV of
        other tokens must never be taken for this prompt's, whatever a conductor says.
        Pictures go to decode alone, which computes the prompt: prefill is left out.
        """
        if self._spec.pictures:
            return msgspec.structs.replace(placed, reuse=(), prefill=None)
        good = 0
        for key, copy in zip(self.keys(received), placed.reuse, strict=False):
            if copy.key != key:
                break
            good += 1
        if good == len(placed.reuse):
            return placed
        return msgspec.structs.replace(placed, reuse=placed.reuse[:good])

    def prefill(
        self, placed: Placed, received: Sequence[int], left_ms: float
    ) -> PrefillWork:
        """The prefill worker's share."""
        spec = self._spec
        return PrefillWork(
            request=spec.request,
            attempt=placed.attempt,
            gateway=spec.gateway,
            tenant=spec.cache_owner or spec.tenant,
            salt=spec.salt,
            model=spec.model,
            tokens=(*spec.prompt, *received),
            keys=self.keys(received),
            reuse=placed.reuse,
            decode=placed.decode,
            deadline_ms=left_ms,
            worker=placed.prefill,
            ttft_ms=spec.ttft_ms,
        )

    def decode(
        self, placed: Placed, received: Sequence[int], left_ms: float
    ) -> DecodeWork:
        """The decode worker's share."""
        spec = self._spec
        work = DecodeWork(
            request=spec.request,
            attempt=placed.attempt,
            gateway=spec.gateway,
            tenant=spec.cache_owner or spec.tenant,
            salt=spec.salt,
            model=spec.model,
            tokens=(*spec.prompt, *received),
            prompt_tokens=len(spec.prompt),
            keys=self.keys(received),
            reuse=placed.reuse,
            prefill=placed.prefill,
            sampling=spec.sampling,
            max_new_tokens=spec.max_new_tokens,
            min_new_tokens=spec.min_new_tokens,
            stop_token_ids=spec.stop_token_ids,
            ignore_eos=spec.ignore_eos,
            deadline_ms=left_ms,
            worker=placed.decode,
            tbt_ms=spec.tbt_ms,
        )
        if not spec.pictures:
            return work
        return PictureWork.of(work, spec.pictures)
