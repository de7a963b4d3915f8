"""Processes that die and stop, under load on two hosts."""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack

import pytest
from tests.chaos.leaver import Leaver, long_body
from tests.chaos.load import Allowed
from tests.chaos.rounds import disturbed, noted
from tests.chaos.site import ChaosSite
from tests.chaos.truth import wait_true
from tests.e2e.fault_rounds import Question
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.system import wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

STREAMS = 20
STOPPED_S = 30.0


def kill_and_restart(site: ChaosSite, name: str) -> None:
    site.kill(name)
    time.sleep(1.0)
    site.restart(name)
    wait_for(site.ready, 150, f"{name} is back")


def test_gateways_die(site: ChaosSite, asked: Sequence[Question]) -> None:
    allowed = Allowed(errors=("503",), broken=True)
    with disturbed(
        site, asked, "F1", "kill -9 of a gateway in mid-stream", allowed
    ) as it:
        for name in ("gateway-0", "gateway-1"):
            site.kill(name)
            it.did()
            wait_for(
                lambda name=name: not site.loads("gateway").get(name), 30, "it is gone"
            )
            it.load.answered(2)
            site.restart(name)
            wait_for(site.ready, 150, f"{name} is back")


def test_a_gateway_dies_with_many_streams(site: ChaosSite) -> None:
    """Nobody reads their answers any more: the workers let go of all of them."""
    with noted("F1", f"kill -9 of a gateway with {STREAMS} streams") as it:
        with ExitStack() as stack:
            port = site.cluster.to_gateway["gateway-0"].port
            clients = [stack.enter_context(Leaver(port)) for _ in range(STREAMS)]
            for number, client in enumerate(clients):
                prompt = text_tokens(site.tokenize, 40 + number, 60_000 + 50 * number)
                client.ask(long_body(site, prompt))
            for client in clients:
                client.hear(1)
            site.kill("gateway-0")
            it.did(STREAMS)
            site.wait_idle(*(name for name in site.names if name != "gateway-0"))
        site.restart("gateway-0")
        site.wait_whole()
        wait_true(site)
        it.saw("the workers hold nothing")


@pytest.mark.parametrize(
    ("row", "role"),
    [("F2", "conductor"), ("F3", "prefill"), ("F4", "decode"), ("F5", "store")],
)
def test_each_of_a_role_dies(
    site: ChaosSite, asked: Sequence[Question], row: str, role: str
) -> None:
    with disturbed(site, asked, row, f"kill -9 of a {role}, started again") as it:
        for number in range(2):
            it.load.answered(2)
            kill_and_restart(site, f"{role}-{number}")
            it.did()


def test_all_conductors_die(site: ChaosSite, asked: Sequence[Question]) -> None:
    allowed = Allowed(errors=("503",))
    with disturbed(
        site, asked, "F2", "kill -9 of both conductors at once", allowed
    ) as it:
        site.kill("conductor-0")
        site.kill("conductor-1")
        it.did()
        wait_for(
            lambda: any("error 503" in e.ends for e in it.load.entries[-8:]),
            60,
            f"requests are refused: {it.load.seen()}",
        )
        refused = [e for e in it.load.entries if "error 503" in e.ends]
        assert all(e.retry_after for e in refused)
        it.saw("refused with 503 and Retry-After")
        site.restart("conductor-0")
        site.restart("conductor-1")


def test_a_whole_host_stops(site: ChaosSite, asked: Sequence[Question]) -> None:
    """All roles of one host stop and wake; what they had begun is done elsewhere."""
    allowed = Allowed(errors=("503",))
    names = [f"{role}-1" for role in ("store", "conductor", "prefill", "decode")]
    done = (
        f"SIGSTOP of store, conductor, prefill and decode of a host, {STOPPED_S:.0f} s"
    )
    with disturbed(site, asked, "F6", done, allowed) as it:
        lives = site.epochs()
        site.stop(*names)
        it.did()
        began_s = time.monotonic()
        it.load.answered(4)
        time.sleep(max(0.0, began_s + STOPPED_S - time.monotonic()))
        site.go_on(*names)
        wait_for(
            lambda: all(site.epochs().get(name, 0) > lives[name] for name in names),
            120,
            "each begins a new life",
        )
        it.saw("each woke with a new epoch")


def test_a_gateway_stops(site: ChaosSite, asked: Sequence[Question]) -> None:
    done = f"SIGSTOP of a gateway, {STOPPED_S:.0f} s"
    allowed = Allowed(errors=("500", "502", "503"), broken=True)
    with disturbed(site, asked, "F6", done, allowed) as it:
        site.stop("gateway-1")
        it.did()
        time.sleep(STOPPED_S)
        held = {n: v for n, v in site.held().items() if not n.startswith("gateway")}
        it.saw(f"held by workers meanwhile for the other gateway only: {sorted(held)}")
        site.go_on("gateway-1")


def test_a_host_dies_at_once(site: ChaosSite, asked: Sequence[Question]) -> None:
    """What held its memory is gone too; its folder is swept by those that come."""
    names = [f"{role}-1" for role in ("store", "prefill", "decode", "conductor")]
    with disturbed(site, asked, "F26", "kill -9 of a host's roles at once") as it:
        before = sorted(p.name for p in site.cluster.shm_dir(1).rglob("*"))
        for name in names:
            os.kill(site.cluster[name].pid, signal.SIGKILL)
        for name in names:
            site.cluster[name].wait()
        it.did()
        it.load.answered(2)
        for name in names:
            site.restart(name)
        wait_for(site.ready, 150, "the host is back")
        after = sorted(p.name for p in site.cluster.shm_dir(1).rglob("*"))
        assert len(after) <= len(before), (before, after)
        it.saw(f"{len(before)} files in shared memory before, {len(after)} after")
