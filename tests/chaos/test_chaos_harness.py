"""The harness itself: a judge that never finds anything proves nothing."""

import random
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import pytest
from tests.chaos.link import CLEAR, SILENT, Link, Links, Weather
from tests.chaos.load import TOKENS, Allowed, Entry, judge
from tests.chaos.shuffle import Lossy, Shuffled
from tests.chaos.table import kinds, written
from tests.chaos.watch import Sample, leaks
from tests.e2e.fault_rounds import Question
from tests.e2e.oracle.reference import Oracle
from tests.e2e.system import wait_for

pytestmark = pytest.mark.full

ANSWER = tuple(range(TOKENS))


def no_oracle() -> Oracle:
    pytest.fail("nobody needs to be asked")


def entry(ids: tuple[int, ...] = ANSWER, *ends: str, **fields: object) -> Entry:
    made = Entry(Question([1, 2], {}, ANSWER), 0, streams=True, began_s=0.0)
    made.ids, made.ends, made.done, made.ended_s = [*ids], [*ends], 1, 1.0
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (entry(ANSWER, "finish", ended_s=None), "never ended"),
        (entry(ANSWER, "finish", "finish"), "2 terminal answers"),
        (entry(ANSWER), "0 terminal answers"),
        (entry(ANSWER, "error 500"), "ended with error 500"),
        (entry(ANSWER, "finish", done=2), "came 2 times"),
        (entry(ANSWER[:3], broken="gone"), "broken"),
        (entry(ANSWER[:-1], "finish"), "wrong tokens"),
        (entry((1, 1), "error 503"), "wrong beginning"),
    ],
)
def test_the_judge_finds_what_is_wrong(bad: Entry, word: str) -> None:
    found = judge([bad], Allowed(errors=("503",)), no_oracle)
    assert any(word in each for each in found), found


def test_the_judge_lets_pass_what_is_right() -> None:
    allowed = Allowed(errors=("503",), broken=True)
    good = [
        entry(ANSWER, "finish"),
        entry(ANSWER[:4], "error 503"),
        entry(ANSWER[:4], broken="gone", done=0),
        entry(ANSWER[:5], left=True, done=0),
    ]
    assert judge(good, allowed, no_oracle) == []


def test_nobody_at_a_port_is_no_broken_answer() -> None:
    alone = entry((), broken="refused", unreached=True, done=0)
    cut = entry(ANSWER[:4], broken="reset", done=0)
    allowed = Allowed(unreached=True)
    assert judge([alone], allowed, no_oracle) == []
    assert judge([cut], allowed, no_oracle) != []
    assert judge([alone], Allowed(), no_oracle) != []


def life(figure: Callable[[int], float]) -> Iterator[Sample]:
    for at in range(60):
        yield Sample(at * 5.0, "store-0", 1, figure(at), 20, 8, 30)


def test_a_leak_is_found_and_a_cache_is_none() -> None:
    assert [*leaks([*life(lambda at: 100 + 10 * at)])] != []
    assert [*leaks([*life(lambda at: 100 + min(at, 20))])] == []


def test_messages_are_shuffled_and_none_is_lost() -> None:
    frames = [b"MSG a 1 %d\r\n%b\r\n" % (len(str(n)), b"%d" % n) for n in range(500)]
    stream = b"INFO {}\r\n" + b"".join(frames) + b"PING\r\n"
    shuffled, out = Shuffled(random.Random(1)), b""  # noqa: S311
    for start in range(0, len(stream), 7):
        out += shuffled.feed(stream[start : start + 7])
    said = out.split(b"\r\n")[2:-2:2]
    assert out.startswith(b"INFO {}\r\n")
    assert out.endswith(b"PING\r\n")
    assert shuffled.twice > 10
    assert shuffled.swapped > 10
    assert len(said) >= len(frames) + shuffled.twice - 1
    assert said != sorted(said, key=int)


def test_some_messages_of_a_subject_are_lost() -> None:
    frames = [b"MSG %b 1 1\r\nx\r\n" % (b"a.blocks", b"b")[n % 2] for n in range(400)]
    lossy = Lossy(random.Random(1), b".blocks", 0.3)  # noqa: S311
    out = lossy.feed(b"".join(frames))
    assert out.count(b"MSG b") == 200
    assert out.count(b"MSG a.blocks") == 200 - lossy.lost
    assert 30 < lossy.lost < 90


@pytest.fixture
def far() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def joined(link: Link, far: socket.socket) -> tuple[socket.socket, socket.socket]:
    near = socket.create_connection(("127.0.0.1", link.port), 5)
    other, _ = far.accept()
    for each in (near, other):
        each.settimeout(5)
    wait_for(lambda: link.connections > 0, 5, "the link knows of it")
    return near, other


@contextmanager
def linked(
    far: socket.socket, *, narrow: bool = False
) -> Generator[tuple[Link, socket.socket, socket.socket]]:
    """A link, and a connection over it: who connected, and who was reached."""
    with Links() as links:
        link = links.add(("127.0.0.1", far.getsockname()[1]))
        link.narrow = narrow
        near, other = joined(link, far)
        with near, other:
            yield link, near, other


def test_a_link_passes_holds_spoils_and_cuts(far: socket.socket) -> None:
    with linked(far) as (link, near, other):
        near.sendall(b"up")
        assert other.recv(9) == b"up"
        link.set(SILENT)
        near.sendall(b"held")
        other.settimeout(0.3)
        with pytest.raises(TimeoutError):
            other.recv(9)
        link.set(CLEAR)
        other.settimeout(5)
        assert other.recv(9) == b"held"
        link.set(Weather(corrupt=1.0))
        other.sendall(bytes(4000))
        got = b""
        while len(got) < 4000:
            got += near.recv(4000)
        assert any(got)
        link.cut()
        with pytest.raises(ConnectionResetError):
            near.recv(9)


def test_a_half_open_link_tells_one_end_only(far: socket.socket) -> None:
    with linked(far) as (link, near, other):
        assert link.half_open() == 1
        with pytest.raises(ConnectionResetError):
            other.recv(9)
        near.settimeout(0.3)
        near.sendall(b"who hears this?")
        with pytest.raises(TimeoutError):
            near.recv(9)
        link.set(CLEAR)
        near.settimeout(5)
        with pytest.raises(ConnectionResetError):
            near.recv(9)


def test_who_vanishes_is_not_missed_at_the_far_end(far: socket.socket) -> None:
    with linked(far, narrow=True) as (link, near, other):
        assert link.vanish() == 1
        with pytest.raises(ConnectionResetError):
            near.recv(9)
        other.settimeout(0.5)
        with pytest.raises(TimeoutError):
            other.sendall(bytes(1 << 20))
        link.set(CLEAR)
        other.settimeout(5)
        with pytest.raises(OSError, match="reset"):
            other.recv(9)


def test_what_is_unread_fills_the_way(far: socket.socket) -> None:
    with linked(far, narrow=True) as (link, near, other):
        link.set(Weather(unread=True))
        other.settimeout(0.5)
        with pytest.raises(TimeoutError):
            other.sendall(bytes(1 << 20))
        link.set(CLEAR)
        assert near.recv(9)


def test_a_link_knows_whom_nobody_heard(far: socket.socket) -> None:
    with linked(far) as (link, near, other):
        assert not link.turned_away
        for each in (near, other, far):
            each.close()
        with socket.create_connection(("127.0.0.1", link.port), 5) as alone:
            own = alone.getsockname()[1]
            with pytest.raises(ConnectionResetError):
                alone.recv(9)
        assert own in link.turned_away


def test_a_slow_link_is_late_by_so_much(far: socket.socket) -> None:
    with linked(far) as (link, near, other):
        link.set(Weather(delay_s=0.3))
        began_s = time.monotonic()
        near.sendall(b"late")
        assert other.recv(9) == b"late"
        assert time.monotonic() - began_s >= 0.3


def test_links_end_with_their_thread(far: socket.socket) -> None:
    with Links() as links:
        near, other = joined(links.add(("127.0.0.1", far.getsockname()[1])), far)
    with near, other:
        wait_for(
            lambda: not any(t.name == "links" for t in threading.enumerate()),
            5,
            "the thread ends",
        )


def test_the_table_counts_green_rounds_in_a_row() -> None:
    line = '{"row": "F2", "done": "x", "times": 2, "seen": "y", "result": "%s", "commit": "c"}'
    (kind,) = kinds([line % word for word in ("green", "red", "green", "green")])
    assert kind.line == "| F2 | x | 6 | 2 in a row (1 red before) | y | c |"
    page = "a\n<!-- made by python -m tests.chaos.table -->\nold\n<!-- end of what is made -->\nb"
    made = written(page, "new")
    assert "new" in made
    assert "old" not in made
    assert made.endswith("\nb")
