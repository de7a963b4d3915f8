"""What a client wants of its answers, whichever API it speaks. None: the default."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.requests import Request

from kvtide.engine.grammar import Grammar
from kvtide.gateway.access.caller import Caller, caller_of
from kvtide.gateway.api.request_ids import request_id
from kvtide.gateway.api.tools import NO_TOOLS, ToolUse
from kvtide.gateway.api.wishes import Wishes, wishes_of
from kvtide.kv import RequestId


@dataclass(frozen=True, slots=True)
class Numbers:
    """How tokens are drawn."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends an answer. The two names are those of the client's own fields."""

    stops: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stops_param: str = "stop"
    max_tokens_param: str = "max_tokens"


@dataclass(frozen=True, slots=True)
class Held:
    """What the client says that the answer looks like, and in which field."""

    param: str
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class Wanted:
    """The answers to one request. ``logprobs``: see ``SamplingSpec``."""

    model: str
    count: int = 1
    numbers: Numbers = field(default_factory=Numbers)
    ends: Ends = field(default_factory=Ends)
    logprobs: int | None = None
    held: Held | None = None
    tools: ToolUse = NO_TOOLS
    salt: str = ""
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks, under which name, and what the request's headers say."""

    request_id: RequestId
    wishes: Wishes
    caller: Caller

    @classmethod
    def of(cls, request: Request) -> "Asker":
        """The asker of an HTTP request.

        Raises:
            ApiError: a header is wrong.
        """
        return cls(request_id(request), wishes_of(request), caller_of(request.scope))
