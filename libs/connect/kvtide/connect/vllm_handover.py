"""Prefill on one vLLM, decode on another: what their ``kv_transfer_params`` say. Pure.

The contract is vLLM's own: a request with ``do_remote_decode`` and ``max_tokens`` 1 goes
to the prefill instance; the params in its answer, which say ``do_remote_prefill``, go
with the same prompt to the decode instance, as they are. Between the two lies the pool:
the params only say which prompt is there. Blocks are named by their tokens, the last
page too, though it is not full; so params of another prompt find nothing, whoever made
them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvtide.connect.prefix_plan import Prompt

ENDED_WELL: Final = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
"""vLLM's names for the ends of a request whose prompt was computed."""

MAX_WAITS: Final = 4096


@dataclass(frozen=True, slots=True)
class Offer:
    """A prompt that the prefill instance has put into the pool, as the params say it.

    ``tokens`` 0: whichever prompt this is, says who sends it.
    """

    tokens: int
    digest: str

    def is_of(self, prompt: Prompt) -> bool:
        """Whether it speaks of this prompt."""
        return self.tokens == 0 or self == Offer(prompt.tokens, prompt.tail.hex())


def is_for_handover(params: Mapping[str, Any] | None) -> bool:
    """Whether another instance will decode this request."""
    return bool(params) and params.get("do_remote_decode") is True


def offer_of(params: Mapping[str, Any] | None) -> Offer | None:
    """What the prefill instance left; None: this request is an ordinary one.

    Params come from outside: what does not fit is no offer, and everything is computed.
    """
    if not params or params.get("do_remote_prefill") is not True:
        return None
    tokens, digest = params.get("remote_num_tokens"), params.get("remote_digest")
    if tokens is None and digest is None:
        return Offer(0, "")
    if not isinstance(tokens, int) or not isinstance(digest, str) or tokens < 1:
        return None
    return Offer(tokens, digest)


def answer_params(
    engine: str, request: str, prompt: Prompt, lease_s: float
) -> dict[str, Any]:
    """What the prefill instance answers, to be sent to the decode instance."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine,
        "remote_request_id": request,
        "remote_num_tokens": prompt.tokens,
        "remote_digest": prompt.tail.hex(),
        "remote_lease_s": lease_s,
    }


def prompt_of(request: Any, hash_tokens: int) -> Prompt | None:
    """How a request's prompt is named as a whole; None: it can't be.

    What a page that is not full depends on beside tokens, such as a picture, vLLM's own
    hashes do not say; such a request is handed over in whole blocks only.
    """
    tokens = request.prompt_token_ids
    if tokens is None or request.prompt_embeds is not None or request.mm_features:
        return None
    count = len(tokens)
    full = count // hash_tokens
    if len(request.block_hashes) < full:
        return None
    parent = bytes(request.block_hashes[full - 1]) if full else b""
    return Prompt(count, tail_name(parent, tokens[full * hash_tokens :]))


def tail_name(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of the page that ends with ``tokens``, after the block ``parent``."""
    hashed = hashlib.sha256(b"kvtide tail\0")
    hashed.update(len(parent).to_bytes(4, "little") + parent)
    for token in tokens:
        hashed.update(int(token).to_bytes(8, "little", signed=True))
    return hashed.digest()


class Waits:
    """How long requests have waited for what was offered to show up in the pool."""

    def __init__(self, limit_s: float) -> None:
        """Nobody waits longer than ``limit_s``."""
        self._limit_s = limit_s
        self._since: dict[str, float] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._since)

    def may_wait(self, request: str, now_s: float) -> bool:
        """Whether it may wait (on); its time counts from the first question."""
        if request not in self._since and len(self._since) >= MAX_WAITS:
            return False
        return now_s - self._since.setdefault(request, now_s) < self._limit_s

    def ended(self, request: str) -> None:
        """It waits no more."""
        self._since.pop(request, None)
