"""Memory, disks and the database fail or are spoilt, under load."""

import functools
import random
import shutil
import time
from collections.abc import Sequence

import pytest
from tests.chaos.link import CLEAR, SILENT, Weather
from tests.chaos.load import Ledger
from tests.chaos.records import rows
from tests.chaos.rounds import disturbed
from tests.chaos.site import ChaosSite
from tests.chaos.spoil import fill, flip
from tests.e2e.fault_rounds import Question
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.system import wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

GONE_S = 15.0
FLIPS_S = 20.0
FLIPS_EACH = 4
AT_ONCE = 4


def test_bits_flip_in_memory(site: ChaosSite, asked: Sequence[Question]) -> None:
    chance = random.Random(10)  # noqa: S311 - to do it again
    done = f"bits flipped in blocks in both arenas, {FLIPS_S:.0f} s"
    with disturbed(site, asked, "F10", done) as it:
        before = site.counted("kvtide_pool_bad_copies_total")
        end_s = time.monotonic() + FLIPS_S
        while time.monotonic() < end_s:
            for host in range(2):
                for file in site.cluster.shm_dir(host).rglob("*"):
                    if file.is_file() and file.stat().st_size:
                        it.did(flip(file, chance, FLIPS_EACH))
            time.sleep(1.0)
        it.load.answered(4)
        bad = site.counted("kvtide_pool_bad_copies_total") - before
        it.saw(f"{it.times} blocks spoilt, {bad:.0f} found when they were to be read")
        assert bad > 0, "nobody ever read one"
    assert it.times > 20


def left_memory(site: ChaosSite) -> int:
    """Blocks that went from an arena, to the disk or for good."""
    names = ("kvtide_store_evicted_total", "kvtide_store_ssd_demoted_total")
    return int(sum(site.counted(name) for name in names))


def test_slots_are_used_again(site: ChaosSite, asked: Sequence[Question]) -> None:
    """The arenas are too small for the prompts: each read may find another block."""
    with disturbed(site, asked, "F11", "arenas smaller than what is asked for") as it:
        before = left_memory(site)
        it.load.answered(2 * len(asked))
        it.did(left_memory(site) - before)
        it.saw(f"{it.times} blocks left memory")
        assert it.times > 0


def test_memory_is_full(site: ChaosSite, asked: Sequence[Question]) -> None:
    """The file system in memory of a host has not a page left, for a while."""
    filler = site.cluster.memory(1) / "filler"
    with disturbed(
        site, asked, "F26", "a host's /dev/shm filled to the last page"
    ) as it:
        fill(filler)
        it.did()
        it.load.answered(8)
        site.kill("store-1")
        fill(filler)  # with what it gave back
        site.restart("store-1")
        assert site.cluster["store-1"].wait(60) != 0
        assert "does not fit" in site.cluster.tail(site.cluster["store-1"])
        it.saw("served on; a store that started then said that it has no room")
        it.load.answered(4)
        filler.unlink()
        site.restart("store-1")


def is_ill(site: ChaosSite) -> bool:
    """Whether a host's store says that of its disk.

    The load's prompts may be on it already: new ones are asked, so there is to write,
    and so many at once that both hosts get some.
    """
    if site.loads("store")["store-1"]["ssd_state"] != "ready":
        return True
    starts = random.SystemRandom().sample(range(100_000, 100_000_000), AT_ONCE)
    prompts = [text_tokens(site.tokenize, 200, start) for start in starts]
    site.each([functools.partial(site.complete, prompt, 1) for prompt in prompts])
    return False


@pytest.mark.parametrize("calls", ["write", "read write"])
def test_a_disk_fails(site: ChaosSite, asked: Sequence[Question], calls: str) -> None:
    done = f"EIO of every {' and '.join(calls.split())} (and fsync) of a host's disk"
    control = site.behind(1) / ".fail"
    with disturbed(site, asked, "F13", done) as it:
        wait_for(
            lambda: site.loads("store")["store-1"]["ssd_blocks"] > 0, 60, "blocks there"
        )
        control.write_text(calls)
        it.did()
        wait_for(lambda: is_ill(site), 90, "the store says that its disk is ill", 0.5)
        reason = site.loads("store")["store-1"]["ssd_reason"]
        it.saw(f"the store said: {reason.rpartition(': ')[2]}")
        it.load.answered(4)
        control.unlink()
        # a disk that failed is not trusted until the store starts anew
        site.kill("store-1")
        site.restart("store-1")


def demoted(site: ChaosSite) -> float:
    return site.cluster["store-1"].metrics()["kvtide_store_ssd_demoted_total"]


def on_disk(site: ChaosSite) -> str:
    """What a host's store says of its disk, and how much room that has."""
    free = shutil.disk_usage(site.behind(1)).free
    load = site.loads("store")["store-1"]
    told = {name: value for name, value in load.items() if name.startswith("ssd")}
    return f"{free} bytes free; {told}; {demoted(site):.0f} demoted"


def test_a_disk_is_full(site: ChaosSite, asked: Sequence[Question]) -> None:
    """It takes no more and is read on; with room again it is written again."""
    filler = site.behind(1) / "filler"
    with disturbed(site, asked, "F13", "a host's disk filled to the last page") as it:
        wait_for(
            lambda: site.loads("store")["store-1"]["ssd_blocks"] > 0, 60, "blocks there"
        )
        told: list[str] = []

        def is_full() -> bool:
            fill(filler)  # also what the store gives back
            if is_ill(site):
                told.append(site.loads("store")["store-1"]["ssd_reason"])
            return bool(told) and "space" in told[-1]

        try:
            wait_for(is_full, 180, "the store says that its disk is full", 0.3)
        except AssertionError as error:
            raise AssertionError(f"{error}; {told}; {on_disk(site)}") from error
        it.did()
        it.saw(f"the store said: {told[-1].rpartition(': ')[2]}")
        fill(filler)
        it.load.answered(6)
        filler.unlink()
        wait_for(lambda: not is_ill(site), 120, "the store writes again", 0.5)
        before = demoted(site)
        wait_for(
            lambda: not is_ill(site) and demoted(site) > before,
            120,
            "blocks go to the disk again",
            0.3,
        )
        it.saw("written again when there was room")


def recorded(site: ChaosSite, before: int, load: Ledger) -> None:
    """Wait until requests are written down again."""
    wait_for(
        lambda: rows(site) > before, 60, f"rows after {before}; {load.seen()}", 0.5
    )


@pytest.mark.parametrize("how", ["killed", "silent", "slow"])
def test_the_database_goes(
    site: ChaosSite, asked: Sequence[Question], how: str
) -> None:
    done = {
        "killed": f"PostgreSQL killed, back after {GONE_S:.0f} s",
        "silent": f"links to PostgreSQL silent for {GONE_S:.0f} s",
        "slow": f"each answer of PostgreSQL 5 s late, {GONE_S:.0f} s",
    }[how]
    with disturbed(site, asked, "F12", done) as it:
        began_s = time.monotonic()
        if how == "killed":
            site.postgres.kill()
        else:
            site.to_postgres.set(SILENT if how == "silent" else Weather(delay_s=5.0))
        it.did()
        it.load.answered(4)
        time.sleep(max(0.0, began_s + GONE_S - time.monotonic()))
        if how == "killed":
            site.postgres.restart()
        else:
            site.to_postgres.set(CLEAR)
        before = rows(site)
        it.load.answered(2)
        recorded(site, before, it.load)
        it.saw("served on; requests were written down again afterwards")
