"""Which blocks a paged engine loads and saves, step by step. Pure.

The engine's cache has groups of layers; each group has a table of block ids for each
request. The engine hashes every ``hash_tokens`` tokens, chained, so the hash at a block's
end names the block with all before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

NULL_BLOCK = 0
"""The id of no block: out of a window, never read or written."""

Hits = Callable[[int, Sequence[bytes]], int]
"""(group, names) → how many of them, from the first on, are in the pool."""


@dataclass(frozen=True, slots=True)
class Group:
    """A cache group. ``window_tokens``: its layers attend to no more; None: to all."""

    block_tokens: int
    window_tokens: int | None = None

    def needed_from(self, tokens: int) -> int:
        """The first block that a request needs which goes on after ``tokens`` tokens."""
        if self.window_tokens is None:
            return 0
        return max(0, tokens - self.window_tokens + 1) // self.block_tokens


@dataclass(frozen=True, slots=True)
class Geometry:
    """``unit_tokens``: hits are multiples of it; of each group's block, too."""

    groups: tuple[Group, ...]
    hash_tokens: int
    unit_tokens: int

    @property
    def leader(self) -> int:
        """The group that is known outside by its blocks, for all of them.

        The first that attends to all: a prompt is there as far as its blocks are, and of
        the others no more is needed. Where all have windows, the first.
        """
        return next(
            (i for i, group in enumerate(self.groups) if group.window_tokens is None), 0
        )

    @property
    def attending_tokens(self) -> int | None:
        """Tokens in a block of the groups that attend to all; None: none, or they differ."""
        sizes = {
            group.block_tokens for group in self.groups if group.window_tokens is None
        }
        return sizes.pop() if len(sizes) == 1 else None

    def name(self, group: int, block: int, hashes: Sequence[bytes]) -> bytes | None:
        """The name of a group's block; None: it is not full yet."""
        end = (block + 1) * self.groups[group].block_tokens // self.hash_tokens
        return hashes[end - 1] if 0 < end <= len(hashes) else None

    def names(
        self, group: int, start: int, end: int, hashes: Sequence[bytes]
    ) -> list[bytes]:
        """The names of blocks ``start`` to ``end``, up to the first unnamed one."""
        found: list[bytes] = []
        for block in range(start, end):
            name = self.name(group, block, hashes)
            if name is None:
                break
            found.append(name)
        return found

    def hit_tokens(
        self, hashes: Sequence[bytes], computed: int, limit: int, hits: Hits
    ) -> int:
        """How many tokens after ``computed`` can be loaded, up to token ``limit``.

        Groups that attend to all bound it; then windows must be whole at its end. A
        shorter hit is tried where a window has a hole.
        """
        unit = self.unit_tokens
        end = limit // unit * unit
        start = computed // unit * unit
        for number, group in enumerate(self.groups):
            if group.window_tokens is None:
                first, size = start // group.block_tokens, group.block_tokens
                names = self.names(number, first, end // size, hashes)
                end = (first + hits(number, names)) * size // unit * unit
                if end <= start:
                    return 0
        while end > start and not self._windows_whole(hashes, start, end, hits):
            end -= unit
        return max(0, end - computed)

    def prompt_tokens(
        self, hashes: Sequence[bytes], prompt: "Prompt", computed: int, hits: Hits
    ) -> int:
        """How many tokens after ``computed`` can be loaded if all of a prompt is there.

        Its last page counts, though it is not full. 0: something is missing.
        """
        end = self.prompt_end(prompt)
        for number, group in enumerate(self.groups):
            first = max(computed // group.block_tokens, group.needed_from(end))
            names = self.prompt_names(number, first, hashes, prompt)
            if not names or hits(number, names) < len(names):
                return 0
        return max(0, end - computed)

    def prompt_end(self, prompt: "Prompt") -> int:
        """Where a load of all of a prompt ends: with its last token, or before it.

        An engine that has all tokens computes the last one again, but has given up
        already what is out of the window of the next one. Where that would take a block
        out of the last one's own window, the load leaves the last token out.
        """
        last = prompt.tokens - 1
        lost = any(
            group.needed_from(last) < group.needed_from(prompt.tokens)
            for group in self.groups
        )
        return last if lost else prompt.tokens

    def prompt_names(
        self, group: int, first: int, hashes: Sequence[bytes], prompt: "Prompt"
    ) -> list[bytes]:
        """The names of a prompt's pages from ``first`` on; none: one has no name."""
        full, rest = divmod(prompt.tokens, self.groups[group].block_tokens)
        names = self.names(group, first, full, hashes)
        if len(names) < full - first:
            return []
        return [*names, prompt.tail] if rest and first <= full else names

    def _windows_whole(
        self, hashes: Sequence[bytes], start: int, end: int, hits: Hits
    ) -> bool:
        for number, group in enumerate(self.groups):
            if group.window_tokens is None:
                continue
            last = end // group.block_tokens
            first = max(group.needed_from(end), start // group.block_tokens)
            names = self.names(number, first, last, hashes)
            if len(names) < last - first or hits(number, names) < len(names):
                return False
        return True


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks of one group that move between the engine and the pool."""

    group: int
    blocks: tuple[int, ...]
    names: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """Whose blocks a request's are: a tenant ("" the settings' own) and an adapter.

    ``salt`` narrows what the tenant shares.
    """

    tenant: str = ""
    adapter: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as a whole, and the name of its last page, which is not full."""

    tokens: int
    tail: bytes


@dataclass(frozen=True, slots=True)
class Task:
    """What one request moves in one step. ``kept``: the stores are to keep it a while."""

    request: str
    claim: Claim
    moves: tuple[Move, ...]
    kept: bool = False


@dataclass(slots=True)
class _Known:
    claim: Claim
    hashes: Sequence[bytes]
    handover: Prompt | None = None
    handed: bool = False
    tables: list[list[int]] = field(default_factory=list[list[int]])
    saved: list[int] = field(default_factory=list[int])


class PrefixPlan:
    """The scheduler's side: follows each request's tables and says what moves.

    ``hashes`` of a request is the engine's own growing list. A request that is unknown,
    or that nothing may be pooled of, is left alone.
    """

    def __init__(self, geometry: Geometry, *, saves: bool = True) -> None:
        """``saves`` false: only loads."""
        self.geometry = geometry
        self._saves = saves
        self._requests: dict[str, _Known] = {}
        self._loads: list[Task] = []

    def __len__(self) -> int:
        """Requests that are followed."""
        return len(self._requests)

    def allocated(
        self,
        request: str,
        claim: Claim,
        hashes: Sequence[bytes],
        tables: Sequence[Sequence[int]],
        span: tuple[int, int],
        loaded: Prompt | None = None,
        handover: Prompt | None = None,
    ) -> None:
        """The engine gave blocks to a request; tokens ``span`` of it are to be loaded.

        ``loaded`` is the prompt if ``span`` ends with all of it; ``handover`` if all of
        it is to be saved once it is computed, for another instance.
        """
        self._requests[request] = _Known(claim, hashes, handover)
        start, end = span
        if end <= start:
            return
        moves: list[Move] = []
        for number, group in enumerate(self.geometry.groups):
            first = max(start // group.block_tokens, group.needed_from(end))
            if loaded is not None:
                names = self.geometry.prompt_names(number, first, hashes, loaded)
            else:
                last = end // group.block_tokens
                names = self.geometry.names(number, first, last, hashes)
            pairs = [
                (block, name)
                for block, name in zip(tables[number][first:], names, strict=False)
                if block != NULL_BLOCK
            ]
            moves += _move(number, pairs)
        if moves:
            self._loads.append(Task(request, claim, tuple(moves)))

    def take_loads(self) -> tuple[Task, ...]:
        """What is to be loaded, once."""
        loads, self._loads = self._loads, []
        return tuple(loads)

    def begins(
        self, request: str, tables: Sequence[Sequence[int]], computed: int
    ) -> None:
        """A request begins to be computed, or again: ``tables`` are all its blocks."""
        known = self._requests.get(request)
        if known is None:
            return
        known.tables = [list(table) for table in tables]
        known.saved = [computed // group.block_tokens for group in self.geometry.groups]

    def grows(self, request: str, tables: Sequence[Sequence[int]]) -> None:
        """A running request got more blocks."""
        known = self._requests.get(request)
        if known is not None and known.tables:
            for table, more in zip(known.tables, tables, strict=True):
                table.extend(more)

    def computes(self, request: str, computed: int, end: int) -> Task | None:
        """This step computes tokens ``computed`` to ``end``: which blocks it saves.

        The bytes of those are final at the step's end. Each block is named once, unless
        the request was set back before it.
        """
        known = self._requests.get(request)
        if not self._saves or known is None or not known.tables:
            return None
        handover = known.handover
        if handover is not None and not known.handed and end >= handover.tokens:
            known.handed = True
            return self._hand_over(request, known, handover)
        moves: list[Move] = []
        for number, group in enumerate(self.geometry.groups):
            size = group.block_tokens
            first = min(known.saved[number], computed // size)
            names = self.geometry.names(number, first, end // size, known.hashes)
            table = known.tables[number][first : first + len(names)]
            known.saved[number] = first + len(table)
            pairs = [
                (block, name)
                for block, name in zip(table, names, strict=False)
                if block != NULL_BLOCK
            ]
            moves += _move(number, pairs)
        return Task(request, known.claim, tuple(moves)) if moves else None

    def handed_over(self, request: str) -> Prompt | None:
        """The prompt that was given out to be saved as a whole; None: it was not."""
        known = self._requests.get(request)
        return None if known is None or not known.handed else known.handover

    def certain(self, request: str, end: int) -> int:
        """How much of what is computed up to ``end`` is prompt, which no draft is."""
        known = self._requests.get(request)
        prompt = None if known is None else known.handover
        return 0 if prompt is None else min(end, prompt.tokens)

    def _hand_over(self, request: str, known: _Known, prompt: Prompt) -> Task | None:
        """All of a prompt: what of it is in the pool already is only to be kept."""
        moves: list[Move] = []
        end = self.geometry.prompt_end(prompt)
        for number, group in enumerate(self.geometry.groups):
            first = group.needed_from(end)
            names = self.geometry.prompt_names(number, first, known.hashes, prompt)
            known.saved[number] = prompt.tokens // group.block_tokens
            pairs = [
                (block, name)
                for block, name in zip(
                    known.tables[number][first:], names, strict=False
                )
                if block != NULL_BLOCK
            ]
            moves += _move(number, pairs)
        return Task(request, known.claim, tuple(moves), kept=True) if moves else None

    def disown(self) -> None:
        """Save nothing more of the requests that are followed now.

        Loads that are to be given out still are: the engine waits for them.
        """
        self._requests.clear()

    def finished(self, request: str) -> None:
        """The request is over, or its blocks are taken from it."""
        self._requests.pop(request, None)
        self._loads = [task for task in self._loads if task.request != request]


def _move(group: int, pairs: Sequence[tuple[int, bytes]]) -> list[Move]:
    if not pairs:
        return []
    blocks, names = zip(*pairs, strict=True)
    return [Move(group, blocks, names)]
