"""A worker of another release comes to a running cluster."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.chaos.rounds import disturbed
from tests.chaos.site import READY_LIMIT_S, ChaosSite
from tests.e2e.fault_rounds import Question
from tests.e2e.system import wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

NEWER = "tests.chaos.newer_process"
SAID = "run the same version everywhere"


def test_a_worker_of_another_version_is_refused_loudly(
    site: ChaosSite, asked: Sequence[Question], tmp_path: Path
) -> None:
    done = "a decode worker that speaks the next protocol version joins"
    settings = {
        **site.cluster["decode-1"].settings,
        "node": "decode-newer",
        "nats": site.cluster.nats.url,
        "transfer_port": 0,
        "advertise": "",
        "http_port": 0,
    }
    log = tmp_path / "newer.log"
    with disturbed(site, asked, "F25", done) as it:
        before = site.counted("kvtide_bus_dropped_total", 'reason="protocol"')
        with log.open("wb") as out:
            newer = subprocess.Popen(
                [sys.executable, "-m", NEWER, "decode", json.dumps(settings)],
                stdout=out,
                stderr=out,
                cwd=Path(__file__).parents[2],
                start_new_session=True,  # as the others: a share of the processor
            )
        try:
            wait_for(
                lambda: SAID in log.read_text(), READY_LIMIT_S, "it says what is wrong"
            )
            wait_for(
                lambda: any(
                    SAID in site.cluster[n].log.read_text() for n in site.names
                ),
                30,
                "the others say so too",
            )
            it.did()
            it.load.answered(4)
            assert "decode-newer" not in site.beats()
            dropped = site.counted("kvtide_bus_dropped_total", 'reason="protocol"')
            assert dropped > before
            it.saw(
                f"{dropped - before:.0f} of its messages dropped, both sides said why"
            )
        finally:
            newer.send_signal(signal.SIGKILL)
            newer.wait()
