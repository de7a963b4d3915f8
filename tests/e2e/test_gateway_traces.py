"""One trace over all processes of a cluster on two hosts: HTTP, bus, transfer frames."""

from pathlib import Path

import pytest
from tests.e2e.system import Client
from tests.e2e.trace_checks import check_trace, traced_answer
from tests.integration.cluster import Cluster
from tests.integration.otlp_receiver import OtlpReceiver, chain

from kvtide.engine.demo import default_cache_dir, ensure_demo_model

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]


def test_a_trace_crosses_hosts_to_the_store_that_is_read(tmp_path: Path) -> None:
    model = str(ensure_demo_model(default_cache_dir()))
    with OtlpReceiver() as receiver:
        traced = {"otlp": receiver.url}
        worker = {**traced, "model": model, "threads": 1}
        settings = {
            "store": traced,
            "conductor": traced,
            "prefill": worker,
            "decode": worker,
            "gateway": {**traced, "model": model},
        }
        with Cluster(
            tmp_path / "c",
            prefill=1,
            decode=0,
            conductors=1,
            gateways=1,
            hosts=2,
            settings=settings,
        ) as cluster:
            cluster.add("decode", 1)
            cluster.wait_ready()
            client = Client(cluster["gateway-0"].http_url)
            prompt = [100 + i for i in range(200)]
            served = {"kvtide-store: transfer read": 1}
            spans = traced_answer(client, receiver, prompt, **served)
            client.close()
    check_trace(spans)
    reads = [span for span in spans.values() if span.name == "transfer read"]
    # the store's own span is part of decode's read, which is part of prefill's chunk
    chains = [chain(spans, span)[-3:] for span in reads]
    end = ["kvtide-decode: transfer", "kvtide-store: transfer read"]
    assert ["kvtide-decode: decode.readparts", *end] in chains
    assert {span.facts["kvtide.node"] for span in reads} == {"decode-1"}
