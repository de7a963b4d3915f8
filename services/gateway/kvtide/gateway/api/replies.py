"""What clients get, as OpenAI words it. Encoded by msgspec."""

from typing import Generic, TypeVar

import msgspec

from kvtide.gateway.life import Usage


class PromptDetails(msgspec.Struct, frozen=True):
    """``prompt_tokens_details``."""

    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    """``completion_tokens_details``."""

    reasoning_tokens: int


class UsageReply(msgspec.Struct, frozen=True):
    """``usage``."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: OutputDetails | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, usage: Usage, reasoning_tokens: int | None = None) -> "UsageReply":
        """The cost of all answers; ``reasoning_tokens``: of a model that thinks."""
        prompt, output = usage.prompt_tokens, usage.output_tokens
        cached = PromptDetails(usage.cached_tokens)
        if reasoning_tokens is None:
            return cls(prompt, output, prompt + output, cached)
        details = OutputDetails(reasoning_tokens)
        return cls(prompt, output, prompt + output, cached, details)


class Insight(msgspec.Struct, frozen=True, omit_defaults=True):
    """``kvtide``: how it was made, for clients that ask with ``x-kvtide-debug: 1``.

    ``request`` is its name within the cluster, in logs, the catalog and ``explain``.
    ``queue_ms`` is the wait in prefill's queue, None if prefill did not say.
    """

    request: str
    attempt: int
    prefill: str
    decode: str
    hit_tokens: int
    queue_ms: float | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token that might have been."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """A token of an answer, and what might have been there, likeliest first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """``logprobs`` of a chat's choice."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """``logprobs`` of a text completion's choice; all lists are equally long.

    ``text_offset`` counts characters from the start of the answer.
    """

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CalledFunction(msgspec.Struct, frozen=True):
    """A tool's name and arguments, or a piece of them."""

    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class CallReply(msgspec.Struct, frozen=True):
    """One of ``tool_calls``; in a stream ``index`` says which, and ``id`` comes once."""

    function: CalledFunction
    index: int | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET


class ChatMessageReply(msgspec.Struct, frozen=True):
    """An assistant's whole message; ``content`` is null if all it does is call."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[CallReply] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One whole answer of a chat."""

    index: int
    message: ChatMessageReply
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    kvtide: Insight | msgspec.UnsetType = msgspec.UNSET


class TextChoice(msgspec.Struct, frozen=True):
    """One whole answer, or a piece of one, of a text completion."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: TextLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    kvtide: Insight | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, frozen=True):
    """A piece of an assistant's message."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[CallReply] | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """A piece of one answer of a chat."""

    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    kvtide: Insight | msgspec.UnsetType = msgspec.UNSET


AnyChoice = TypeVar("AnyChoice", ChatChoice, TextChoice, ChunkChoice)


class CompletionReply(msgspec.Struct, Generic[AnyChoice], frozen=True):
    """A whole completion, or one chunk of it; ``object`` says which."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[AnyChoice]
    usage: UsageReply | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ModelReply(msgspec.Struct, frozen=True):
    """A served model. ``parent`` is the model that an adapter is for, None for itself."""

    id: str
    created: int
    max_model_len: int | None
    root: str
    parent: str | None
    object: str = "model"
    owned_by: str = "kvtide"


class ModelList(msgspec.Struct, frozen=True):
    """``/v1/models``."""

    data: list[ModelReply]
    object: str = "list"


class TokenizeReply(msgspec.Struct, frozen=True):
    """``/tokenize``. ``block_starts`` are where the KV blocks of the prompt begin."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str | None] | None
    block_tokens: int | None
    block_starts: list[int]
    keys: int


class DetokenizeReply(msgspec.Struct, frozen=True):
    """``/detokenize``."""

    prompt: str


class ReadyReply(msgspec.Struct, frozen=True):
    """``/readyz``: ``missing`` names what is not there yet."""

    ready: bool
    state: str
    model: str
    missing: list[str]
