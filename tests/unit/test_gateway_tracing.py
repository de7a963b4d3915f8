"""Spans: who is whose parent, what is recorded, and that off is off."""

from collections.abc import Generator
from contextlib import suppress

import pytest
from hypothesis import given, strategies as st
from tests.integration.otlp_receiver import OtlpReceiver

from kvtide.kv import RequestId, RequestRef
from kvtide.runtime.otlp import OtlpTracer
from kvtide.runtime.settings import RoleSettings
from kvtide.runtime.tracer_opening import open_tracer
from kvtide.runtime.tracing import NO_SPAN, NO_TRACES, TRACE, recorded
from kvtide.worker.spans import MOST_OPEN, RequestSpans

REF = RequestRef(RequestId("r"), 1)
OUTSIDE = f"00-{'1' * 32}-{'2' * 16}"


@pytest.fixture
def receiver() -> Generator[OtlpReceiver]:
    with OtlpReceiver() as running:
        yield running


def tracer_to(url: str, share: float = 1.0) -> OtlpTracer:
    return OtlpTracer(url, service="s", node="n", cluster="c", share=share)


async def test_without_the_setting_nothing_is_made() -> None:
    async with open_tracer(RoleSettings(node="n"), "s") as tracer:
        assert tracer is NO_TRACES
    with tracer.span("a") as span:
        assert span is NO_SPAN is tracer.root("b", f"{OUTSIDE}-01")
        assert TRACE.get() == ""
    spans = RequestSpans(tracer, "prefill")
    spans.arrived(REF)
    spans.began(REF, "chunk")
    assert (len(spans), spans.trace(REF)) == (0, "")


async def test_spans_say_whose_they_are_and_how_they_ended(
    receiver: OtlpReceiver,
) -> None:
    settings = RoleSettings(node="n", otlp=receiver.url)
    async with open_tracer(settings, "kvtide-x") as tracer:
        root = tracer.root("asked", "")
        with suppress(KeyError), root:
            assert TRACE.get() == recorded(root.trace) == root.trace
            with tracer.span("inner", facts=3):
                pass
            assert TRACE.get() == root.trace
            raise KeyError("what a client has sent")
        assert TRACE.get() == ""
        assert tracer.span("of nothing") is NO_SPAN
    asked, inner = sorted(receiver.spans(), key=lambda span: span.start_ns)
    assert (inner.parent, inner.trace) == (asked.id, asked.trace)
    assert inner.facts == {"kvtide.facts": 3}
    assert (asked.error, asked.parent, asked.node) == ("KeyError", "", "n")
    assert asked.service == "kvtide-x"


def test_a_clients_flag_decides_for_its_own(receiver: OtlpReceiver) -> None:
    never, always = tracer_to(receiver.url, 0.0), tracer_to(receiver.url)
    never.root("wanted", f"{OUTSIDE}-01").end()
    assert never.root("not chosen", "") is NO_SPAN
    assert always.root("unwanted", f"{OUTSIDE}-00") is NO_SPAN
    for nonsense in (
        "x",
        f"{OUTSIDE}-01-extra",
        f"00-{'0' * 32}-{'2' * 16}-01",
        "-" * 55,
    ):
        always.root("new", nonsense).end()
    never.close()
    always.close()
    spans = receiver.spans()
    assert [span.name for span in spans].count("new") == 4
    assert [s.parent for s in spans if s.name == "wanted"] == ["2" * 16]
    assert {s.parent for s in spans if s.name == "new"} == {""}


@given(st.text(max_size=60) | st.from_regex(r"\A00-[0-9a-f]{32}-[0-9a-f]{16}-..\Z"))
def test_only_recorded_traces_pass(trace: str) -> None:
    if recorded(trace):
        _, ids, span, flags = trace.split("-")
        assert int(ids, 16)
        assert int(span, 16)
        assert int(flags, 16) & 1
        assert recorded(trace) == trace


def test_a_dead_collector_holds_nobody_up() -> None:
    tracer = tracer_to("http://127.0.0.1:1")
    tracer.root("lost", "").end()
    tracer.close()  # within the test's own limit of time


def test_requests_of_a_worker_have_stages_and_end(receiver: OtlpReceiver) -> None:
    tracer = tracer_to(receiver.url)
    spans = RequestSpans(tracer, "prefill")
    spans.arrived(REF)  # of no trace
    assert len(spans) == 0
    with tracer.root("asked", ""):
        spans.arrived(REF)
        spans.arrived(REF)
        others = [RequestRef(RequestId(f"o{i}"), 1) for i in range(MOST_OPEN)]
        assert spans.first([REF], "queue") == [REF]
        assert spans.first([REF], "queue") == []
    own = spans.trace(REF)
    spans.over(REF, "queue")
    spans.began(REF, "chunk", start=0)
    spans.began(REF, "chunk", start=1)
    assert spans.trace(REF) != own
    with spans.operation(REF, "load"):
        assert recorded(TRACE.get())
    spans.ended(REF, "gone", tokens=2)
    spans.ended(REF)
    assert spans.operation(REF, "load") is NO_SPAN
    with tracer.root("more", ""):
        for ref in [*others, REF]:
            spans.arrived(ref)
    assert len(spans) == MOST_OPEN
    tracer.close()
    seen = {span.name: span for span in receiver.spans() if "o" not in span.facts}
    chunk, load = seen["prefill.chunk"], seen["prefill.load"]
    assert chunk.parent == load.parent
    assert chunk.facts == {"kvtide.start": 0}
    assert chunk.error == "gone"
