"""Clients whose links are slow, held up or cut, who vanish, take nothing or leave."""

import threading
import time
from collections.abc import Callable, Sequence

import pytest
from tests.chaos.leaver import Leaver, long_body
from tests.chaos.link import CLEAR, Link, Weather, weather
from tests.chaos.load import Allowed
from tests.chaos.records import outcomes
from tests.chaos.rounds import disturbed
from tests.chaos.site import CLIENT_STALL_S, ChaosSite
from tests.chaos.watch import descriptors, resident_mib
from tests.e2e.fault_rounds import Question
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.system import wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

BROKEN = Allowed(broken=True)
"""To whoever's link is cut an answer that breaks off is all there can be."""
SLOW_S = 20.0
HELD_S = 8.0
CUTS = 3
LEFT_LIMIT_S = 180.0
VANISH = 2
IDLE_READERS = 2
CHOICES = 4
"""So many answers in a stream: some ten KiB a step."""
MOST_GROWN_MIB = 32
MOST_MORE_SOCKETS = 12
"""What the load itself, NATS and the transfers may open meanwhile."""
LIKELIEST = 20


def to_gateways(site: ChaosSite) -> list[Link]:
    return [*site.cluster.to_gateway.values()]


def are_left(site: ChaosSite, clients: Sequence[Leaver], answers: int = 1) -> bool:
    """Whether each client's answers are written down as given up, for it had gone."""
    wanted = ["cancelled"] * answers
    return all(outcomes(site, client.name) == wanted for client in clients)


def written_as_left(
    site: ChaosSite, clients: Sequence[Leaver], answers: int = 1
) -> None:
    wait_for(
        lambda: are_left(site, clients, answers),
        LEFT_LIMIT_S,
        f"each is written down as left; {[outcomes(site, c.name) for c in clients]}",
        0.5,
    )


def heavy_body(site: ChaosSite, number: int) -> dict[str, object]:
    """A stream that fills what lies between a gateway and its client in some steps."""
    many = {"logprobs": LIKELIEST, "n": CHOICES, "temperature": 0.7}
    return long_body(site, prompt_of(site, number), **many)


def heavy_streams(site: ChaosSite, link: Link, count: int, first: int) -> list[Leaver]:
    """Clients that have heard a little each, with little room on their way."""
    link.narrow = True
    clients = [Leaver(link.port) for _ in range(count)]
    for number, client in enumerate(clients, first):
        client.ask(heavy_body(site, number))
    for client in clients:
        client.hear(2)
    link.narrow = False
    return clients


def prompt_of(site: ChaosSite, number: int) -> list[int]:
    return text_tokens(site.tokenize, 70 + 13 * (number % 20), 31_000 + 97 * number)


def test_clients_are_far_away(site: ChaosSite, asked: Sequence[Question]) -> None:
    done = f"200 ms more on the links between clients and gateways, {SLOW_S:.0f} s"
    with (
        disturbed(site, asked, "F14", done) as it,
        weather(to_gateways(site), Weather(delay_s=0.2)),
    ):
        it.did()
        began_s = time.monotonic()
        it.load.answered(4)
        time.sleep(max(0.0, began_s + SLOW_S - time.monotonic()))


def test_answers_are_held_up(site: ChaosSite, asked: Sequence[Question]) -> None:
    """All of them come late and whole: nobody is taken for gone."""
    done = f"answers held back on their way to clients, {HELD_S:.0f} s, three times"
    with disturbed(site, asked, "F15", done) as it:
        for _ in range(3):
            with weather(to_gateways(site), Weather(hold_down=True)):
                it.did()
                time.sleep(HELD_S)
            it.load.answered(2)


def test_links_to_clients_are_cut(site: ChaosSite, asked: Sequence[Question]) -> None:
    """In mid-stream, again and again: each is counted, and nothing is held for it."""
    done = "the links between clients and gateways cut in mid-stream"
    with disturbed(site, asked, "F15", done, BROKEN) as it:
        for number in range(CUTS):
            clients: list[Leaver] = []
            for at, link in enumerate(to_gateways(site)):
                with Leaver(link.port) as client:
                    clients.append(client)
                    client.ask(long_body(site, prompt_of(site, 2 * number + at)))
                    client.hear(3)
                    link.cut()
                    client.broken_off()
                it.did()
            written_as_left(site, clients)
            for link in to_gateways(site):
                link.set(CLEAR)
            it.load.answered(2)
        it.saw("each stream of ours was written down as left")


def test_clients_vanish(site: ChaosSite, asked: Sequence[Question]) -> None:
    """No FIN and no reset ever comes: only what they don't take tells of it."""
    link = site.cluster.to_gateway["gateway-1"]
    pid = site.cluster["gateway-1"].pid
    done = "all clients of a gateway vanish without a word, long streams among them"
    with disturbed(site, asked, "F15", done, BROKEN) as it:
        sockets = descriptors(pid)
        clients = heavy_streams(site, link, VANISH, 20)
        it.did(link.vanish())
        for client in clients:
            client.leave(abruptly=True)
        written_as_left(site, clients, CHOICES)
        it.load.answered(2)
        wait_for(
            lambda: descriptors(pid) <= sockets + MOST_MORE_SOCKETS,
            60,
            "their connections are closed",
        )
        it.saw(f"{VANISH} long streams were written down as left, all sockets closed")
        link.set(CLEAR)


def test_clients_take_nothing(site: ChaosSite, asked: Sequence[Question]) -> None:
    """Their answers wait for them in bounded memory, and they are cut off in time."""
    link = site.cluster.to_gateway["gateway-0"]
    pid = site.cluster["gateway-0"].pid
    done = f"long answers that clients take nothing of, {CLIENT_STALL_S:.0f} s is the limit"
    with disturbed(site, asked, "F15", done, BROKEN) as it:
        size_mib = resident_mib(pid)
        clients = heavy_streams(site, link, IDLE_READERS, 30)
        it.did(len(clients))
        link.set(Weather(unread=True))
        grown_mib = 0.0
        deadline_s = time.monotonic() + LEFT_LIMIT_S
        while not are_left(site, clients, CHOICES):
            grown_mib = max(grown_mib, resident_mib(pid) - size_mib)
            assert time.monotonic() < deadline_s, "they are never cut off"
            time.sleep(0.3)
        link.set(CLEAR)
        for client in clients:
            client.broken_off()
            client.leave(abruptly=False)
        assert grown_mib < MOST_GROWN_MIB
        it.saw(f"each was cut off; the gateway had at most {grown_mib:.0f} MiB more")


def sends_half(client: Leaver, body: dict[str, object]) -> None:
    client.ask(body, share=0.5)


def asks_only(client: Leaver, body: dict[str, object]) -> None:
    client.ask(body)


def waits(client: Leaver, body: dict[str, object]) -> None:
    client.ask({**body, "stream": False})
    time.sleep(1.0)


def hears_one(client: Leaver, body: dict[str, object]) -> None:
    client.ask(body)
    client.hear(1)


def hears_some(client: Leaver, body: dict[str, object]) -> None:
    client.ask(body)
    client.hear(12)


def hears_of_four(client: Leaver, body: dict[str, object]) -> None:
    client.ask({**body, "n": 4, "temperature": 0.7})
    client.hear(2)


Stage = Callable[[Leaver, dict[str, object]], None]
STAGES: tuple[Stage, ...] = (
    *(sends_half, asks_only, waits),
    *(hears_one, hears_some, hears_of_four),
)


def test_a_burst_of_leavers(site: ChaosSite, asked: Sequence[Question]) -> None:
    """At every stage of a request, by FIN and by reset, of both gateways, at once."""
    done = "clients that leave at six stages of a request, at once"
    failed: list[BaseException] = []
    came: list[tuple[Stage, Leaver]] = []

    def come_and_go(number: int) -> None:
        link = to_gateways(site)[number % 2]
        try:
            with Leaver(link.port) as client:
                stage = STAGES[number // 4]
                came.append((stage, client))
                stage(client, long_body(site, prompt_of(site, 40 + number)))
                client.leave(abruptly=number // 2 % 2 == 1)
        except (OSError, AssertionError) as error:
            failed.append(error)

    with disturbed(site, asked, "F15", done) as it:
        leavers = [
            threading.Thread(target=come_and_go, args=(number,))
            for number in range(4 * len(STAGES))
        ]
        for each in leavers:
            each.start()
        for each in leavers:
            each.join(2 * LEFT_LIMIT_S)
        assert not failed, failed
        it.did(len(leavers))
        of = {stage: [c for s, c in came if s is stage] for stage in STAGES}
        written_as_left(site, [*of[waits], *of[hears_one], *of[hears_some]])
        written_as_left(site, of[hears_of_four], answers=4)
        for client in of[asks_only]:  # it may have gone before anybody read it
            assert outcomes(site, client.name) in ([], ["cancelled"])
        assert not any(outcomes(site, client.name) for client in of[sends_half])
        it.saw("each that had begun was written down as left")
