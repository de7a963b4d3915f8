"""Anthropic's API through its official client, streamed and not."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, MessageParam, ToolParam
from tests.integration.gateway_cluster import (
    MODEL,
    TOKENIZER,
    Running,
    Script,
    running_gateway,
)
from tests.unit.gateway_models import CHATML, write_model

from kvtide.bus.messages import DecodeFailed, RejectCode
from kvtide.kv import Role

MESSAGES: list[MessageParam] = [{"role": "user", "content": "hi"}]
TOOLS: list[ToolParam] = [
    {
        "name": "weather",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
CALL = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n'
    "</tool_call>"
)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncGenerator[Running]:
    async with running_gateway(
        tmp_path, script=Script(context=4096), failover_wait_s=1
    ) as running:
        yield running


@pytest.fixture
async def client(running: Running) -> AsyncGenerator[anthropic.AsyncAnthropic]:
    async with client_of(running) as client:
        yield client


def client_of(running: Running) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=running.url, api_key="none", max_retries=0)


async def both(
    client: anthropic.AsyncAnthropic, **asked: Any
) -> tuple[Message, Message]:
    """The answer in one piece, and as the client puts it together from a stream."""
    given: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 200,
        "messages": MESSAGES,
        **asked,
    }
    create: Any = client.messages.create
    whole: Message = await create(**given)
    async with client.messages.stream(**given) as stream:
        streamed = await stream.get_final_message()
    return whole, streamed


def content(message: Message) -> list[dict[str, Any]]:
    """The blocks, without the ids of calls."""
    return [
        {k: v for k, v in block.to_dict().items() if k not in ("id", "citations")}
        for block in message.content
    ]


async def test_an_answer_is_the_same_streamed_or_not(
    running: Running, client: anthropic.AsyncAnthropic
) -> None:
    running.script.reused = 3
    whole, streamed = await both(
        client,
        system=[{"type": "text", "text": "be brief"}],
        metadata={"user_id": "somebody"},
        # of newer models the client knows no such fields
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7},
    )
    for message in (whole, streamed):
        assert content(message) == [{"type": "text", "text": running.script.answer}]
        assert (message.role, message.stop_reason) == ("assistant", "end_turn")
        assert message.usage.cache_read_input_tokens == 3
        work = running.cluster.decodes[-1]
        assert message.usage.input_tokens == work.prompt_tokens - 3
        assert message.usage.output_tokens > 5
    sampling = running.cluster.decodes[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    text = TOKENIZER.decode(
        list(running.cluster.decodes[0].tokens), skip_special_tokens=False
    )
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>")


async def test_the_ends_have_anthropics_names(
    running: Running, client: anthropic.AsyncAnthropic
) -> None:
    running.script.answer = "one two three four"
    for message in await both(client, stop_sequences=["x", "o th"]):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "o th")
        assert content(message) == [{"type": "text", "text": "one tw"}]
    for message in await both(client, max_tokens=2):
        assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)


async def test_tools_are_called_and_their_results_come_back(
    running: Running, client: anthropic.AsyncAnthropic
) -> None:
    running.script.answer = CALL
    whole, streamed = await both(client, tools=TOOLS, tool_choice={"type": "any"})
    called = {"type": "tool_use", "name": "weather", "input": {"city": "Zürich"}}
    for message in (whole, streamed):
        assert content(message) == [{"type": "text", "text": "Let me see."}, called]
        assert message.stop_reason == "tool_use"
    grammar = running.cluster.decodes[-1].sampling.grammar
    assert grammar is not None
    assert "weather" in grammar.source
    use = whole.content[-1]
    assert use.type == "tool_use"
    assert use.id.startswith("toolu_")
    result: dict[str, Any] = {
        "type": "tool_result",
        "tool_use_id": use.id,
        "content": [{"type": "text", "text": "sunny"}],
    }
    history: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    await client.messages.create(
        model=MODEL, max_tokens=9, messages=history, tools=TOOLS
    )
    prompt = list(running.cluster.decodes[-1].tokens)
    text = TOKENIZER.decode(prompt, skip_special_tokens=False)
    assert '"arguments": {"city": "Zürich"}' in text
    assert "<tool_response>\nsunny\n</tool_response>" in text
    assert text.endswith("So?<|im_end|>\n<|im_start|>assistant\n")


async def test_reasoning_is_a_block_of_its_own(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path / "thinks", TOKENIZER, template=CHATML + "{# </think> #}"
    )
    async with (
        running_gateway(tmp_path, model=folder, model_name=MODEL) as running,
        client_of(running) as client,
    ):
        running.script.answer = "<think>hm</think>\n\nyes"
        for message in await both(client):
            thought, said = content(message)
            assert thought["thinking"] == "hm"
            assert said == {"type": "text", "text": "yes"}


async def test_the_assistants_last_turn_is_continued(
    running: Running, client: anthropic.AsyncAnthropic
) -> None:
    started: list[MessageParam] = [
        *MESSAGES,
        {"role": "assistant", "content": "I say"},
    ]
    await client.messages.create(model=MODEL, max_tokens=9, messages=started)
    prompt = list(running.cluster.decodes[-1].tokens)
    text = TOKENIZER.decode(prompt, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nI say")


async def test_a_schema_holds_the_answer(
    running: Running, client: anthropic.AsyncAnthropic
) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"type": "null"}}}
    await client.messages.create(
        model=MODEL,
        max_tokens=9,
        messages=MESSAGES,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    grammar = running.cluster.decodes[-1].sampling.grammar
    assert grammar is not None
    assert '"null"' in grammar.source


async def test_tokens_are_counted_as_they_are_served(
    running: Running, client: anthropic.AsyncAnthropic
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "system": "x"}
    counted = await client.messages.count_tokens(**asked, tools=TOOLS)
    create: Any = client.messages.create
    message: Message = await create(**asked, tools=TOOLS, max_tokens=9)
    assert counted.input_tokens == message.usage.input_tokens
    fewer = await client.messages.count_tokens(**asked)
    assert fewer.input_tokens < counted.input_tokens


BAD_BODIES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "messages[0].content[0].source",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_use", "id": "x", "name": "y", "input": {}}
                    ],
                }
            ]
        },
        "messages[0].content[0]",
    ),
    ({"temperature": 1.5}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
]


async def test_what_is_wrong_is_named_in_anthropics_words(running: Running) -> None:
    good = {"model": MODEL, "max_tokens": 9, "messages": MESSAGES}
    async with httpx.AsyncClient(base_url=running.url, timeout=20) as http:
        for fields, param in BAD_BODIES:
            response = await http.post("/v1/messages", json={**good, **fields})
            assert response.status_code == 400, (fields, response.text)
            body = response.json()
            assert body["type"] == "error"
            assert set(body["error"]) == {"message", "type", "param", "code"}
            assert body["error"]["type"] == "invalid_request_error"
            assert body["error"]["param"] == param, fields
        wrong = await http.get("/v1/messages")
        assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
        broken = await http.post("/v1/messages/count_tokens", content=b"{")
        assert (broken.status_code, broken.json()["type"]) == (400, "error")


async def test_refusals_are_the_clients_exceptions(
    running: Running, client: anthropic.AsyncAnthropic
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "messages": MESSAGES}
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.messages.create(model="other", max_tokens=9, messages=MESSAGES)
    assert unknown.value.body is not None
    for code, status, kind in (
        (RejectCode.TENANT_LIMIT, 429, "rate_limit_error"),
        (RejectCode.OVERLOADED, 503, "overloaded_error"),
    ):
        running.script.reject = code
        for stream in (False, True):
            asked["stream"] = stream
            with pytest.raises(anthropic.APIStatusError) as refused:
                await client.messages.create(**asked)
            assert refused.value.status_code == status
            assert refused.value.response.headers["retry-after"] == "2"
            body: Any = refused.value.body
            assert body["error"]["type"] == kind


async def test_a_failure_in_mid_stream_is_an_error(
    running: Running, client: anthropic.AsyncAnthropic
) -> None:
    script, cluster = running.script, running.cluster
    script.hold_at = 2
    stream = await client.messages.create(
        model=MODEL, max_tokens=99, messages=MESSAGES, stream=True
    )
    # a lone worker is tried again; three times is the most
    for placed in range(1, 4):
        await cluster.until(lambda n=placed: len(cluster.decodes) == n)
        await cluster.until(lambda: cluster.steps >= 2)
        work = cluster.decodes[-1]
        failed = DecodeFailed(
            request=work.request,
            attempt=work.attempt,
            decode=cluster.ref(Role.DECODE),
            code="engine",
            reason="out of memory",
        )
        await cluster.to_gateway(Role.DECODE, work.gateway, failed)
    with pytest.raises(anthropic.APIStatusError, match="out of memory"):
        async for _ in stream:
            pass
