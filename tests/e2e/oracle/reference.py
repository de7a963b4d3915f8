"""The oracle: what transformers itself generates from the same float32 weights.

`Oracle.check` judges served greedy tokens by teacher forcing: one forward pass of
transformers over prompt and served tokens gives the logits that a token-by-token
generation would have seen, as long as it goes on from the served tokens. Each served
token must then be the largest logit. Where the two largest logits are closer than
`TIE_GAP`, rounding decides which is larger; there any token that close to the top is
right, and the place is counted as a tie.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

TIE_GAP: Final = 3e-4
TIE_SHARE_LIMIT: Final = 1e-3


_Question = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first served token that the reference would not have chosen.

    `behind` is how far its logit lies below the largest.
    """

    index: int
    served: int
    expected: int
    behind: float


@dataclass(frozen=True, slots=True)
class OracleVerdict:
    """How `tokens` served tokens compare with the reference."""

    tokens: int
    ties: int
    smallest_gap: float
    mismatch: Mismatch | None

    @property
    def right(self) -> bool:
        """Whether every served token is one that the reference allows."""
        return self.mismatch is None

    @property
    def tie_share(self) -> float:
        """Ties among the served tokens, 0 to 1."""
        return self.ties / self.tokens if self.tokens else 0.0


def tie_share(verdicts: Iterable[OracleVerdict]) -> float:
    """Ties among all tokens of all verdicts; compare with `TIE_SHARE_LIMIT`."""
    every = list(verdicts)
    tokens = sum(verdict.tokens for verdict in every)
    return sum(verdict.ties for verdict in every) / tokens if tokens else 0.0


class Oracle:
    """Transformers' model of a folder, float32, SDPA, in this process."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._eos = _eos_ids(self._model.generation_config)
        self._verdicts: dict[_Question, OracleVerdict] = {}
        self._generated: dict[tuple[tuple[int, ...], int, bool], list[int]] = {}

    def generate(
        self, prompt_ids: Sequence[int], max_tokens: int, *, ignore_eos: bool = False
    ) -> list[int]:
        """Greedy tokens from transformers' own `generate`, the final eos included.

        Equal questions are computed once.
        """
        question = (tuple(prompt_ids), max_tokens, ignore_eos)
        if question not in self._generated:
            self._generated[question] = self._generate(*question)
        return [*self._generated[question]]

    def logits(self, token_ids: Sequence[int], last: int) -> Tensor:
        """Logits float32 [last, vocab] of the last tokens of a sequence."""
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor([list(token_ids)]),
                logits_to_keep=last,
                use_cache=False,
            )
        return output.logits[0]

    def check(
        self, prompt_ids: Sequence[int], served_ids: Sequence[int]
    ) -> OracleVerdict:
        """Judge served greedy tokens; equal questions are computed once."""
        if not prompt_ids or not served_ids:
            message = "the oracle needs a prompt and at least one served token"
            raise ValueError(message)
        question = (tuple(prompt_ids), tuple(served_ids))
        if question not in self._verdicts:
            logits = self.logits([*prompt_ids, *served_ids[:-1]], len(served_ids))
            self._verdicts[question] = judge(logits, served_ids)
        return self._verdicts[question]

    def ended_rightly(self, served_ids: Sequence[int], max_tokens: int) -> bool:
        """Whether it ends at the first eos, or else at `max_tokens`."""
        if any(token in self._eos for token in served_ids[:-1]):
            return False
        return served_ids[-1] in self._eos or len(served_ids) == max_tokens

    def _generate(
        self, prompt_ids: tuple[int, ...], max_tokens: int, ignore_eos: bool
    ) -> list[int]:
        prompt = torch.tensor([list(prompt_ids)])
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=None if ignore_eos else self._eos,
            pad_token_id=0,
        )
        with torch.inference_mode():
            output = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
            )
        ids: list[int] = output[0, len(prompt_ids) :].tolist()
        return ids


def judge(logits: Tensor, served_ids: Sequence[int]) -> OracleVerdict:
    """Apply the tie rule: `logits[i]` [vocab] are those that chose `served_ids[i]`."""
    served = torch.tensor(list(served_ids))
    top, top_ids = logits.topk(2, -1)
    gaps = top[:, 0] - top[:, 1]
    behind = top[:, 0] - logits.gather(-1, served[:, None])[:, 0]
    wrong = torch.where(served != top_ids[:, 0], behind >= TIE_GAP, False).nonzero()
    mismatch = None
    if len(wrong):
        i = int(wrong[0, 0])
        mismatch = Mismatch(i, served_ids[i], int(top_ids[i, 0]), float(behind[i]))
    return OracleVerdict(
        tokens=len(served_ids),
        ties=int((gaps < TIE_GAP).sum()),
        smallest_gap=float(gaps.min()),
        mismatch=mismatch,
    )


def _eos_ids(config: GenerationConfig | None) -> list[int]:
    ids: int | list[int] | None = config.eos_token_id if config else None
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)
