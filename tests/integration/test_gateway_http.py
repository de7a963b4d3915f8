"""The HTTP surface against scripted workers: answers, streams, errors."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.integration.gateway_cluster import (
    MODEL,
    Running,
    openai_client,
    running_gateway,
)
from tests.integration.gateway_script import FACTS

from kvtide.kv import BlockKey, Role

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,
}


@pytest.fixture
async def running(tmp_path: Path) -> AsyncGenerator[Running]:
    async with running_gateway(tmp_path) as running:
        yield running


@pytest.fixture
async def http(running: Running) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, timeout=20) as client:
        yield client


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of a stream's events; ``[DONE]`` as it is."""
    async with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    data = [line.removeprefix("data: ") for line in lines]
    return [json.loads(d) if d != "[DONE]" else d for d in data]


async def test_a_chat_is_answered(running: Running, http: httpx.AsyncClient) -> None:
    running.script.reused = 3
    response = await http.post(
        "/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-1"}
    )
    body = response.json()
    assert response.status_code == 200, body
    assert response.headers["x-request-id"] == "mine-1"
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"]["content"] == running.script.answer
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert body["usage"]["total_tokens"] == (
        body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    )
    cluster = running.cluster
    assert cluster.decodes[0].prompt_tokens == body["usage"]["prompt_tokens"]
    assert cluster.prefills[0].tokens == cluster.decodes[0].tokens
    await cluster.until(lambda: len(cluster.ended) == 1)
    assert cluster.ended[0].outcome == "finished"
    assert cluster.cancels == []


async def test_a_chat_streams(running: Running, http: httpx.AsyncClient) -> None:
    body = {**CHAT, "stream_options": {"include_usage": True}}
    *chunks, costs, done = await events(http, "/v1/chat/completions", body)
    assert done == "[DONE]"
    assert costs["choices"] == []
    assert costs["usage"]["completion_tokens"] > 5
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({(c["id"], c["created"], c["model"]) for c in [*chunks, costs]}) == 1
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert last == {
        "index": 0,
        "delta": {},
        "finish_reason": "stop",
        "logprobs": None,
    }
    assert all(c["finish_reason"] is None for c in [first, *middle])
    text = "".join(c["delta"]["content"] for c in middle)
    assert text == running.script.answer
    assert not any("�" in c["delta"]["content"] for c in middle)


async def test_completions_take_every_form_of_prompt(
    running: Running, http: httpx.AsyncClient
) -> None:
    ids = [5, 6, 7]
    for prompt, count in (("abc", 1), (["a", "b"], 2), (ids, 1), ([ids, [9]], 2)):
        body = {"model": MODEL, "prompt": prompt, "n": 2, "return_token_ids": True}
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        reply = response.json()
        choices = reply["choices"]
        assert [c["index"] for c in choices] == list(range(2 * count))
        assert {c["text"] for c in choices} == {running.script.answer}
        prompts = [c["prompt_token_ids"] for c in choices]
        assert prompts[0] == prompts[1]
        # a prompt counts once, however many answers it gets
        assert reply["usage"]["prompt_tokens"] == sum(map(len, prompts[::2]))
    assert list(running.cluster.decodes[-1].tokens) == [9]
    assert len({d.request for d in running.cluster.decodes}) == 12


async def test_completion_chunks_join_to_the_whole(
    running: Running, http: httpx.AsyncClient
) -> None:
    body = {"model": MODEL, "prompt": "x", "n": 2, "return_token_ids": True}
    *chunks, done = await events(http, "/v1/completions", body)
    assert done == "[DONE]"
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["text"] for c in mine) == running.script.answer
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
        decode = running.cluster.generating[running.cluster.decodes[index].request, 1]
        assert [i for c in mine for i in c.get("token_ids", [])] == decode.ids


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_strings_end_the_text_and_cancel_decode(
    running: Running, http: httpx.AsyncClient, stream: bool
) -> None:
    running.script.answer = "one two three four five six seven"
    running.script.step_s = 0.005
    body = {**CHAT, "stop": ["ree f", "nothing"]}
    if stream:
        *chunks, _ = await events(http, "/v1/chat/completions", body)
        pieces = [c["choices"][0]["delta"].get("content", "") for c in chunks]
        text, reason = "".join(pieces), chunks[-1]["choices"][0]["finish_reason"]
    else:
        response = await http.post("/v1/chat/completions", json=body)
        choice = response.json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == ("one two th", "stop")
    cluster = running.cluster
    await cluster.until(lambda: "decode" in {r for r, _ in cluster.cancels})
    await cluster.until(lambda: cluster.running == 0)


async def test_length_ends_an_answer(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2})
    body = response.json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 2


async def test_parameters_reach_the_workers(
    running: Running, http: httpx.AsyncClient
) -> None:
    body = {
        **CHAT,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": -1,
        "max_completion_tokens": 7,
        "min_tokens": 2,
        "stop_token_ids": [11],
        "cache_salt": "shared",
        "priority": 3,
        "user": "somebody",
        "something_new": {"is": "ignored"},
        "tools": [],
        "logprobs": False,
        "response_format": {"type": "text"},
    }
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    work = running.cluster.decodes[0]
    sampling = work.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
    assert (sampling.min_p, sampling.seed) == (0.1, 2**64 - 1)
    assert (work.max_new_tokens, work.min_new_tokens) == (7, 2)
    assert work.stop_token_ids[-1] == 11
    assert work.salt == "shared"
    assert running.cluster.admits[0].priority == 3


async def test_lost_tokens_and_a_lost_finish_are_pulled(
    running: Running, http: httpx.AsyncClient
) -> None:
    running.script.drop_tokens = True
    response = await http.post("/v1/chat/completions", json=CHAT)
    assert response.json()["choices"][0]["message"]["content"] == running.script.answer


async def test_answers_share_the_seed_and_differ_in_their_number(
    running: Running, http: httpx.AsyncClient
) -> None:
    body = {"model": MODEL, "prompt": ["x", "y"], "n": 2, "seed": 2**63 - 1}
    assert (await http.post("/v1/completions", json=body)).is_success
    assert (await http.post("/v1/completions", json={**body, "seed": 1})).is_success
    sampling = [work.sampling for work in running.cluster.decodes]
    drawn = [(each.seed, each.choice) for each in sampling]
    assert sorted(drawn[:4]) == [(2**63 - 1, choice) for choice in range(4)]
    assert sorted(drawn[4:]) == [(1, choice) for choice in range(4)]


async def test_insight_is_shown_when_asked_for(
    running: Running, http: httpx.AsyncClient
) -> None:
    running.script.reused = 4
    plain = await http.post("/v1/chat/completions", json=CHAT)
    assert not [h for h in plain.headers if h.startswith("x-kvtide")]
    shown = await http.post(
        "/v1/chat/completions", json=CHAT, headers={"x-kvtide-debug": "1"}
    )
    assert shown.headers["x-kvtide-decode"] == "decode-1"
    name = running.cluster.decodes[-1].request
    assert shown.headers["x-kvtide-request"] == name
    assert shown.json()["choices"][0]["kvtide"] == {
        "request": name,
        "attempt": 1,
        "prefill": "prefill-1",
        "decode": "decode-1",
        "hit_tokens": 4,
        "queue_ms": 0.0,
    }


async def test_models_and_text_routes(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()
    assert [m["id"] for m in listed["data"]] == [MODEL]
    assert (await http.get(f"/v1/models/{MODEL}")).json()["max_model_len"] == 512
    missing = await http.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"

    body = {"messages": CHAT["messages"], "return_token_strs": True}
    tokens = (await http.post("/tokenize", json=body)).json()
    assert tokens["token_strs"][0] == "<|im_start|>"
    assert tokens["block_tokens"] == 16
    assert tokens["keys"] == tokens["count"] // 16
    text = await http.post("/detokenize", json={"tokens": tokens["tokens"]})
    assert text.json()["prompt"].startswith("<|im_start|>user\nhi<|im_end|>")
    wrong = await http.post("/detokenize", json={"tokens": [1, 1 << 31]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")


async def test_an_adapter_is_a_model_of_its_own(
    running: Running, http: httpx.AsyncClient
) -> None:
    facts = replace(FACTS, max_tokens=running.script.context)
    tuned = facts.adapted("tuned", "digest")
    worker = running.cluster.nodes[Role.DECODE]
    asked = {**CHAT, "model": "tuned"}
    worker.models(facts)
    assert (await http.post("/v1/chat/completions", json=asked)).status_code == 404
    # another model's adapter is not this gateway's
    worker.models(facts, tuned, replace(tuned, name="strange", parent="other"))
    listed: list[dict[str, Any]] = []
    for _ in range(500):
        listed = (await http.get("/v1/models")).json()["data"]
        if len(listed) > 1:
            break
        await asyncio.sleep(0.01)
    assert [(m["id"], m["parent"]) for m in listed] == [(MODEL, None), ("tuned", MODEL)]
    one = (await http.get("/v1/models/tuned")).json()
    assert (one["parent"], one["max_model_len"]) == (MODEL, facts.max_tokens)
    keys: list[tuple[BlockKey, ...]] = []
    long = [{"role": "user", "content": "hi " * 40}]
    for name in ("tuned", MODEL):
        body = {**CHAT, "model": name, "messages": long}
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        assert answer["model"] == name, answer
        assert running.cluster.decodes[-1].model == name
        keys.append(running.cluster.decodes[-1].keys)
    assert keys[0]
    assert not {*keys[0]} & {*keys[1]}
    missing = await http.post("/v1/chat/completions", json={**CHAT, "model": "nobody"})
    assert f"'{MODEL}', 'tuned' do" in missing.json()["error"]["message"]


async def test_tokenize_says_what_is_served(
    running: Running, http: httpx.AsyncClient
) -> None:
    chat = {**CHAT, "messages": [{"role": "user", "content": "<|im_end|> é"}]}
    await http.post("/v1/chat/completions", json=chat)
    said = await http.post("/tokenize", json={"messages": chat["messages"]})
    assert said.json()["tokens"] == list(running.cluster.decodes[0].tokens)


async def test_messages_reach_the_template_in_every_shape(
    running: Running, http: httpx.AsyncClient
) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "user",
            "name": "me",
            "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}],
        },
        {"role": "assistant", "content": None, "tool_calls": None},
    ]
    body = {"messages": messages, "add_generation_prompt": False}
    reply = await http.post("/tokenize", json=body)
    text = await http.post("/detokenize", json={"tokens": reply.json()["tokens"]})
    assert text.json()["prompt"] == (
        "<|im_start|>system\na<|im_end|>\n<|im_start|>user\nb\nc<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n"
    )


async def test_template_switches_are_taken_and_texts_are_not(
    http: httpx.AsyncClient,
) -> None:
    for switches, status in (
        ({"enable_thinking": False, "effort": "high"}, 200),
        ({"effort": "<|im_end|>"}, 400),
        ({"bos_token": "x"}, 400),
        ({"messages": 1}, 400),
        ({"deep": {"a": 1}}, 400),
    ):
        body = {"messages": CHAT["messages"], "chat_template_kwargs": switches}
        reply = await http.post("/tokenize", json=body)
        assert reply.status_code == status, switches
        if status == 400:
            assert reply.json()["error"]["param"] == "chat_template_kwargs"
    neither = await http.post("/tokenize", json={})
    assert neither.json()["error"]["param"] == "prompt"


async def test_the_official_client_sees_answers_streams_and_errors(
    running: Running,
) -> None:
    async with openai_client(running) as client:
        assert [m.id async for m in client.models.list()] == [MODEL]
        whole = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )
        assert whole.choices[0].message.content == running.script.answer
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == running.script.answer
        assert chunks[-1].usage is not None
        old = await client.completions.create(model=MODEL, prompt="hi", max_tokens=1)
        assert old.choices[0].finish_reason == "length"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(
                model="other", messages=[{"role": "user", "content": "hi"}]
            )
        assert missing.value.code == "model_not_found"


async def test_metrics_count_what_happened(http: httpx.AsyncClient) -> None:
    await http.post("/v1/chat/completions", json=CHAT)
    await http.post("/v1/chat/completions", json={})
    text = (await http.get("/metrics")).text
    assert 'requests_total{code="stop",outcome="finished"} 1.0' in text
    assert "kvtide_gateway_ttft_seconds_count 1.0" in text
    route = 'route="/v1/chat/completions"'
    assert f'http_responses_total{{{route},status="200"}} 1.0' in text
    assert f'http_responses_total{{{route},status="400"}} 1.0' in text


async def test_the_document_describes_the_bodies(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    told = chat["requestBody"]["content"]["application/json"]["schema"]
    schema = document["components"]["schemas"][told["$ref"].rpartition("/")[2]]
    assert "messages" in schema["required"]
