"""OpenAI's Responses API through its official client, streamed and not."""

from collections.abc import AsyncGenerator, AsyncIterable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from tests.integration.gateway_cluster import (
    MODEL,
    TOKENIZER,
    Running,
    Script,
    openai_client,
    running_gateway,
)
from tests.unit.gateway_models import CHATML, write_model

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
CALL = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n'
    "</tool_call>"
)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncGenerator[Running]:
    async with running_gateway(tmp_path, script=Script(context=4096)) as running:
        yield running


@pytest.fixture
async def client(running: Running) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with openai_client(running) as client:
        yield client


async def both(client: openai.AsyncOpenAI, **asked: Any) -> list[Response]:
    """The response in one piece, and the last one of a stream."""
    given: dict[str, Any] = {"model": MODEL, "input": "hi", **asked}
    create: Any = client.responses.create
    whole: Response = await create(**given)
    stream: AsyncIterable[Any] = await create(**given, stream=True)
    events: list[Any] = [event async for event in stream]
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(events)))
    assert [event.type for event in events[:2]] == [
        "response.created",
        "response.in_progress",
    ]
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    _grown(events, last.response)
    return [whole, last.response]


def _grown(events: list[Any], final: Response) -> None:
    """What the deltas make is what the last event has."""
    texts: dict[int, str] = dict.fromkeys(range(len(final.output)), "")
    done: dict[int, Any] = {}
    for event in events:
        match event.type:
            case (
                "response.output_text.delta"
                | "response.reasoning_text.delta"
                | "response.function_call_arguments.delta"
            ):
                texts[event.output_index] += event.delta
            case "response.output_item.done":
                done[event.output_index] = event.item
            case _:
                pass
    assert [done[i] for i in range(len(final.output))] == final.output
    items: list[Any] = list(final.output)
    for text, item in zip(texts.values(), items, strict=True):
        if item.type == "function_call":
            assert text == item.arguments
        else:
            assert item.type in ("message", "reasoning")
            assert text == item.content[0].text


async def test_a_response_is_the_same_streamed_or_not(
    running: Running, client: openai.AsyncOpenAI
) -> None:
    running.script.reused = 3
    for response in await both(
        client,
        instructions="be brief",
        temperature=0.5,
        metadata={"a": "b"},
        store=False,
    ):
        assert response.output_text == running.script.answer
        assert response.status == "completed"
        assert response.usage is not None
        assert response.usage.input_tokens_details.cached_tokens == 3
        assert (response.metadata, response.temperature) == ({"a": "b"}, 0.5)
    work = running.cluster.decodes[0]
    text = TOKENIZER.decode(list(work.tokens), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>")
    assert work.sampling.temperature == 0.5


async def test_a_response_that_is_cut_is_incomplete(client: openai.AsyncOpenAI) -> None:
    for response in await both(client, max_output_tokens=2):
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"


async def test_functions_are_called_and_their_outputs_come_back(
    running: Running, client: openai.AsyncOpenAI
) -> None:
    running.script.answer = CALL
    for response in await both(client, tools=TOOLS, tool_choice="required"):
        message, call = response.output
        assert message.type == "message"
        assert response.output_text == "Let me see."
        assert call.type == "function_call"
        assert (call.name, call.arguments) == ("weather", '{"city": "Zürich"}')
        history: list[Any] = [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            *(item.model_dump(exclude_none=True) for item in response.output),
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": "sunny",
            },
        ]
        await client.responses.create(model=MODEL, input=history, tools=TOOLS)
        prompt = list(running.cluster.decodes[-1].tokens)
        text = TOKENIZER.decode(prompt, skip_special_tokens=False)
        assert 'Let me see.\n<tool_call>\n{"name": "weather"' in text
        assert "<tool_response>\nsunny\n</tool_response>" in text


async def test_reasoning_is_an_item_of_its_own(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path / "thinks", TOKENIZER, template=CHATML + "{# </think> #}"
    )
    async with (
        running_gateway(tmp_path, model=folder, model_name=MODEL) as running,
        openai_client(running) as client,
    ):
        running.script.answer = "<think>hm</think>\n\nyes"
        for response in await both(client):
            thought, _ = response.output
            assert thought.type == "reasoning"
            assert thought.content is not None
            assert thought.content[0].text == "hm"
            assert response.output_text == "yes"
            assert response.usage is not None
            details = response.usage.output_tokens_details
            assert details.reasoning_tokens == len(
                TOKENIZER.encode("<think>hm</think>").ids
            )


async def test_logprobs_come_if_they_are_included(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(
        model=MODEL,
        input="hi",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    [message] = response.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    raw = b"".join(bytes(token.bytes) for token in part.logprobs)
    assert raw.decode() == response.output_text
    assert len(part.logprobs[0].top_logprobs) == 2


async def test_a_format_holds_the_answer(
    running: Running, client: openai.AsyncOpenAI
) -> None:
    form: Any = {
        "type": "json_schema",
        "name": "x",
        "schema": {"type": "object", "properties": {"a": {"type": "null"}}},
    }
    response = await client.responses.create(
        model=MODEL, input="hi", text={"format": form}
    )
    grammar = running.cluster.decodes[-1].sampling.grammar
    assert grammar is not None
    assert '"null"' in grammar.source
    assert response.text is not None


BAD_BODIES: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**9}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
]


async def test_what_is_wrong_is_named(running: Running) -> None:
    async with httpx.AsyncClient(base_url=running.url, timeout=20) as http:
        for fields, param in BAD_BODIES:
            body = {"model": MODEL, "input": "hi", **fields}
            response = await http.post("/v1/responses", json=body)
            assert response.status_code == 400, (fields, response.text)
            assert response.json()["error"]["param"] == param, fields
