"""Log events: their form, and what never gets into them."""

import io
import json
import logging

import pytest
import structlog

from kvtide.runtime.logs import configure_logging, request_context
from kvtide.runtime.names import random_node_name


def test_json_events_carry_node_request_and_no_secrets() -> None:
    out = io.StringIO()
    configure_logging(level="info", log_format="json", node="store-1", stream=out)
    with request_context("req-7"):
        structlog.get_logger().info(
            "placed",
            prompt="tell me a secret",
            tokens=[1, 2, 3],
            cluster_secret="abc",  # noqa: S106 - what the test is about
            url="nats://u:p4ss@h:1",
            blocks=3,
        )
    structlog.get_logger().debug("not shown")
    event = json.loads(out.getvalue())
    assert event.pop("timestamp").endswith("Z")
    assert event == {
        "event": "placed",
        "level": "info",
        "node": "store-1",
        "request": "req-7",
        "prompt": "<16>",
        "tokens": "<3>",
        "cluster_secret": "********",
        "url": "nats://u:********@h:1",
        "blocks": 3,
    }


def test_logging_of_other_libraries_has_the_same_form() -> None:
    out = io.StringIO()
    configure_logging(log_format="json", node="n", stream=out)
    logging.getLogger("elsewhere").warning("hm %d", 5)
    logging.getLogger("nats").info("chatty")
    (line,) = out.getvalue().splitlines()
    event = json.loads(line)
    assert (event["event"], event["level"], event["node"]) == ("hm 5", "warning", "n")


def test_an_exception_is_one_json_line() -> None:
    out = io.StringIO()
    configure_logging(log_format="json", stream=out)
    try:
        int("boom")
    except ValueError:
        structlog.get_logger().exception("failed", request="r")
    (line,) = out.getvalue().splitlines()
    assert "ValueError: invalid literal" in json.loads(line)["exception"]


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_passwords_in_urls_are_hidden_wherever_they_are(log_format: str) -> None:
    out = io.StringIO()
    configure_logging(log_format=log_format, stream=out)
    url = "postgresql://kv:p4ss/w0rd@db:5432/kv"
    try:
        raise OSError(f"no answer from {url}")  # noqa: TRY301 - what is logged
    except OSError:
        logging.getLogger("elsewhere").exception("can't reach %s", url)
        structlog.get_logger().exception(f"lost {url}", tried=[url], at={"url": url})
    lines = out.getvalue()
    assert "p4ss" not in lines
    assert "w0rd" not in lines
    # two messages, two tracebacks and two fields
    assert lines.count("kv:********@db:5432/kv") == 6
    if log_format == "json":
        events = [json.loads(line) for line in lines.splitlines()]
        assert all("kv:********@db" in event["exception"] for event in events)
        assert all("kv:********@db" in event["event"] for event in events)


def test_console_lines_are_for_people() -> None:
    out = io.StringIO()
    configure_logging(node="n", stream=out)
    structlog.get_logger().info("joined", role="store")
    assert "joined" in out.getvalue()
    assert "role=store" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_an_exception_shows_no_local_variables() -> None:
    out = io.StringIO()
    configure_logging(log_format="console", stream=out)
    prompt = "tell me a " + "secret"
    try:
        raise ValueError(f"{len(prompt)} characters")  # noqa: TRY301 - what is logged
    except ValueError:
        structlog.get_logger().exception("operation failed")
    assert "Traceback (most recent call last)" in out.getvalue()
    assert "16 characters" in out.getvalue()
    assert prompt not in out.getvalue()


def test_node_names_fit_a_subject() -> None:
    names = {random_node_name("decode") for _ in range(50)}
    assert len(names) > 40
    assert all(name.startswith("decode-") for name in names)
    assert all(name.replace("-", "").isalnum() for name in names)
