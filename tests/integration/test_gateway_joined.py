"""Joined streams are the answers in one piece, whatever tokens they are made of."""

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tests.integration.gateway_cluster import (
    MODEL,
    TOKENIZER,
    Running,
    Script,
    running_gateway,
)
from tests.unit.gateway_models import CHATML, write_model

TEMPLATE = CHATML + "{# </think> #}"
TOOL = {"name": "f", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é🌊}"}}\n</tool_call>'
FRAGMENTS = [
    *(CALL, "<think>", "</think>", "<tool_call>", "</tool_call>", "\n\n", " "),
    *("日本", "🌊", "é", "ab", "abc", "<", "</", "{", "�", "x"),
]
STOPS = ["abc", "ca", "本🌊", "\n ", "</think>x", "🌊x"]
BYTES = {
    raw: token
    for token in range(3, 259)
    if (raw := TOKENIZER.id_to_token(token)) and len(raw) == 1
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def running(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncGenerator[Running]:
    folder = tmp_path_factory.mktemp("joined")
    model = write_model(folder / "thinks", TOKENIZER, template=TEMPLATE)
    script = Script(context=4096)
    async with running_gateway(
        folder, model=model, model_name=MODEL, script=script
    ) as running:
        yield running


@dataclass(frozen=True)
class Told:
    """All that an answer says, whichever API told it."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    end: str


def tokens_of(text: str, cuts: list[bool]) -> list[int]:
    """``text`` in the tokenizer's own tokens, some of them in single bytes."""
    ids: list[int] = []
    own: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    for number, token in enumerate(own):
        name = TOKENIZER.id_to_token(token) or ""
        split = cuts[number % len(cuts)] if cuts else False
        known = split and all(char in BYTES for char in name)
        ids += [BYTES[char] for char in name] if known else [token]
    return ids


async def whole(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    response = await http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    data = [
        line.removeprefix("data: ")
        for line in response.text.split("\n")
        if line.startswith("data: ")
    ]
    return [json.loads(line) for line in data if line != "[DONE]"]


async def of_chat(http: httpx.AsyncClient, stops: list[str]) -> tuple[Told, Told]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": TOOL}],
        "stop": stops,
    }
    path = "/v1/chat/completions"
    [choice] = (await whole(http, path, body))["choices"]
    message = choice["message"]
    one = Told(
        message["content"] or "",
        message.get("reasoning_content", ""),
        tuple(
            (call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        ),
        choice["finish_reason"],
    )
    content, reasoning, end = "", "", ""
    calls: list[list[str]] = []
    for chunk in await events(http, path, body):
        [piece] = chunk["choices"]
        delta = piece["delta"]
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
        end = piece["finish_reason"] or end
    return one, Told(content, reasoning, tuple((n, a) for n, a in calls), end)


async def of_text(http: httpx.AsyncClient, stops: list[str]) -> tuple[Told, Told]:
    body = {"model": MODEL, "prompt": "日x", "echo": True, "stop": stops}
    [choice] = (await whole(http, "/v1/completions", body))["choices"]
    pieces = [c["choices"][0] for c in await events(http, "/v1/completions", body)]
    text = "".join(piece["text"] for piece in pieces)
    return (
        Told(choice["text"], "", (), choice["finish_reason"]),
        Told(text, "", (), pieces[-1]["finish_reason"]),
    )


async def of_messages(http: httpx.AsyncClient, stops: list[str]) -> tuple[Told, Told]:
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 999,
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"name": "f", "input_schema": {}}],
        "stop_sequences": stops,
    }
    message = await whole(http, "/v1/messages", body)
    blocks: list[dict[str, Any]] = []
    end = ""
    for event in await events(http, "/v1/messages", body):
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                delta = event["delta"]
                kind = {
                    "text_delta": "text",
                    "thinking_delta": "thinking",
                    "input_json_delta": "json",
                }[delta["type"]]
                blocks[event["index"]][kind] += delta.get(
                    kind, delta.get("partial_json")
                )
            case "message_delta":
                end = (
                    f"{event['delta']['stop_reason']} {event['delta']['stop_sequence']}"
                )
            case _:
                pass
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = _object(block["json"])
    stopped = f"{message['stop_reason']} {message['stop_sequence']}"
    return _of_blocks(message["content"], stopped), _of_blocks(blocks, end)


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # it was cut short
        return {}


def _of_blocks(blocks: list[dict[str, Any]], end: str) -> Told:
    return Told(
        "".join(block.get("text", "") for block in blocks),
        "".join(block.get("thinking", "") for block in blocks),
        tuple(
            (block["name"], json.dumps(block["input"]))
            for block in blocks
            if block["type"] == "tool_use"
        ),
        end,
    )


async def of_responses(http: httpx.AsyncClient) -> tuple[Any, Any]:
    tools = [{"type": "function", **TOOL}]
    body = {"model": MODEL, "input": "x", "tools": tools}
    response = await whole(http, "/v1/responses", body)
    texts: dict[int, str] = {}
    for event in await events(http, "/v1/responses", body):
        if event["type"].endswith(".delta"):
            index = event["output_index"]
            texts[index] = texts.get(index, "") + event["delta"]
    told = [
        item["arguments"] if "arguments" in item else item["content"][0]["text"]
        for item in response["output"]
    ]
    return told, [texts[i] for i in range(len(texts))]


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=8),
    cuts=st.lists(st.booleans(), max_size=5),
    stops=st.lists(st.sampled_from(STOPS), max_size=2),
    burst=st.integers(1, 5),
)
async def test_joined_streams_are_the_answers_in_one_piece(
    running: Running,
    fragments: list[str],
    cuts: list[bool],
    stops: list[str],
    burst: int,
) -> None:
    script = running.script
    script.ids, script.burst = tokens_of("".join(fragments), cuts), burst
    async with httpx.AsyncClient(base_url=running.url, timeout=20) as http:
        for told in (of_chat, of_text, of_messages):
            one, joined = await told(http, stops)
            assert joined == one
            if told is of_text:
                assert not [stop for stop in stops if stop in one.content[2:]]
        one, joined = await of_responses(http)
        assert joined == one
