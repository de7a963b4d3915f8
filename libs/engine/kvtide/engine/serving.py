"""The seam to an engine that runs whole requests by itself; imports no torch.

An engine of ours runs steps that a worker's machine decides. Others batch, page and
preempt as they like; a worker gives them requests and takes tokens.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from kvtide.bus.messages import SamplingSpec, TokenLogprobs
from kvtide.kv import ModelFacts, RequestRef, TenantId


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to such an engine.

    ``tokens`` are the prompt and, after it, the ``answered`` tokens of earlier attempts.
    ``stop_ids`` end the answer, and can't be drawn before ``min_tokens`` more tokens.
    ``tenant`` and ``salt`` say whose KV may be reused. ``handed``: another worker has put the
    KV of all of ``tokens`` into the pool. ``model`` is one of those that the engine serves.
    ``pictures`` are files, one for each token of the prompt that stands for one.
    """

    ref: RequestRef
    tokens: tuple[int, ...]
    answered: int
    tenant: TenantId
    salt: str
    sampling: SamplingSpec
    max_tokens: int
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    handed: bool = False
    model: str = ""
    pictures: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens of an answer, a stop id included.

    ``logprobs`` are as many as ``ids``, or none; ``cached_tokens`` of the prompt were not
    computed. ``prompt_tokens``: so long was the prompt, if pictures made it longer than
    what was asked. ``ended``: nothing more comes.
    """

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    ended: bool = False
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine serves: its model, and the tokens that its KV memory holds.

    ``adapted`` are that model with each of its adapters.
    """

    facts: ModelFacts
    kv_tokens: int
    adapted: tuple[ModelFacts, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """What may be asked for."""
        return frozenset(facts.name for facts in (self.facts, *self.adapted))


class RequestEngine(Protocol):
    """An engine that runs whole requests. For one loop."""

    def start(self) -> None:
        """Begin to load; returns at once."""
        ...

    async def served(self) -> Served:
        """Wait until it serves.

        Raises:
            EngineError: it can't.
        """
        ...

    async def failed_or(self, stop: asyncio.Event) -> None:
        """Wait until ``stop`` is set.

        Raises:
            EngineError: it can't serve, or it has ended by itself.
        """
        ...

    def check(self, ask: Ask) -> None:
        """Refuse what it can't do exactly as asked.

        Raises:
            UnsupportedOption: it names the option.
        """
        ...

    def answer(self, ask: Ask) -> AsyncGenerator[Piece]:
        """The answer as it comes. Closing it early ends the request in the engine.

        Raises:
            EngineError: it ends without its answer.
        """
        ...

    async def prepare(self, ask: Ask) -> int:
        """Compute all of ``tokens`` and put their KV into the pool.

        How many of them were not computed. When cancelled, so is the work.

        Raises:
            EngineError: it could not.
        """
        ...

    async def close(self) -> None:
        """End it, in bounded time. Idempotent."""
        ...
