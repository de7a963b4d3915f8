"""What clients get wrong: an error object that names the field, and life goes on."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog.testing
from tests.integration.gateway_cluster import MODEL, Running, running_gateway

from kvtide.bus.messages import RefuseCode, RejectCode
from kvtide.kv import NAME_CHARS

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "hi"}


@pytest.fixture
async def running(tmp_path: Path) -> AsyncGenerator[Running]:
    async with running_gateway(tmp_path, max_body_bytes=65536) as running:
        yield running


@pytest.fixture
async def http(running: Running) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, timeout=20) as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert response.headers["x-request-id"]
    return error


def _schema(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


BAD_FIELDS: list[tuple[str, object, str]] = [
    ("temperature", -0.1, "temperature"),
    ("temperature", 2.1, "temperature"),
    ("temperature", "0.5", "temperature"),
    ("temperature", True, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.5, "top_p"),
    ("top_k", -2, "top_k"),
    ("top_k", 1.5, "top_k"),
    ("min_p", 2, "min_p"),
    ("seed", 2**64, "seed"),
    ("seed", "x", "seed"),
    ("n", 0, "n"),
    ("n", 17, "n"),
    ("n", 10**6, "n"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -5, "max_tokens"),
    ("max_tokens", 10**9, "max_tokens"),
    ("max_tokens", 10**30, "max_tokens"),
    ("max_tokens", 2.5, "max_tokens"),
    ("min_tokens", -1, "min_tokens"),
    ("min_tokens", 600, "min_tokens"),
    ("stop", "", "stop"),
    ("stop", ["a"] * 10000, "stop"),
    ("stop", ["a" * 1000], "stop"),
    ("stop", [1], "stop"),
    ("stop_token_ids", [-1], "stop_token_ids[0]"),
    ("stop_token_ids", list(range(100)), "stop_token_ids"),
    ("stream", "yes", "stream"),
    ("stream_options", [], "stream_options"),
    ("user", 5, "user"),
    ("model", 5, "model"),
    ("logprobs", "yes", "logprobs"),
    ("logprobs", 21, "logprobs"),
    ("top_logprobs", 5, "top_logprobs"),
    ("logit_bias", {"401": 1}, "logit_bias"),
    ("logit_bias", {"x": 1}, "logit_bias"),
    ("logit_bias", {"5": 101}, "logit_bias"),
    ("logit_bias", {"5": "1"}, "logit_bias"),
    ("logit_bias", [5], "logit_bias"),
    ("presence_penalty", 2.5, "presence_penalty"),
    ("frequency_penalty", -2.5, "frequency_penalty"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("best_of", 2, "best_of"),
    ("tool_choice", "required", "tool_choice"),
    ("response_format", {"type": "xml"}, "response_format"),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
    ("response_format", _schema({"type": "nope"}), "response_format"),
    ("response_format", _schema({"not": {}}), "response_format"),
    ("response_format", _schema({"$ref": "#/nowhere"}), "response_format"),
    ("response_format", _schema(5), "response_format.json_schema.schema"),
    ("guided_json", "{", "guided_json"),
    ("guided_json", 5, "guided_json"),
    ("guided_json", "[" * 2000, "guided_json"),
    ("guided_json", '{"a":' * 2000, "guided_json"),
    ("guided_json", '{"const": 1e999}', "guided_json"),
    ("structured_outputs", {"json": "[" * 60_000}, "structured_outputs.json"),
    ("guided_regex", "(", "guided_regex"),
    ("guided_regex", "(?=a)b", "guided_regex"),
    ("guided_grammar", "start: nowhere", "guided_grammar"),
    ("guided_choice", [], "guided_choice"),
    ("guided_choice", [""], "guided_choice[0]"),
    ("structured_outputs", {"regex": "("}, "structured_outputs.regex"),
    ("structured_outputs", {"regex": "a", "json": {}}, "structured_outputs.regex"),
    (
        "structured_outputs",
        {"structural_tag": "{}"},
        "structured_outputs.structural_tag",
    ),
    ("suffix", "x", "suffix"),
    ("chat_template", "{{ 1 }}", "chat_template"),
    ("cache_salt", "", "cache_salt"),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_bad_field_is_named(http: httpx.AsyncClient, path: str) -> None:
    good = CHAT if path.endswith("chat/completions") else TEXT
    for field, value, param in BAD_FIELDS:
        response = await http.post(path, json={**good, field: value})
        assert response.status_code == 400, (field, value, response.text)
        error = error_of(response)
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
    assert (await http.post(path, json=good)).status_code == 200


BAD_MESSAGES: list[tuple[object, str]] = [
    ([], "messages"),
    ("hi", "messages"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "king", "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        "messages[0].content[0].image_url",
    ),
    ([{"role": "user", "content": "x " * 600}], "messages"),
    ([{"role": "user", "content": "x" * 60000}], "messages"),
]


def _tool(**changes: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **changes}}


BAD_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [_tool(name="")]}, "tools[0].function.name"),
    ({"tools": [_tool(parameters=5)]}, "tools[0].function.parameters"),
    ({"tools": [_tool(), _tool()]}, "tools[1].name"),
    ({"tools": [_tool()] * 129}, "tools"),
    ({"tools": [_tool(parameters={"not": {}}, strict=True)]}, "tools[0]"),
    ({"tools": [_tool()], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [_tool()], "tool_choice": _tool(name="g")}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [_tool()], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"continue_final_message": True}, "continue_final_message"),
]


async def test_bad_tools_are_named(http: httpx.AsyncClient) -> None:
    for fields, param in BAD_TOOLS:
        response = await http.post("/v1/chat/completions", json={**CHAT, **fields})
        assert response.status_code == 400, (fields, response.text)
        assert error_of(response)["param"] == param, fields


async def test_echo_with_logprobs_is_refused(http: httpx.AsyncClient) -> None:
    body = {**TEXT, "echo": True, "logprobs": 0}
    response = await http.post("/v1/completions", json=body)
    assert (response.status_code, error_of(response)["param"]) == (400, "echo")


async def test_bad_messages_are_named(http: httpx.AsyncClient) -> None:
    for messages, param in BAD_MESSAGES:
        body = {"model": MODEL, "messages": messages}
        response = await http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400, (messages, response.text)
        assert error_of(response)["param"] == param


BAD_PROMPTS: list[tuple[object, str]] = [
    ("", "prompt"),
    ([], "prompt"),
    ([[]], "prompt"),
    ([1, "a"], "prompt"),
    ([401], "prompt"),
    ([-1], "prompt[0]"),
    ([1] * 512, "prompt"),
    ([[1]] * 17, "prompt"),
    (None, "prompt"),
    ({"a": 1}, "prompt"),
]


async def test_bad_prompts_are_named(http: httpx.AsyncClient) -> None:
    for prompt, param in BAD_PROMPTS:
        body = {"model": MODEL, "prompt": prompt}
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 400, (prompt, response.text)
        assert error_of(response)["param"] == param


TURN = b'"messages": [{"role": "user", "content": "x"}]'
NO_REQUESTS = {
    "empty": b"",
    "open": b"{",
    "array": b"[]",
    "null": b"null",
    "string": b'"x"',
    "not UTF-8": b"\xff\xfe",
    "not UTF-8 inside": b'{"model": "\xff"}',
    "lone surrogate": b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "deep arrays": b'{"model": "tiny", "messages": '
    + b"[" * 30000
    + b"]" * 30000
    + b"}",
    "deep objects": b'{"x": ' + b'{"a":' * 9000 + b"1" + b"}" * 9000 + b"}",
    "NaN": b'{"model": "tiny", "temperature": NaN, ' + TURN + b"}",
    "infinite": b'{"model": "tiny", "temperature": 1e999, ' + TURN + b"}",
}


async def test_what_is_no_request_is_a_400(http: httpx.AsyncClient) -> None:
    for name, body in NO_REQUESTS.items():
        for path in ("/v1/chat/completions", "/v1/completions", "/detokenize"):
            response = await http.post(path, content=body)
            assert response.status_code == 400, (name, path, response.text)
            error_of(response)
        good = await http.post("/v1/chat/completions", json=CHAT)
        assert good.status_code == 200


async def test_unknown_paths_methods_and_models(http: httpx.AsyncClient) -> None:
    assert error_of(await http.get("/nothing"))["code"] == "not_found"
    wrong = await http.get("/v1/chat/completions")
    assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")
    other = await http.post("/v1/completions", json={**TEXT, "model": "../x"})
    assert (other.status_code, error_of(other)["param"]) == (404, "model")
    assert error_of(other)["code"] == "model_not_found"


async def test_a_declared_body_that_is_too_large_is_not_read(running: Running) -> None:
    reader, writer = await asyncio.open_connection(*running.address)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n"
    )
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert head.startswith(b"HTTP/1.1 413")
    writer.close()


async def test_a_chunked_body_is_refused_while_it_is_sent(running: Running) -> None:
    reader, writer = await asyncio.open_connection(*running.address)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    answered = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))
    for _ in range(1000):
        if answered.done():
            break
        writer.write(chunk)
        await writer.drain()
        await asyncio.sleep(0)
    assert (await asyncio.wait_for(answered, 40)).startswith(b"HTTP/1.1 413")
    writer.close()


async def test_a_client_that_sends_first_and_reads_then_sees_the_413(
    http: httpx.AsyncClient,
) -> None:
    response = await http.post("/v1/completions", content=b" " * 20_000_000)
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"
    assert (await http.post("/v1/completions", json=TEXT)).status_code == 200


async def test_request_ids_are_kept_only_if_they_are_plain(
    http: httpx.AsyncClient,
) -> None:
    for given in ("a-b.c_1:2", "x" * 128):
        response = await http.get("/livez", headers={"x-request-id": given})
        assert response.headers["x-request-id"] == given
    for given in ("x" * 129, "a b", "é", ""):
        headers = [(b"x-request-id", given.encode())]
        response = await http.get("/livez", headers=headers)
        assert response.headers["x-request-id"] != given


async def test_one_client_id_names_two_requests_apart(
    running: Running, http: httpx.AsyncClient
) -> None:
    for _ in range(2):
        await http.post("/v1/completions", json=TEXT, headers={"x-request-id": "again"})
    first, second = [d.request for d in running.cluster.decodes]
    assert first != second
    for name in (first, second):
        given, _, unique = name.partition(".")
        assert given == "again"
        assert len(uuid.UUID(hex=unique).hex) == 32


async def test_a_name_that_is_taken_is_an_error_and_the_first_request_goes_on(
    running: Running, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.script.hold_at = 1
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=7))
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(http.post("/v1/completions", json=TEXT))
        await running.cluster.until(lambda: running.cluster.steps == 1)
        again = await http.post("/v1/completions", json={**TEXT, "n": 2})
        assert again.status_code == 500
        assert error_of(again)["code"] == "internal_error"
        running.script.go.set()
        response = await first
    assert response.json()["choices"][0]["text"] == running.script.answer
    assert len(running.cluster.decodes) == 1
    assert len(running.cluster.ended) == 1


async def test_the_longest_client_id_makes_names_that_tables_take(
    running: Running, http: httpx.AsyncClient
) -> None:
    count = running.settings.max_choices
    response = await http.post(
        "/v1/completions",
        json={**TEXT, "n": count},
        headers={"x-request-id": "x" * 128},
    )
    assert response.status_code == 200
    names = {work.request for work in running.cluster.decodes}
    assert len(names) == count
    assert max(map(len, names)) <= NAME_CHARS


REJECTIONS = [
    (RejectCode.OVERLOADED, 503, "server_is_overloaded"),
    (RejectCode.NO_WORKERS, 503, "server_is_overloaded"),
    (RejectCode.TENANT_LIMIT, 429, "rate_limit_exceeded"),
    (RejectCode.TOO_LARGE, 400, "context_length_exceeded"),
    (RejectCode.QUARANTINED, 500, "request_quarantined"),
]


async def test_rejections_have_their_status_also_for_streams(
    running: Running, http: httpx.AsyncClient
) -> None:
    for stream in (True, False):
        for code, status, name in REJECTIONS:
            running.script.reject = code
            # each its own prompt: one that is quarantined stays so for a while
            ask = {"role": "user", "content": f"{code} {stream}"}
            body = {**CHAT, "messages": [ask], "stream": stream}
            response = await http.post("/v1/chat/completions", json=body)
            assert response.status_code == status
            assert error_of(response)["code"] == name
            if status in (429, 503):
                assert response.headers["retry-after"] == "2"
                assert response.headers["retry-after-ms"] == "1500"
    assert running.cluster.decodes == []


async def test_workers_that_refuse_three_times_are_an_overload(
    running: Running, http: httpx.AsyncClient
) -> None:
    running.script.refuse = RefuseCode.BUSY
    response = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert response.status_code == 503
    assert error_of(response)["code"] == "server_is_overloaded"
    await running.cluster.until(lambda: running.cluster.running == 0)


async def test_a_bug_is_a_500_with_an_error_object(
    running: Running, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError

    name = "kvtide.gateway.served.ServedModel.encode_prompt"
    monkeypatch.setattr(name, broken)
    with structlog.testing.capture_logs() as logs:
        response = await http.post("/v1/completions", json=TEXT)
    assert [e["path"] for e in logs if e["log_level"] == "error"] == ["/v1/completions"]
    assert response.status_code == 500
    assert error_of(response)["type"] == "server_error"
