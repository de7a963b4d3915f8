"""Clocks that are wrong, orderly ends, more requests than there is room for, poison."""

import functools
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.chaos.load import TOKENS, Allowed, Ledger, judge
from tests.chaos.poisoned_process import POISON
from tests.chaos.rounds import disturbed, noted, oracle_of
from tests.chaos.site import ChaosSite
from tests.chaos.truth import wait_true
from tests.chaos.watch import resident_mib
from tests.e2e.fault_rounds import Question
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.system import RequestError, wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

HOUR_S = 3600
CROWD = 40
CROWD_S = 20.0
POISONED = Path(__file__).with_name("poisoned_process.py")
SHIM = Path(__file__).with_name("wrong_clock.c")
END_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that adds what a file says to the wall clock of who loads it."""
    made = tmp_path_factory.mktemp("clock") / "wrong_clock.so"
    words = ["gcc", "-shared", "-fPIC", "-O1", str(SHIM), "-o", str(made), "-ldl"]
    try:
        subprocess.run(words, check=True, capture_output=True)
    except OSError:
        pytest.skip("there is no gcc")
    return made


def hours_off(site: ChaosSite, name: str) -> int:
    """How far the wall clock of a process is from ours, as its log tells."""
    *_, last = site.cluster[name].log.read_text().splitlines()
    told = datetime.fromisoformat(json.loads(last)["timestamp"])
    return round((told - datetime.now(UTC)).total_seconds() / HOUR_S)


def test_wall_clocks_differ_and_step_back(
    site: ChaosSite, asked: Sequence[Question], shim: Path, tmp_path: Path
) -> None:
    """One host an hour ahead, the other an hour behind; then each jumps."""
    names = site.names
    allowed = Allowed(errors=("503",), unreached=True)
    done = "wall clocks an hour ahead on one host, behind on the other; then exchanged"
    with disturbed(site, asked, "F17", done, allowed) as it:
        for number in (0, 1):
            offset = tmp_path / f"offset-{number}"
            offset.write_text(str(HOUR_S if number else -HOUR_S))
            for name in names:
                if name.endswith(str(number)):
                    environment = {
                        "LD_PRELOAD": str(shim),
                        "WRONG_CLOCK_FILE": str(offset),
                    }
                    begin_anew(site, name, environment)
            wait_for(site.ready, 150, "the host is back")
        it.did()
        it.load.answered(4)
        for number in (0, 1):
            (tmp_path / f"offset-{number}").write_text(
                str(-HOUR_S if number else HOUR_S)
            )
        it.did()
        it.load.answered(6)
        off = {hours_off(site, name) for name in names}
        assert {-1, 1} <= off, off
        for name in names:
            begin_anew(site, name, {})


def begin_anew(site: ChaosSite, name: str, environment: dict[str, str]) -> None:
    """Kill and start it; a gateway ends in an orderly way, and is soon back."""
    if name.startswith("gateway"):
        site.cluster[name].send(signal.SIGTERM)
        assert site.cluster[name].wait(END_LIMIT_S) == 0
    else:
        site.kill(name)
    site.restart(name, environment)


def test_each_role_is_replaced_in_an_orderly_way(
    site: ChaosSite, asked: Sequence[Question]
) -> None:
    """A rolling restart: no request that was begun fails.

    A gateway that closes refuses others; until its next life nobody is at its port.
    """
    done = "SIGTERM of each process in turn, started again when it has ended"
    allowed = Allowed(errors=("503",), unreached=True)
    with disturbed(site, asked, "F27", done, allowed) as it:
        for name in site.names:
            before = len(it.load.entries)
            begun = [e for e in it.load.entries[:before] if e.ended_s is None]
            os.kill(site.cluster[name].pid, signal.SIGTERM)
            assert site.cluster[name].wait(END_LIMIT_S) == 0, name
            it.did()
            site.restart(name)
            wait_for(site.ready, 150, f"{name} is back")
            asked_then = (*begun, *it.load.entries[before:])
            failed = [e for e in asked_then if e.ends and not e.finished]
            # whoever is in a gateway's drain is answered, others are told to come again
            if name.startswith("gateway"):
                failed = [e for e in failed if e.ids]
            assert not failed, (name, [e.ends for e in failed])
            if not name.startswith("gateway"):
                it.load.answered(1)
        it.saw("each ended with 0")


def tokens_per_s(load: Ledger) -> float:
    """Of answers that were finished, from the first request to the last end."""
    began_s = min(e.began_s for e in load.entries)
    ended_s = max(e.ended_s or e.began_s for e in load.entries)
    return sum(len(e.ids) for e in load.entries if e.finished) / (ended_s - began_s)


def ttfts_ms(load: Ledger) -> list[float]:
    """Of answers that were finished and streamed."""
    return [
        1000 * (e.first_s - e.began_s)
        for e in load.entries
        if e.finished and e.streams and e.first_s is not None
    ]


def test_ten_times_too_many(site: ChaosSite, asked: Sequence[Question]) -> None:
    """What can't be begun in time is refused at once and told when to come again.

    The target is what takes twice as long as with as many clients as can be served.
    """
    done = f"{CROWD} clients at a time, ten times as many as before, with a target"
    with noted("F16", done) as it:
        pids = {
            n: site.cluster[n].pid for n in site.names if "gateway" in n or "cond" in n
        }
        with Ledger(site, asked, CROWD // 10, leavers=False) as calm:
            time.sleep(CROWD_S)
        target_ms = round(2 * statistics.median(ttfts_ms(calm)))
        before = {name: resident_mib(pid) for name, pid in pids.items()}
        with Ledger(site, asked, CROWD, leavers=False, ttft_ms=target_ms) as load:
            time.sleep(CROWD_S)
        oracle = functools.partial(oracle_of, site.model_folder)
        assert judge(load.entries, Allowed(errors=("429", "503")), oracle) == []
        refused = [e for e in load.entries if e.ends and not e.finished]
        assert all(e.retry_after for e in refused if not e.ids)
        assert not any(e.ids for e in refused), "refused after it was begun"
        site.wait_whole()
        wait_true(site)
        grown = max(resident_mib(pid) - before[name] for name, pid in pids.items())
        assert grown < 64, "memory is flat"
        took_ms = ttfts_ms(load)
        in_time = sum(took < target_ms for took in took_ms)
        begun = f"{in_time} of {len(took_ms)} streams began within {target_ms} ms"
        it.saw(
            f"{load.seen()}; {begun}, the median was {statistics.median(took_ms):.0f} ms"
        )
        it.saw(
            f"{tokens_per_s(load):.0f} tokens/s, {tokens_per_s(calm):.0f} with a tenth"
        )
        it.saw(f"at most {grown:.0f} MiB more")
        it.did(len(refused))


@pytest.mark.parametrize("dies", ["prefill", "decode"])
def test_a_prompt_that_its_workers_die_of(
    site: ChaosSite, asked: Sequence[Question], dies: str
) -> None:
    """It is given up after two attempts, refused from then on; the rest serves on.

    Decode may die of it too, which computes what its prefill did not get done.
    """
    done = f"a prompt of which a worker dies in {dies}, all of them alike"
    with noted("F28", done) as it:
        prompt = text_tokens(site.tokenize, 90, 76_000 if dies == "prefill" else 76_500)
        # prefill leaves the last token of a prompt to decode
        prompt[60 if dies == "prefill" else -1] = POISON
        workers = [
            name for name in site.names if name.startswith(("prefill", "decode"))
        ]
        with running(site, workers, POISONED):
            with pytest.raises(RequestError) as ended:
                site.complete(prompt, 8)
            assert ended.value.status == 500
            assert "2 workers died with this request" in ended.value.body
            dead = [name for name in workers if not site.cluster[name].alive]
            assert len(dead) in (2, 4), dead
            for name in dead:
                site.restart(name)
            site.wait_whole()
            given_up(site, prompt, asked[0])
            assert all(site.cluster[name].alive for name in workers)
        site.wait_whole()
        wait_true(site)
        it.did(len(dead))
        it.saw(f"{' and '.join(dead)} died; {ended.value.status}, then refused")


@contextmanager
def running(site: ChaosSite, names: Sequence[str], script: Path) -> Generator[None]:
    """These processes run another script meanwhile."""
    usual = {name: site.cluster[name].script for name in names}

    def run(scripts: Mapping[str, Path]) -> None:
        for name, path in scripts.items():
            if site.cluster[name].alive:
                site.kill(name)
            site.cluster[name].script = path
            site.restart(name)
        site.wait_whole()

    try:
        run(dict.fromkeys(names, script))
        yield
    finally:
        run(usual)


def given_up(site: ChaosSite, prompt: Sequence[int], question: Question) -> None:
    """The like of it is refused, and others are answered."""
    with pytest.raises(RequestError) as refused:
        site.complete(prompt, 4)
    assert refused.value.status == 500
    assert "request_quarantined" in refused.value.body
    answer = site.complete(question.prompt, TOKENS, ignore_eos=True)
    assert answer.ids == question.answer


def test_a_prompt_whose_workers_are_killed_as_it_goes_on(
    site: ChaosSite, asked: Sequence[Question]
) -> None:
    """It is given up after three, though it got tokens in between."""
    with noted("F28", "each decode worker that runs one prompt killed") as it:
        prompt = text_tokens(site.tokenize, 90, 77_000)
        killed: list[str] = []
        ends: list[str] = []
        while not ends and len(killed) < 5:
            killed += _killed_by(site, prompt, ends)
        assert len(killed) == 3, (killed, ends)
        assert ends
        for name in killed:
            if not site.cluster[name].alive:
                site.restart(name)
        wait_for(site.ready, 150, "the workers are back")
        given_up(site, prompt, asked[0])
        site.wait_whole()
        wait_true(site)
        it.did(len(killed))
        it.saw(f"ended with {ends[0][:60]}, then refused")


def _killed_by(site: ChaosSite, prompt: Sequence[int], ends: list[str]) -> list[str]:
    """Ask; kill whoever decodes it whenever a token comes from a new worker."""
    killed: list[str] = []
    seen = 0
    try:
        # long enough that it is still being made when its worker is looked for
        for event in site.stream(prompt, 800, ignore_eos=True):
            seen += sum(len(c.get("token_ids") or ()) for c in event["choices"])
            if seen > 2 * (len(killed) + 1) and len(killed) < 3:
                name = _decoding(site)
                site.kill(name)
                killed.append(name)
                other = "decode-1" if name == "decode-0" else "decode-0"
                if not site.cluster[other].alive:
                    site.restart(other)
    except RequestError as error:
        ends.append(f"{error.status}: {error.body}")
    return killed


def _decoding(site: ChaosSite) -> str:
    """The decode worker that has a sequence."""

    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        for name, load in site.loads("decode").items():
            if load.get("running") and site.cluster[name].alive:
                return name
    raise AssertionError("nobody decodes")
