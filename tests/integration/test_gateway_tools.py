"""Tools through the official client: what is asked of workers, what is told of calls."""

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from openai import AsyncStream
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessageParam,
    ChatCompletionToolUnionParam,
)
from tests.integration.gateway_cluster import (
    MODEL,
    TOKENIZER,
    Running,
    Script,
    openai_client,
    running_gateway,
)
from tests.unit.gateway_models import CHATML, write_model

from kvtide.bus.messages import GrammarLanguage, GrammarSpec
from kvtide.engine.grammar import Grammar, GrammarKind, check_grammar

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOLS: list[ChatCompletionToolUnionParam] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "description": "now"}},
]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
LLAMA_TEMPLATE = CHATML.replace("<tool_call>", '{"name": x, "parameters": y}')
THINKING_TEMPLATE = CHATML + "{# </think> #}"
CALLED: list[tuple[str, dict[str, Any]]] = [
    ("weather", {"city": "Zürich"}),
    ("time", {}),
]


@pytest.fixture
async def running(tmp_path: Path) -> AsyncGenerator[Running]:
    async with running_gateway(tmp_path, script=Script(context=4096)) as running:
        yield running


@pytest.fixture
async def client(running: Running) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with openai_client(running) as client:
        yield client


async def whole(client: openai.AsyncOpenAI, **asked: Any) -> dict[str, Any]:
    """What the message says, and why it ended."""
    create: Any = client.chat.completions.create
    answer: ChatCompletion = await create(model=MODEL, messages=MESSAGES, **asked)
    [choice] = answer.choices
    message = choice.message
    calls = [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls or ()
        if call.type == "function"
    ]
    ids = [call.id for call in message.tool_calls or ()]
    assert len(set(ids)) == len(ids)
    return {
        "content": message.content,
        "calls": calls,
        "reasoning": getattr(message, "reasoning_content", None),
        "end": choice.finish_reason,
    }


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> dict[str, Any]:
    """The same, put together from a stream."""
    content, reasoning, end = "", "", ""
    calls: list[tuple[str, str]] = []
    create: Any = client.chat.completions.create
    stream: AsyncStream[ChatCompletionChunk] = await create(
        model=MODEL, messages=MESSAGES, stream=True, **asked
    )
    async for chunk in stream:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            function = call.function
            assert function is not None
            if call.id:
                assert call.index == len(calls)
                calls.append((function.name or "", ""))
            name, so_far = calls[call.index]
            calls[call.index] = (name, so_far + (function.arguments or ""))
        end = choice.finish_reason or end
    return {
        "content": content or (None if calls else ""),
        "calls": [(name, json.loads(arguments)) for name, arguments in calls],
        "reasoning": reasoning or None,
        "end": end,
    }


async def test_calls_are_told_streamed_or_not(
    running: Running, client: openai.AsyncOpenAI
) -> None:
    running.script.answer = CALLS
    expected: dict[str, Any] = {
        "content": "Let me see.",
        "calls": CALLED,
        "reasoning": None,
        "end": "tool_calls",
    }
    assert await whole(client, tools=TOOLS) == expected
    assert await streamed(client, tools=TOOLS) == expected
    running.script.answer = "no call"
    plain: dict[str, Any] = {
        "content": "no call",
        "calls": [],
        "reasoning": None,
        "end": "stop",
    }
    assert await whole(client, tools=TOOLS) == plain
    assert await streamed(client, tools=TOOLS) == plain


async def test_without_tools_a_call_is_text(
    running: Running, client: openai.AsyncOpenAI
) -> None:
    running.script.answer = CALLS
    for asked in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        told = await whole(client, **asked)
        assert (told["content"], told["calls"]) == (CALLS, [])
        assert running.cluster.decodes[-1].sampling.grammar is None
    prompt = running.cluster.decodes[-1].tokens
    assert "weather" not in TOKENIZER.decode(list(prompt), skip_special_tokens=False)


async def test_every_choice_is_a_grammar_and_the_prompt_shows_the_tools(
    running: Running, client: openai.AsyncOpenAI
) -> None:
    running.script.answer = CALLS
    named = {"type": "function", "function": {"name": "time"}}
    for choice in ("auto", "required", named):
        for parallel in (True, False):
            await whole(
                client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel
            )
            work = running.cluster.decodes[-1]
            grammar = work.sampling.grammar
            assert grammar is not None
            assert grammar.language is GrammarLanguage.LARK
            check_grammar(Grammar(GrammarKind.LARK, grammar.source))
            assert ("weather" in grammar.source) == (choice != named)
            assert ("free" in grammar.source) == (choice == "auto")
            text = TOKENIZER.decode(list(work.tokens), skip_special_tokens=False)
            assert "weather" in text
    sources = {
        d.sampling.grammar.source
        for d in running.cluster.decodes
        if d.sampling.grammar is not None
    }
    assert len(sources) == 5  # a named call is one, parallel or not


async def test_a_schema_that_nothing_can_hold_is_loose_unless_strict(
    running: Running, client: openai.AsyncOpenAI
) -> None:
    odd: dict[str, Any] = {"type": "object", "properties": {"a": {"not": {}}}}
    function: dict[str, Any] = {"name": "odd", "parameters": odd}
    await whole(client, tools=[{"type": "function", "function": function}])
    assert running.cluster.decodes[-1].sampling.grammar is not None
    strict: dict[str, Any] = {
        "type": "function",
        "function": {**function, "strict": True},
    }
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]"):
        await whole(client, tools=[strict])


async def test_tools_and_a_schema_go_together(
    running: Running, client: openai.AsyncOpenAI
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    await whole(client, tools=TOOLS, response_format=form)
    grammar = running.cluster.decodes[-1].sampling.grammar
    assert grammar is not None
    assert "| answer" in grammar.source


async def test_results_of_calls_are_in_the_next_prompt(
    running: Running, client: openai.AsyncOpenAI
) -> None:
    running.script.answer = CALLS
    answer = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS
    )
    message = answer.choices[0].message
    history = [
        *MESSAGES,
        cast("ChatCompletionMessageParam", message.model_dump(exclude_none=True)),
        *(
            cast(
                "ChatCompletionMessageParam",
                {"role": "tool", "tool_call_id": call.id, "content": f"result {i}"},
            )
            for i, call in enumerate(message.tool_calls or ())
        ),
    ]
    await client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
    prompt = list(running.cluster.decodes[-1].tokens)
    text = TOKENIZER.decode(prompt, skip_special_tokens=False)
    # this template knows no tools: they are spelled out
    assert '"arguments": {"city": "Zürich"}' in text
    assert "<tool_response>\nresult 1\n</tool_response>" in text


async def test_llamas_calls_are_told_too(tmp_path: Path) -> None:
    write_model(tmp_path / "llama", TOKENIZER, template=LLAMA_TEMPLATE)
    async with (
        running_gateway(
            tmp_path,
            model=tmp_path / "llama",
            model_name=MODEL,
            script=Script(context=4096),
        ) as running,
        openai_client(running) as client,
    ):
        running.script.answer = (
            '{"name": "weather", "parameters": {"city": "Zürich"}}; '
            '{"name": "time", "parameters": {}}'
        )
        expected: dict[str, Any] = {
            "content": None,
            "calls": CALLED,
            "reasoning": None,
            "end": "tool_calls",
        }
        assert await whole(client, tools=TOOLS) == expected
        assert await streamed(client, tools=TOOLS, tool_choice="required") == expected
        grammar = running.cluster.decodes[-1].sampling.grammar
        assert grammar is not None
        assert '\\"parameters\\": ' in grammar.source


async def test_reasoning_is_apart_from_content_and_calls(tmp_path: Path) -> None:
    write_model(tmp_path / "thinks", TOKENIZER, template=THINKING_TEMPLATE)
    async with (
        running_gateway(
            tmp_path,
            model=tmp_path / "thinks",
            model_name=MODEL,
            script=Script(context=4096),
        ) as running,
        openai_client(running) as client,
    ):
        running.script.answer = f"<think>\nhm, é\n</think>\n\n{CALLS}"
        expected: dict[str, Any] = {
            "content": "Let me see.",
            "calls": CALLED,
            "reasoning": "hm, é",
            "end": "tool_calls",
        }
        assert await whole(client, tools=TOOLS) == expected
        assert await streamed(client, tools=TOOLS) == expected
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            response_format={"type": "json_object"},
        )
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert details is not None
        thought = "<think>\nhm, é\n</think>"
        assert details.reasoning_tokens == len(TOKENIZER.encode(thought).ids)
        grammar = running.cluster.decodes[-1].sampling.grammar
        assert isinstance(grammar, GrammarSpec)
        assert "</think>" in grammar.source
