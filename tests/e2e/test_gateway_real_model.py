"""Tools and schemas held by real workers, asked through the official clients."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from openai import Stream
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from tests.e2e.system import System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CITIES = ["Oslo", "Bern", "Zürich"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": CITIES},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "forecast", "description": "Weather ahead", "parameters": SCHEMA}
TOOLS: list[Any] = [
    {"type": "function", "function": FUNCTION},
    {"type": "function", "function": {"name": "now", "parameters": {}}},
]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Bern?"}]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    state = tmp_path_factory.mktemp("real") / "state"
    with System(state, "--worker", "1", "--prefill", "0", "--decode", "0") as running:
        yield running


@pytest.fixture(scope="module")
def client(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none") as client:
        yield client


@pytest.fixture(scope="module")
def claude(system: System) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=system.url, api_key="none") as client:
        yield client


def check(arguments: Any) -> None:
    assert set(arguments) == {"city", "days"}
    assert arguments["city"] in CITIES
    assert 1 <= arguments["days"] <= 9


NAMED = {"type": "function", "function": {"name": "forecast"}}


@pytest.mark.parametrize(
    "temperature", [0.0, pytest.param(1.5, marks=pytest.mark.full)]
)
def test_a_named_tool_is_called_with_what_its_schema_says(
    system: System, client: openai.OpenAI, temperature: float
) -> None:
    asked: dict[str, Any] = {
        "model": system.model,
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": NAMED,
        "temperature": temperature,
        "seed": 7,
        "max_tokens": 80,
    }
    create: Any = client.chat.completions.create
    answer: ChatCompletion = create(**asked)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "forecast"
    check(json.loads(call.function.arguments))
    joined = ""
    chunks: Stream[ChatCompletionChunk] = create(**asked, stream=True)
    for chunk in chunks:
        for piece in chunk.choices[0].delta.tool_calls or ():
            assert piece.function is not None
            joined += piece.function.arguments or ""
    assert joined == call.function.arguments


def test_a_required_call_is_one_of_the_tools(
    system: System, claude: anthropic.Anthropic
) -> None:
    message = claude.messages.create(
        model=system.model,
        max_tokens=80,
        messages=QUESTION,
        tools=[{"name": "forecast", "input_schema": SCHEMA}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body={"temperature": 0},
    )
    assert message.stop_reason == "tool_use"
    [use] = message.content
    assert use.type == "tool_use"
    check(use.input)


@pytest.mark.full
def test_a_free_answer_may_call_and_what_it_calls_is_valid(
    system: System, client: openai.OpenAI
) -> None:
    [choice] = client.chat.completions.create(
        model=system.model,
        messages=QUESTION,
        tools=TOOLS,
        temperature=0,
        max_tokens=60,
    ).choices
    for call in choice.message.tool_calls or ():
        assert call.type == "function"
        if call.function.name == "forecast" and choice.finish_reason != "length":
            check(json.loads(call.function.arguments))
    assert choice.message.content or choice.message.tool_calls


def test_a_schema_holds_a_response(system: System, client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    asked: dict[str, Any] = {
        "model": system.model,
        "input": "Where and for how long?",
        "temperature": 0,
        "max_output_tokens": 60,
        "text": {"format": form},
    }
    create: Any = client.responses.create
    response: Response = create(**asked)
    assert response.status == "completed"
    check(json.loads(response.output_text))
    with client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    assert streamed.output_text == response.output_text
    assert streamed.usage is not None
    assert response.usage is not None
    assert streamed.usage.output_tokens == response.usage.output_tokens
