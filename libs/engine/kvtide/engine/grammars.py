"""Grammars at work: masks of allowed tokens, made while the engine computes.

Imports no torch. All work on grammars is done in threads of its own; llguidance lets go
of the interpreter's lock meanwhile.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from kvtide.engine.errors import GrammarFailed, UnsupportedModel
from kvtide.engine.grammar import Grammar, compiled, parser_limits

Mask = NDArray[np.int32]
"""One bit for each token id, lowest bit first: whether it is allowed."""

MASK_LIMIT_S: Final = 10.0
_THREADS = 2


class GrammarVocabulary:
    """The model's tokens as grammars see them, made when it is first asked for."""

    def __init__(
        self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """``tokenizer`` is a ``tokenizer.json``; ``vocab_size`` that of the logits."""
        self._path = tokenizer
        self.vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._made: LLTokenizer | None = None

    def tokens(self) -> LLTokenizer:
        """The vocabulary; about half a second the first time.

        Raises:
            UnsupportedModel: there is no tokenizer, or not one that can be used.
        """
        if self._made is None:
            try:
                text = self._path.read_text()
                eos = self._eos or None
                self._made = LLTokenizer(text, n_vocab=self.vocab_size, eos_token=eos)
            except (OSError, ValueError) as error:
                reason = f"its tokenizer can't hold an answer to a grammar ({error})"
                raise UnsupportedModel(str(self._path.parent), reason) from error
        return self._made


class GrammarState:
    """Where an answer stands in its grammar.

    Follows from the answer's tokens alone, wherever they were generated. ``prepare``
    begins to make the next mask, ``mask`` waits for it. For one caller at a time.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        grammar: Grammar,
        threads: ThreadPoolExecutor,
    ) -> None:
        """Begin to build the grammar."""
        self._vocabulary = vocabulary
        self._threads = threads
        self._matcher: Future[LLMatcher] = threads.submit(self._build, grammar)
        self._answer: list[int] = []
        self._next: Future[Mask] | None = None

    def prepare(self, answer: Sequence[int]) -> None:
        """Begin to make the mask of what may follow these tokens."""
        tokens = list(answer)
        # runs after the build: both wait in one queue, and the build was there first
        self._next = self._threads.submit(self._mask_after, tokens)

    def mask(self) -> Mask:
        """The mask that was last prepared.

        Raises:
            GrammarFailed: the tokens don't match, or a limit was reached.
        """
        assert self._next is not None  # noqa: S101 - the caller has prepared it
        try:
            return self._next.result(MASK_LIMIT_S)
        except TimeoutError as error:
            raise GrammarFailed(f"no mask within {MASK_LIMIT_S:g} s") from error

    def _build(self, grammar: Grammar) -> LLMatcher:
        matcher = LLMatcher(
            self._vocabulary.tokens(),
            compiled(grammar),
            log_level=0,
            limits=parser_limits(),
        )
        _check(matcher)
        return matcher

    def _mask_after(self, answer: list[int]) -> Mask:
        matcher = self._matcher.result(MASK_LIMIT_S)
        known = len(self._answer)
        if answer[:known] != self._answer:  # it went back: a row is computed again
            matcher.reset()
            known = 0
            self._answer = []
        # an end token that least lengths let through is text behind the grammar's end
        for token in answer[known:]:
            if not matcher.is_stopped():
                matcher.consume_token(token)
                _check(matcher)
            self._answer.append(token)
        mask = np.zeros((1, -(-self._vocabulary.vocab_size // 32)), np.int32)
        if matcher.is_stopped():
            for token in self._vocabulary.tokens().eos_tokens:
                mask[0, token // 32] |= np.uint32(1 << token % 32).astype(np.int32)
        else:
            fill_next_token_bitmask(matcher, mask)
            _check(matcher)
        if not mask.any():
            raise GrammarFailed("no token of the model's vocabulary can follow")
        return mask[0]


class Grammars:
    """Makes the states of answers; owns the threads that they work in."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        """No thread starts before it is needed."""
        self._vocabulary = vocabulary
        self._threads = ThreadPoolExecutor(_THREADS, "grammar")

    def state(self, grammar: Grammar) -> GrammarState:
        """The start of an answer; the grammar is being built."""
        return GrammarState(self._vocabulary, grammar, self._threads)

    def close(self) -> None:
        """Begin no more work; what runs ends by its limits."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarFailed(matcher.get_error().strip().split("\n")[0])
