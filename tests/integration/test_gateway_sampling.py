"""What clients ask of sampling reaches the workers, and what they are told of it."""

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionTokenLogprob
from tests.integration.gateway_cluster import (
    MODEL,
    TOKENIZER,
    Running,
    running_gateway,
)

from kvtide.bus.messages import GrammarLanguage, GrammarSpec

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "null"}}}


@pytest.fixture
async def running(tmp_path: Path) -> AsyncGenerator[Running]:
    async with running_gateway(tmp_path) as running:
        yield running


@pytest.fixture
async def http(running: Running) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, timeout=20) as client:
        yield client


@pytest.fixture
async def client(running: Running) -> AsyncGenerator[openai.AsyncOpenAI]:
    url = f"{running.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        yield client


async def test_penalties_and_biases_reach_the_workers(
    running: Running, http: httpx.AsyncClient
) -> None:
    asked: dict[str, Any] = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
        "repetition_penalty": 1.5,
        "logit_bias": {"9": -100, "5": 2},
    }
    response = await http.post("/v1/chat/completions", json={**CHAT, **asked})
    assert response.status_code == 200, response.text
    sampling = running.cluster.decodes[0].sampling
    assert sampling.presence_penalty == 0.5
    assert sampling.frequency_penalty == -0.25
    assert sampling.repetition_penalty == 1.5
    assert sampling.logit_bias == ((5, 2.0), (9, -100.0))
    assert (sampling.logprobs, sampling.grammar) == (None, None)


OF_SCHEMA = GrammarSpec(GrammarLanguage.JSON_SCHEMA, json.dumps(SCHEMA))
OF_REGEX = GrammarSpec(GrammarLanguage.REGEX, "[a-c]+")
OF_LARK = GrammarSpec(GrammarLanguage.LARK, 'start: "x"')
OF_CHOICE = GrammarSpec(GrammarLanguage.LARK, 'start: "yes" | "no"\n')
ANY_OBJECT = GrammarSpec(GrammarLanguage.JSON_SCHEMA, '{"type": "object"}')
WAYS: list[tuple[dict[str, Any], GrammarSpec | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
            }
        },
        OF_SCHEMA,
    ),
    ({"guided_json": SCHEMA}, OF_SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, OF_SCHEMA),
    ({"guided_regex": "[a-c]+"}, OF_REGEX),
    ({"regex": "[a-c]+"}, OF_REGEX),
    ({"guided_grammar": OF_LARK.source}, OF_LARK),
    ({"grammar": OF_LARK.source}, OF_LARK),
    ({"guided_choice": ["yes", "no"]}, OF_CHOICE),
    ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
    ({"structured_outputs": {"regex": "[a-c]+"}}, OF_REGEX),
    ({"structured_outputs": {"grammar": OF_LARK.source}}, OF_LARK),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, OF_CHOICE),
    ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
    ({"structured_outputs": {}}, None),
]


async def test_every_way_to_ask_for_structure_is_one_grammar(
    running: Running, http: httpx.AsyncClient
) -> None:
    for asked, grammar in WAYS:
        response = await http.post("/v1/chat/completions", json={**CHAT, **asked})
        assert response.status_code == 200, (asked, response.text)
        assert running.cluster.decodes[-1].sampling.grammar == grammar, asked


async def test_a_bad_grammar_is_refused_before_any_work(
    running: Running, http: httpx.AsyncClient
) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"guided_json": {"type": "object", "properties": 5}}, "properties"),
        (
            {"guided_regex": "a", "guided_json": {}},
            "either guided_json or guided_regex",
        ),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ]
    for asked, said in wrong:
        response = await http.post("/v1/chat/completions", json={**CHAT, **asked})
        assert response.status_code == 400
        assert said in response.json()["error"]["message"]
    assert running.cluster.admits == []


async def test_a_chats_logprobs_are_those_of_its_tokens_streamed_or_not(
    running: Running, client: openai.AsyncOpenAI
) -> None:
    ids: list[int] = TOKENIZER.encode(running.script.answer).ids
    whole = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    [choice] = whole.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    raw = b"".join(bytes(token.bytes or []) for token in content)

    assert raw.decode() == choice.message.content == running.script.answer
    assert [token.logprob for token in content] == [-float(i) for i in range(len(ids))]
    assert [len(token.top_logprobs) for token in content] == [2] * len(ids)
    assert content[0].top_logprobs[0].token == content[0].token
    pieces: list[ChatCompletionTokenLogprob] = []
    async for chunk in await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2, stream=True
    ):
        [piece] = chunk.choices
        if piece.logprobs is not None:
            pieces += piece.logprobs.content or []
    assert pieces == content


async def test_a_text_completions_logprobs_have_offsets(
    running: Running, client: openai.AsyncOpenAI
) -> None:
    answer = running.script.answer
    ids: list[int] = TOKENIZER.encode(answer).ids
    whole = await client.completions.create(model=MODEL, prompt="hi", logprobs=1)
    [choice] = whole.choices
    told = choice.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.text_offset is not None
    assert told.top_logprobs is not None

    assert choice.text == answer
    assert told.token_logprobs == [-float(i) for i in range(len(ids))]
    assert told.top_logprobs[0] == {told.tokens[0]: 0.0}
    for offset, token in zip(told.text_offset, told.tokens, strict=True):
        if "\ufffd" not in token:  # a part of a character has no text of its own
            assert answer[offset : offset + len(token)] == token
    offsets: list[int] = []
    async for chunk in await client.completions.create(
        model=MODEL, prompt="hi", logprobs=1, stream=True
    ):
        logprobs = chunk.choices[0].logprobs
        if logprobs is not None:
            offsets += logprobs.text_offset or []
    assert offsets == told.text_offset


async def test_lost_tokens_are_pulled_with_their_logprobs(
    running: Running, client: openai.AsyncOpenAI
) -> None:
    running.script.drop_tokens = True
    answer = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True
    )
    told = answer.choices[0].logprobs
    assert told is not None
    raw = b"".join(bytes(token.bytes or []) for token in told.content or [])
    assert raw.decode() == running.script.answer


async def test_no_logprobs_are_null(running: Running, http: httpx.AsyncClient) -> None:
    for path, body in (
        ("/v1/chat/completions", {**CHAT, "logprobs": False}),
        ("/v1/completions", {"model": MODEL, "prompt": "hi", "logprobs": None}),
    ):
        response = await http.post(path, json=body)
        assert response.json()["choices"][0]["logprobs"] is None
    assert running.cluster.decodes[0].sampling.logprobs is None
