"""Links between processes that are cut, silent, one-sided, slow or wrong, under load."""

import random
import time
from collections.abc import Sequence

import pytest
from tests.chaos.link import CLEAR, SILENT, Link, Weather, rewrite, weather
from tests.chaos.load import Allowed
from tests.chaos.rounds import disturbed
from tests.chaos.shuffle import Lossy, Shuffled
from tests.chaos.site import ChaosSite
from tests.e2e.fault_rounds import Question
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.system import wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

CUT_OFF_S = 15.0
SILENT_S = 240.0
SLOW = Weather(delay_s=0.05)
UNREACHED = Allowed(errors=("503",))
LOSSY_S = 20.0
LOST = 0.3
SLEPT_S = 8.0
BAD_COPIES = "kvtide_pool_bad_copies_total"


def nats_of(site: ChaosSite, host: int) -> list[Link]:
    """The links to NATS of a host's roles, but for its gateway's."""
    return [
        link
        for name, link in site.cluster.to_nats.items()
        if name.endswith(f"-{host}") and not name.startswith("gateway")
    ]


def exact(site: ChaosSite) -> bool:
    """Whether the conductor that answers calls its index exact, of both stores."""
    status = site.status()
    stores = [
        load
        for node in status["nodes"]
        for load in node["beat"]["load"]
        if load["t"] == "store"
    ]
    return status["exact"] and len(stores) == 2


def test_nats_is_restarted(site: ChaosSite, asked: Sequence[Question]) -> None:
    done = "kill -9 of nats-server, back after 3 s"
    with disturbed(site, asked, "F7", done, UNREACHED) as it:
        for _ in range(2):
            it.load.answered(2)
            site.cluster.nats.kill()
            it.did()
            time.sleep(3.0)
            site.cluster.nats.start()
        wait_for(lambda: site.all_seen() and exact(site), 60, "the index is exact")
        it.saw("all nodes were seen again and the index was exact")


@pytest.mark.parametrize(
    ("what", "bad"),
    [
        ("both ways", SILENT),
        ("what it says", Weather(hold_up=True)),
        ("what it hears", Weather(hold_down=True)),
    ],
)
def test_a_host_is_cut_off_from_nats(
    site: ChaosSite, asked: Sequence[Question], what: str, bad: Weather
) -> None:
    done = f"a host's links to NATS silent, {what}, {CUT_OFF_S:.0f} s; all comes late"
    with disturbed(site, asked, "F7", done, UNREACHED) as it:
        with weather(nats_of(site, 1), bad):
            it.did()
            time.sleep(CUT_OFF_S)
        wait_for(lambda: site.all_seen() and exact(site), 90, "the index is exact")


def test_four_minutes_of_silence(site: ChaosSite, asked: Sequence[Question]) -> None:
    done = f"a host's links to NATS silent both ways for {SILENT_S:.0f} s"
    with disturbed(site, asked, "F7", done, UNREACHED, threads=2) as it:
        with weather(nats_of(site, 1), SILENT):
            it.did()
            time.sleep(SILENT_S)
        wait_for(lambda: site.all_seen() and exact(site), 90, "the index is exact")


def test_half_open_links_to_nats(site: ChaosSite, asked: Sequence[Question]) -> None:
    """The server has forgotten the connections; the clients have not been told."""
    done = "a host's connections to NATS half open"
    with disturbed(site, asked, "F7", done, UNREACHED) as it:
        halves = sum(link.half_open() for link in nats_of(site, 1))
        assert halves >= 4
        it.did()
        it.saw(f"{halves} connections")
        time.sleep(CUT_OFF_S)
        for link in nats_of(site, 1):
            link.set(CLEAR)


@pytest.mark.parametrize("how", ["cut", "silent", "half open"])
def test_transfers_between_hosts_fail(
    site: ChaosSite, asked: Sequence[Question], how: str
) -> None:
    links = list(site.cluster.to_transfer.values())
    with disturbed(site, asked, "F5", f"all links of transfers {how}, 10 s") as it:
        it.did()
        for link in links:
            if how == "cut":
                link.cut()
            elif how == "silent":
                link.set(SILENT)
            else:
                link.half_open()
        time.sleep(10.0)
        for link in links:
            link.set(CLEAR)


def test_bits_flip_on_the_wire(site: ChaosSite, asked: Sequence[Question]) -> None:
    links = list(site.cluster.to_transfer.values())

    def refused() -> float:
        failed = ("kvtide_transfer_errors_total", "kvtide_transfer_retries_total")
        return sum(site.counted(each, "corrupt") for each in (*failed, BAD_COPIES))

    with disturbed(site, asked, "F10", "bits flipped in transfers between hosts") as it:
        before = refused()
        with weather(links, Weather(corrupt=0.2)):
            wait_for(
                lambda: sum(link.corrupted for link in links) >= 10,
                120,
                f"bytes go between the hosts; {it.load.seen()}",
            )
            it.load.answered(4)
        flips = sum(link.corrupted for link in links)
        it.did(flips)
        found = refused() - before
        it.saw(f"{flips} bits flipped; {found:.0f} transfers or copies were refused")
        assert found > 0, "nobody saw any of them"


def test_a_slow_host(site: ChaosSite, asked: Sequence[Question]) -> None:
    links = [*nats_of(site, 1)]
    links += [link for n, link in site.cluster.to_transfer.items() if n.endswith("-1")]
    with disturbed(site, asked, "F14", "50 ms more on each link of a host, 20 s") as it:
        lives = site.epochs()
        with weather(links, SLOW):
            it.did()
            began_s = time.monotonic()
            it.load.answered(4)
            time.sleep(max(0.0, began_s + 20 - time.monotonic()))
        assert site.epochs() == lives, "taken for dead"
        it.saw("nobody was taken for dead")


def test_messages_come_twice_and_in_another_order(
    site: ChaosSite, asked: Sequence[Question]
) -> None:
    shufflers: list[Shuffled] = []

    def shuffled() -> Shuffled:
        shufflers.append(Shuffled(random.Random(len(shufflers))))  # noqa: S311
        return shufflers[-1]

    links = list(site.cluster.to_nats.values())
    done = "a tenth of the messages twice, a tenth after the next, 30 s"
    with disturbed(site, asked, "F9", done, UNREACHED) as it:
        rewrite(links, shuffled)
        began_s = time.monotonic()
        it.load.answered(4)
        time.sleep(max(0.0, began_s + 30 - time.monotonic()))
        rewrite(links, None)
        twice = sum(each.twice for each in shufflers)
        swapped = sum(each.swapped for each in shufflers)
        assert twice > 100
        assert swapped > 100
        it.did(twice + swapped)
        it.saw(f"{twice} messages twice, {swapped} swapped")


def each_exact(site: ChaosSite) -> bool:
    """Whether each conductor says that its index is exact, and both know as much."""
    told = [site.cluster[f"conductor-{number}"].metrics() for number in (0, 1)]
    blocks = {each["kvtide_conductor_indexed_blocks"] for each in told}
    return len(blocks) == 1 and all(
        each["kvtide_conductor_index_exact"] == 1 for each in told
    )


def written(site: ChaosSite) -> float:
    """How often workers have put blocks into the pool: the index changes with each."""
    return site.counted("kvtide_pool_commits_total")


def test_news_of_blocks_are_lost(site: ChaosSite, asked: Sequence[Question]) -> None:
    """As when a subscriber is too slow: gaps are seen, and the whole is pulled."""
    lossy: list[Lossy] = []

    def made() -> Lossy:
        lossy.append(Lossy(random.Random(len(lossy)), b".blocks.", LOST))  # noqa: S311
        return lossy[-1]

    names = [name for name in site.cluster.to_nats if not name.startswith("store")]
    links = [site.cluster.to_nats[name] for name in names]
    done = (
        f"{LOST:.0%} of what is said of blocks lost on its way to all, {LOSSY_S:.0f} s"
    )
    with disturbed(site, asked, "F8", done, UNREACHED) as it:
        rewrite(links, made)
        began_s = time.monotonic()
        ask_anew(site, began_s + LOSSY_S)
        it.load.answered(2)
        it.did(sum(each.lost for each in lossy))
        wait_for(lambda: each_exact(site), 60, "exact while messages are lost", 0.3)
        rewrite(links, None)
        wait_for(
            lambda: each_exact(site), 60, "both conductors' indexes are exact", 0.3
        )
        assert it.times >= 10
        it.saw("both conductors knew as many blocks and called their index exact")


def ask_anew(site: ChaosSite, end_s: float) -> None:
    """Prompts that nobody asked before, so that the pool changes all the time."""
    while time.monotonic() < end_s:
        start = random.SystemRandom().randrange(200_000, 100_000_000)
        site.complete(text_tokens(site.tokenize, 200, start), 1)


def test_a_conductor_sleeps(site: ChaosSite, asked: Sequence[Question]) -> None:
    """It is stopped while the index changes; what it missed comes late or is pulled."""
    done = (
        f"SIGSTOP of a conductor, {SLEPT_S:.0f} s, while the pool changes, three times"
    )
    with disturbed(site, asked, "F8", done, UNREACHED) as it:
        for name in ("conductor-0", "conductor-1", "conductor-0"):
            before = written(site)
            site.stop(name)
            it.did()
            ask_anew(site, time.monotonic() + SLEPT_S)
            site.go_on(name)
            assert written(site) > before, "the pool has not changed"
            wait_for(lambda: each_exact(site), 90, "both indexes are exact", 0.3)
        it.saw("both conductors knew as many blocks and called their index exact")
