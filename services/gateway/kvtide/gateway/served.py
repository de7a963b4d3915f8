"""The model that this gateway serves: its text, its facts, and whether it can answer."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from kvtide.bus import Member, Node
from kvtide.gateway.errors import PromptError, UnavailableError
from kvtide.gateway.text import ModelText
from kvtide.gateway.text.chat import Chat
from kvtide.kv import BlockKey, KeySpace, ModelFacts, Role, SpaceId, TenantId
from kvtide.kv.model import most_said

INLINE_CHARS = 4096
"""Shorter texts are tokenised at once; longer ones would hold up other streams."""

NOT_READY_RETRY_MS = 1000.0
_SPACES = 256
"""Key spaces that are kept: deriving one costs as much as all keys of a short prompt."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as workers take it. ``keys`` are those of its full blocks."""

    ids: tuple[int, ...]
    keys: tuple[BlockKey, ...]


class ServedModel:
    """One model, by the name that clients use, and what adapters there are for it.

    Facts come from the workers' beats; until a conductor, a prefill and a decode worker of
    the model are ready, requests are refused. Whether a worker needs a store it says
    itself, by being ready or not.
    """

    def __init__(
        self, name: str, text: ModelText, node: Node, executor: ThreadPoolExecutor
    ) -> None:
        """``executor`` runs long tokenisations; its owner ends it."""
        self.name = name
        self.text = text
        self.created_s = int(node.clock.wall())
        self._node = node
        self._executor = executor

        @lru_cache(_SPACES)
        def space(named: SpaceId) -> KeySpace:
            return KeySpace(node.secret, named)

        self._space = space

    @classmethod
    async def open(
        cls, name: str, folder: Path, node: Node, executor: ThreadPoolExecutor
    ) -> "ServedModel":
        """Read the model's folder, off the loop.

        Raises:
            ModelTextError: the folder has no usable tokenizer.
        """
        loop = asyncio.get_running_loop()
        wall_s = node.clock.wall
        text = await loop.run_in_executor(executor, ModelText.read, folder, wall_s)
        return cls(name, text, node, executor)

    # ---- who is there

    def missing(self) -> list[str]:
        """What the cluster still lacks to answer; empty when ready."""
        asked = (Role.CONDUCTOR, Role.STORE, Role.PREFILL, Role.DECODE)
        lacking = [role for role in asked if not self._ready(role)]
        # a store alone is not missed: workers that need one would not be ready
        return [role.value for role in lacking] if lacking != [Role.STORE] else []

    def _ready(self, role: Role) -> list[Member]:
        members = [m for m in self._node.roster.live(role) if m.ready]
        if role in (Role.PREFILL, Role.DECODE):
            return [m for m in members if self._facts_of(m) is not None]
        return members

    def _facts_of(self, member: Member) -> ModelFacts | None:
        """What it says of the model; an adapter of another one may have its name."""
        named = (f for f in member.beat.models if f.name == self.name and not f.parent)
        return next(named, None)

    def adapters(self) -> dict[str, ModelFacts]:
        """The model with each adapter that some worker has, by name."""
        said: dict[str, list[ModelFacts]] = {}
        for member in self._ready(Role.DECODE):
            for facts in member.beat.models:
                if facts.parent == self.name != facts.name:
                    said.setdefault(facts.name, []).append(facts)
        return {
            name: facts
            for name, each in said.items()
            if (facts := most_said(each)) is not None
        }

    def find_facts(self, name: str = "") -> ModelFacts | None:
        """What decode workers say of the model, or of it with an adapter.

        None while there is none.
        """
        if name not in ("", self.name):
            return self.adapters().get(name)
        return most_said(self._all_facts())

    def is_blind(self) -> bool:
        """Whether some decode worker of the model sees no pictures.

        Without any worker requests are refused for that.
        """
        return not all(facts.pictures for facts in self._all_facts())

    def _all_facts(self) -> list[ModelFacts]:
        found = [self._facts_of(member) for member in self._ready(Role.DECODE)]
        return [facts for facts in found if facts is not None]

    def facts(self, name: str = "") -> ModelFacts:
        """The model's facts, when everything that a request needs is there.

        Raises:
            UnavailableError: something is missing; the message names it.
        """
        missing = self.missing()
        facts = self.find_facts(name)
        if missing or facts is None:
            lacking = missing or [f"worker with {name}"]
            raise UnavailableError(
                f"the model is not ready: no live {', '.join(lacking)}",
                retry_after_ms=NOT_READY_RETRY_MS,
            )
        return facts

    def space(self, tenant: TenantId, facts: ModelFacts, salt: str) -> KeySpace:
        """The key space of a tenant's blocks, or the part of it that a salt names."""
        return self._space(SpaceId(tenant, facts, salt))

    # ---- text

    async def encode_prompt(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """See ``ModelText.encode_prompt``; a hopeless length is refused before."""
        self._check_chars(len(text), "prompt")

        def encode() -> list[int]:
            return self.text.encode_prompt(text, add_special_tokens=add_special_tokens)

        return await self._run(len(text), encode)

    async def encode_chat(self, chat: Chat) -> list[int]:
        """See ``ModelText.encode_chat``; a hopeless length is refused before."""

        def encode() -> list[int]:
            return self.text.encode_chat(
                chat.messages,
                tools=chat.tools,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final=chat.continue_final,
                variables=chat.variables,
            )

        size = sum(len(str(message.get("content"))) for message in chat.messages)
        self._check_chars(size, chat.param)
        shown = size + sum(len(str(tool)) for tool in chat.tools)
        return await self._run(shown, encode)

    async def decode(self, ids: Sequence[int]) -> str:
        """See ``ModelText.decode``."""
        return await self._run(len(ids), lambda: self.text.decode(ids))

    def _check_chars(self, chars: int, param: str) -> None:
        facts = self.find_facts()
        if facts is None:
            return
        limit = facts.max_tokens * self.text.longest_token_chars
        if chars > limit:
            raise PromptError(
                f"this model's context is {facts.max_tokens} tokens, which {chars} "
                "characters are more than in any case",
                param=param,
                code="context_length_exceeded",
            )

    async def prompt(self, ids: Sequence[int], space: KeySpace) -> Prompt:
        """The prompt with its keys."""

        def chain() -> Prompt:
            return Prompt(tuple(ids), space.chain(ids))

        return await self._run(len(ids), chain)

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
