"""What a request's trace must look like, wherever its workers are."""

from tests.e2e.system import Client, wait_for
from tests.integration.otlp_receiver import OtlpReceiver, SeenSpan, chain, missing

ROOT = "kvtide-gateway: POST /v1/completions"
PARENT = "11" * 16, "22" * 8
CHUNK = [
    *(ROOT, "kvtide-gateway: prefill_work", "kvtide-prefill: prefill_work"),
    *("kvtide-prefill: prefill", "kvtide-prefill: prefill.chunk"),
]
WANTED = {
    ROOT: 1,
    "kvtide-gateway: admit": 1,
    "kvtide-conductor: admit": 1,
    **dict.fromkeys(CHUNK, 1),
    "kvtide-prefill: prefill.queue": 1,
    "kvtide-prefill: prefill.begin": 1,
    "kvtide-store: put_begin": 1,
    "kvtide-decode: decode": 1,
    "kvtide-decode: decode.queue": 1,
    "kvtide-decode: decode.first_step": 1,
    "kvtide-decode: decode.readparts": 1,
    "kvtide-decode: transfer": 1,
}


def traced_answer(
    client: Client, receiver: OtlpReceiver, prompt: list[int], **more: int
) -> dict[str, SeenSpan]:
    """Ask as part of a client's own trace; its spans, once all that must come came."""
    trace, parent = PARENT
    headers = {"traceparent": f"00-{trace}-{parent}-01"}
    body = {"model": client.model, "prompt": prompt, "max_tokens": 4, "stream": True}
    response = client.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200
    wanted = {**WANTED, **more}
    wait_for(
        lambda: not missing(receiver.trace(trace), wanted),
        60,
        "all spans of the request",
    )
    return receiver.trace(trace)


def check_trace(spans: dict[str, SeenSpan]) -> None:
    """One trace, from the client's span through the bus to chunks and transfers."""

    def of(service: str, name: str) -> list[SeenSpan]:
        return [
            span
            for span in spans.values()
            if (span.service, span.name) == (f"kvtide-{service}", name)
        ]

    (root,) = of("gateway", "POST /v1/completions")
    assert root.parent == PARENT[1]
    assert root.facts["kvtide.status"] == 200
    assert root.marks == ("first bytes of the answer",)
    # every span is part of the request, and none is of another
    strays = [s.name for s in spans.values() if chain(spans, s)[0] != ROOT]
    assert strays == []
    (admission,) = of("conductor", "admit")
    assert chain(spans, admission) == [
        ROOT,
        "kvtide-gateway: admit",
        "kvtide-conductor: admit",
    ]
    (asked,) = of("gateway", "admit")
    assert asked.facts["kvtide.reply"] == "placed"
    chunks = sorted(of("prefill", "prefill.chunk"), key=lambda s: s.start_ns)
    assert all(chain(spans, chunk) == CHUNK for chunk in chunks)
    # chunks are the whole prompt, one after the other
    assert [chunk.facts["kvtide.start"] for chunk in chunks] == [
        0,
        *(chunk.facts["kvtide.end"] for chunk in chunks[:-1]),
    ]
    # hand-over is a read of what a chunk has made
    pulls = of("decode", "decode.readparts")
    assert any(
        chain(spans, s) == [*CHUNK, "kvtide-decode: decode.readparts"] for s in pulls
    )
    (queue,) = of("decode", "decode.queue")
    (first,) = of("decode", "decode.first_step")
    assert queue.end_ns <= first.start_ns < first.end_ns <= root.end_ns
