"""Decode → gateway: the tokens, in order, kept until they are acknowledged.

``Tokens`` carries (attempt, choice, index); ``TokenAck`` lets decode forget; after a
gap or a silence the gateway sends ``TokenPull`` and gets a ``TokenPage``.
"""

from enum import StrEnum

import msgspec

from kvtide.bus.messages.base import Message
from kvtide.bus.messages.sampling import TokenLogprobs
from kvtide.kv import NodeRef, RequestId


class FinishReason(StrEnum):
    """Why generation ended, as OpenAI's API words it."""

    STOP = "stop"
    LENGTH = "length"


class DecodeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time before the first token went at decode, in milliseconds."""

    wait_ms: float = 0.0
    pull_ms: float = 0.0
    first_step_ms: float = 0.0


class Tokens(Message, frozen=True, tag="tokens"):
    """Tokens ``index`` … ``index + len(ids) - 1`` of the answer.

    ``finish`` is set with the last ones; a stop token is not among ``ids``.
    ``reused_tokens`` is the prompt's part that came from the pool, in the first event.
    ``logprobs`` are as many as ``ids`` if they were asked for, else none.
    ``prompt_tokens`` is how long the prompt came out, in the first event, where pictures
    made it longer than what was sent.
    """

    request: RequestId
    attempt: int
    decode: NodeRef
    choice: int
    index: int
    ids: tuple[int, ...]
    finish: FinishReason | None = None
    reused_tokens: int | None = None
    times: DecodeTimes | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_tokens: int | None = None


class TokenAck(Message, frozen=True, tag="token_ack"):
    """The gateway has all tokens before ``index`` (and the finish, if ``finished``)."""

    request: RequestId
    attempt: int
    choice: int
    index: int
    finished: bool = False


class TokenPull(Message, frozen=True, tag="token_pull"):
    """Send again from ``index``."""

    request: RequestId
    attempt: int
    choice: int
    index: int


class PullState(StrEnum):
    """What decode knows of the request that was pulled."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    UNKNOWN = "unknown"


class TokenPage(Message, frozen=True, tag="token_page"):
    """All that decode has from ``index`` on, and how the request stands."""

    request: RequestId
    attempt: int
    choice: int
    index: int
    ids: tuple[int, ...]
    state: PullState
    finish: FinishReason | None = None
    reused_tokens: int | None = None
    reason: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_tokens: int | None = None


class DecodeFailed(Message, frozen=True, tag="decode_failed"):
    """Decode gives this attempt up and holds nothing for it any more."""

    request: RequestId
    attempt: int
    decode: NodeRef
    code: str
    reason: str
