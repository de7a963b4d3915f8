"""What a client may do wrong, and what it may do while an answer is being made."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.system import System, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    state = tmp_path_factory.mktemp("requests") / "state"
    with System(state, "--worker", "1", "--prefill", "0", "--decode", "0") as running:
        yield running


def messages(text: str = "Hello") -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


BAD_CHATS: list[tuple[dict[str, Any], int, str | None]] = [
    ({"messages": []}, 400, "messages"),
    ({"messages": "hello"}, 400, "messages"),
    ({"messages": messages(), "max_tokens": 0}, 400, "max_tokens"),
    ({"messages": messages(), "max_tokens": 10**9}, 400, "max_tokens"),
    ({"messages": messages(), "temperature": "hot"}, 400, "temperature"),
    ({"messages": messages(), "temperature": -1}, 400, "temperature"),
    ({"messages": messages(), "top_p": 1.5}, 400, "top_p"),
    ({"messages": messages(), "stop": 7}, 400, "stop"),
    ({"messages": messages("word " * 20_000)}, 400, "messages"),
    ({"messages": messages(), "model": "no-such-model"}, 404, "model"),
    ({"messages": messages(), "model": "../../etc/passwd"}, 404, "model"),
]


@pytest.mark.parametrize(("fields", "status", "param"), BAD_CHATS)
def test_bad_input_is_named_and_the_next_request_works(
    system: System, fields: dict[str, Any], status: int, param: str | None
) -> None:
    response = system.http.post(
        "/v1/chat/completions", json={"model": system.model, **fields}
    )
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["param"] == param
    assert system.chat(messages("Hi"), 2).completion_tokens == 2


@pytest.mark.parametrize("body", [b"{", b"", b"null", b"[1]", b"\xff\xfe", b"{}"])
def test_what_is_no_request_is_refused(system: System, body: bytes) -> None:
    response = system.http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


def test_a_body_of_100_mb_is_refused(system: System) -> None:
    body = json.dumps({"model": system.model, "prompt": "x" * 100_000_000}).encode()
    with contextlib.suppress(httpx.WriteError):
        # the gateway may close while we still send; a client that reads gets the 413
        response = system.http.post("/v1/completions", content=body)
        assert response.status_code == 413, response.text
        assert response.json()["error"]["message"]
    assert system.complete("Hi", 2).completion_tokens == 2


def test_the_official_client_reads_answers_and_errors(system: System) -> None:
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none") as client:
        whole = client.chat.completions.create(
            model=system.model,
            messages=[{"role": "user", "content": "Name a colour."}],
            max_tokens=12,
            temperature=0,
        )
        chunks = client.chat.completions.create(
            model=system.model,
            messages=[{"role": "user", "content": "Name a colour."}],
            max_tokens=12,
            temperature=0,
            stream=True,
        )
        parts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(parts) == whole.choices[0].message.content
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(
                model="unknown", messages=[{"role": "user", "content": "Hi"}]
            )


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {
            "type": "array",
            "items": {"enum": ["red", "green", "blue"]},
            "minItems": 2,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_is_what_its_schema_says(system: System, temperature: float) -> None:
    answer = system.chat(
        messages("Describe a person."),
        100,
        temperature=temperature,
        seed=5,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON},
        },
    )
    person = json.loads(answer.text)

    assert answer.finish == "stop"
    assert set(person) == {"name", "age", "colours"}
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 20
    assert isinstance(person["age"], int)
    assert 0 <= person["age"] <= 150
    assert 2 <= len(person["colours"]) <= 3
    assert set(person["colours"]) <= {"red", "green", "blue"}


def test_seeded_draws_do_not_depend_on_company(system: System) -> None:
    """With penalties, biases and log-probabilities; alone, then three at a time."""
    asked: dict[str, Any] = {
        "temperature": 0.9,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "logit_bias": {"260": -100},
        "logprobs": 3,
    }
    prompts = ["Once upon a time", "The sea is", "Bread needs"]

    def body(prompt: str, seed: int) -> dict[str, Any]:
        return {
            **asked,
            "model": system.model,
            "prompt": prompt,
            "seed": seed,
            "max_tokens": 16,
        }

    def texts(bodies: list[dict[str, Any]]) -> list[str]:
        with ThreadPoolExecutor(len(bodies)) as threads:
            return list(threads.map(text, bodies))

    def text(body: dict[str, Any]) -> str:
        return told(system.post("/v1/completions", body)["choices"][0])

    def told(choice: dict[str, Any]) -> str:
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert all(len(top) in {3, 4} for top in logprobs["top_logprobs"])
        assert max(logprobs["token_logprobs"]) <= 0
        return choice["text"]

    bodies = [body(prompt, seed) for seed, prompt in enumerate(prompts)]
    alone = [texts([one])[0] for one in bodies]

    assert texts(bodies) == alone
    assert texts([body(prompts[0], 99)])[0] != alone[0]


def test_a_client_that_goes_away_frees_everything(system: System) -> None:
    prompt = text_tokens(system.tokenize, 900, 7)
    before = steps_of(system)
    with contextlib.closing(socket.create_connection(("127.0.0.1", system.port))) as s:
        body = json.dumps(
            {"model": system.model, "prompt": prompt, "max_tokens": 400, "stream": True}
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: kvtide\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        s.sendall(head.encode() + body)
        wait_for(lambda: bool(system.held()), 30, "the request is running", 0.0)
    system.wait_idle()
    # nothing goes on in secret: the engine stands still, far from the 400 tokens
    steps = steps_of(system)
    time.sleep(3.0)
    assert steps_of(system) == steps
    assert steps - before < 200
    assert system.complete("Hi", 2).completion_tokens == 2


def steps_of(system: System) -> int:
    return sum(beat["steps"] for beat in system.beats().values())
