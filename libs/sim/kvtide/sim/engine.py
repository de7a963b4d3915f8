"""A model without weights: KV and tokens are hashes of everything before them.

The KV bytes of a position are a hash of the KV before it and the token there, and the
next token is a hash of all KV bytes. So a single wrong, missing or foreign byte anywhere
changes every token that follows, and a checker that compares tokens sees it.
"""

from collections.abc import Sequence

from xxhash import xxh3_64_digest, xxh3_64_intdigest

from kvtide.bus.messages import SamplingSpec
from kvtide.kv import Layout, ModelFacts

FACTS = ModelFacts(
    name="sim",
    digest="sim",
    layers=2,
    kv_heads=1,
    head_dim=2,
    kv_dtype="float32",
    vocab_size=1000,
    max_tokens=512,
    eos_token_ids=(0,),
    numerics="hash",
    block_tokens=16,
)
LAYOUT = Layout.of(FACTS)
_SIZE = LAYOUT.token_bytes


class SimRun:
    """The KV of one sequence, part by part."""

    def __init__(self, capacity_tokens: int) -> None:
        """All zero."""
        self.closed = False
        self._parts = [bytearray(capacity_tokens * _SIZE) for _ in range(LAYOUT.parts)]

    def part(self, number: int, start: int, end: int) -> memoryview:
        """The bytes of tokens ``start`` … ``end`` - 1 in part ``number``."""
        return memoryview(self._parts[number])[start * _SIZE : end * _SIZE]

    def close(self) -> None:
        """Give the memory back.

        Raises:
            RuntimeError: it was given back before.
        """
        if self.closed:
            message = "a run was freed twice"
            raise RuntimeError(message)
        self.closed = True

    def compute(self, tokens: Sequence[int], start: int) -> None:
        """Make the KV of ``tokens`` at positions ``start``, …, from what is before.

        Raises:
            RuntimeError: the run was given back.
        """
        if self.closed:
            message = "a run was used after it was freed"
            raise RuntimeError(message)
        first = self._parts[0]
        for position, token in enumerate(tokens, start):
            at = position * _SIZE
            before = bytes(first[at - _SIZE : at]) if position else b"the beginning"
            seed = before + token.to_bytes(4, "little")
            for number, part in enumerate(self._parts):
                part[at : at + _SIZE] = xxh3_64_digest(seed, number)

    def draw(self, tokens: int, sampling: SamplingSpec, banned: tuple[int, ...]) -> int:
        """The token after the first ``tokens``, which ``banned`` are not."""
        whole = b"".join(bytes(part[: tokens * _SIZE]) for part in self._parts)
        token = xxh3_64_intdigest(whole, sampling.seed & (2**64 - 1))
        token %= FACTS.vocab_size
        while token in banned:
            token = (token + 1) % FACTS.vocab_size
        return token


def undisturbed(
    prompt: Sequence[int], sampling: SamplingSpec, max_new_tokens: int
) -> tuple[int, ...]:
    """The answer of one run that nothing disturbs; ends before an end token."""
    run = SimRun(len(prompt) + max_new_tokens)
    run.compute(prompt, 0)
    answer: list[int] = []
    while len(answer) < max_new_tokens:
        length = len(prompt) + len(answer)
        token = run.draw(length, sampling, ())
        if token in FACTS.eos_token_ids:
            break
        answer.append(token)
        run.compute([token], length)
    return tuple(answer)
