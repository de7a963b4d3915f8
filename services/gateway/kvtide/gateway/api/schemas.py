"""What clients send. Strict types, bounded numbers; unknown fields are ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_TOKENS_BOUND = 1 << 31
MAX_SEED = (1 << 63) - 1

Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
MinP = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
TopK = Annotated[int, Field(ge=-1, le=1 << 31)]
Count = Annotated[int, Field(ge=1, le=MAX_TOKENS_BOUND)]
TokenId = Annotated[int, Field(ge=0, le=(1 << 32) - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Repetition = Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)
]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
Seed = Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)]

Variables = dict[str, bool | int | float | str | None]


class Body(BaseModel):
    """The base of all request bodies. Extra fields are kept to be looked at."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class Part(BaseModel):
    """The base of what is inside of bodies. Fields that are not known are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(Part):
    """``stream_options``."""

    include_usage: bool | None = None


class TextFormat(Part):
    """``response_format``: no format."""

    type: Literal["text"]


class JsonObjectFormat(Part):
    """``response_format``: any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Part):
    """A JSON schema as OpenAI wraps it."""

    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Part):
    """``response_format``: JSON of this schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StructuredOutputs(Part):
    """``structured_outputs``, as vLLM has it: one of these is given.

    What else vLLM knows there and would change the answer is refused.
    """

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: Choices | None = None
    json_object: bool | None = None
    structural_tag: None = None


ToolName = Annotated[str, Field(min_length=1, max_length=128)]


class FunctionTool(Part):
    """A function that the model may call, as OpenAI describes it."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Part):
    """One of ``tools``."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Part):
    """A function by its name."""

    name: ToolName


class NamedToolChoice(Part):
    """``tool_choice``: this one."""

    type: Literal["function"]
    function: NamedFunction


ToolWord = Literal["none", "auto", "required"]


class FunctionCall(Part):
    """What the model called; ``arguments`` are JSON as text."""

    name: ToolName
    arguments: str


class ToolCall(Part):
    """A call in an assistant's message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class GenerationBody(Body):
    """What both kinds of completion share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS_BOUND)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: Annotated[dict[TokenName, Bias], Field(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Choices | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    grammar: str | None = None
    user: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    return_token_ids: bool | None = None


class TextPart(Part):
    """A part of a message's content that is text."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class PictureUrl(Part):
    """Where a picture is; only ``data:`` URLs are taken, and nothing is fetched."""

    url: str


class PicturePart(Part):
    """A part of a user's message that is a picture, for models that take some."""

    type: Literal["image_url"]
    image_url: PictureUrl | str

    @property
    def url(self) -> str:
        """Where the picture is."""
        told = self.image_url
        return told if isinstance(told, str) else told.url


ContentPart = Annotated[TextPart | PicturePart, Field(discriminator="type")]


class Message(BaseModel):
    """A message of a chat. What a template may use beside content goes on as it is."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=1024)] | None = None
    tool_call_id: str | None = None


class ChatBody(GenerationBody):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=65536)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None
    tools: Annotated[list[ToolBody], Field(max_length=128)] | None = None
    tool_choice: ToolWord | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionBody(GenerationBody):
    """``/v1/completions``."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: TopLogprobs | Literal[False] | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None


class TokenizeBody(Body):
    """``/tokenize``: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: Variables | None = None
    tools: Annotated[list[ToolBody], Field(max_length=128)] | None = None


class DetokenizeBody(Body):
    """``/detokenize``."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20)]


JsonObject = dict[str, Any]
