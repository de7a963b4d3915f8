"""The connectors' client against a real NATS server and a real store process."""

import time
from collections.abc import Generator
from pathlib import Path

import pytest
from tests.integration.cluster import Cluster, wait_for
from tests.integration.connect_world import (
    SHAPE,
    content,
    engine,
    joined,
    names,
)

STORE = {"store": {"dram_bytes": 32 << 20, "slab_bytes": 1 << 20}}


@pytest.fixture
def cluster(tmp_path: Path) -> Generator[Cluster]:
    with Cluster(tmp_path, prefill=0, decode=0, settings=STORE) as made:
        made.wait_ready()
        yield made


def test_what_one_engine_saved_another_loads_after_the_first_is_gone(
    cluster: Cluster,
) -> None:
    chain = names(40)
    first, second = joined(cluster), joined(cluster)
    try:
        assert first.hits(chain) == 0
        assert first.save(chain) == 40
        assert first.client.flush(10.0)
        assert first.client.counts().saved_blocks == 40
        second.sees(chain)
        assert second.hits([*chain, b"more"]) == 40
        # what is there is not written again
        assert second.save(chain) == 40
        assert second.client.counts().present_blocks == 40
        assert second.client.pin(second.space.keys(chain), 60.0) == 40
        first.client.close()
        assert second.load(chain) == [content(name) for name in chain]
        assert second.load([*chain[:2], b"never"])[2] is None
        counts = second.client.counts()
        assert (counts.loaded_blocks, counts.missed_blocks) == (42, 1)
        assert counts.loaded_bytes == 42 * SHAPE.nbytes
    finally:
        first.client.close()
        second.client.close()
    assert first.hits(chain) == 0


def test_without_kvtide_everything_is_a_quick_miss(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, prefill=0, decode=0)
    cluster.state_dir.mkdir(parents=True)
    (cluster.state_dir / "secret").write_text("ab" * 32)
    cluster.shm_dir().mkdir()
    cluster.nats.port = 9  # nobody listens there
    lonely = engine(cluster)
    try:
        started_s = time.monotonic()  # noqa: TID251 - a real client
        assert lonely.hits(names(3)) == 0
        assert lonely.save(names(3)) == 0
        assert lonely.load(names(3)) == [None] * 3
        assert lonely.client.pin(lonely.space.keys(names(3)), 1.0) == 0
        took_s = time.monotonic() - started_s  # noqa: TID251 - a real client
        assert took_s < 20.0
        counts = lonely.client.counts()
        assert (counts.refused_blocks, counts.missed_blocks) == (3, 3)
    finally:
        lonely.client.close()
        cluster.shm_dir().rmdir()


@pytest.mark.full
@pytest.mark.timeout(120)
def test_nats_may_go_and_come_back(cluster: Cluster) -> None:
    chain = names(8)
    first, second = joined(cluster), joined(cluster)
    try:
        first.save(chain)
        second.sees(chain)
        cluster.nats.kill()
        # reads go past the bus; saves need it and give up in time
        assert second.load(chain) == [content(name) for name in chain]
        started_s = time.monotonic()  # noqa: TID251 - a real client
        assert second.save(names(2, 100), limit_s=0.5) == 0
        took_s = time.monotonic() - started_s  # noqa: TID251 - a real client
        assert took_s < 5.0
        cluster.nats.start()
        wait_for(lambda: second.save(names(2, 200)) == 2, "saves work again", 60.0)
        assert second.client.flush(10.0)
        first.sees(names(2, 200))
    finally:
        first.client.close()
        second.client.close()


@pytest.mark.full
@pytest.mark.timeout(120)
def test_nats_may_say_nothing(cluster: Cluster) -> None:
    one = joined(cluster)
    try:
        cluster.nats.pause()
        started_s = time.monotonic()  # noqa: TID251 - a real client
        assert one.save(names(2), limit_s=0.3) == 0
        took_s = time.monotonic() - started_s  # noqa: TID251 - a real client
        assert took_s < 3.0
        assert one.client.counts().timeouts + one.client.counts().away >= 1
        cluster.nats.resume()
        wait_for(lambda: one.save(names(2, 10)) == 2, "saves work again", 60.0)
    finally:
        cluster.nats.resume()
        one.client.close()


@pytest.mark.full
@pytest.mark.timeout(120)
def test_the_store_may_be_killed_and_come_back_empty(cluster: Cluster) -> None:
    chain = names(8)
    one = joined(cluster)
    try:
        one.save(chain)
        one.sees(chain)
        cluster.kill("store-0")
        started_s = time.monotonic()  # noqa: TID251 - a real client
        # its memory may still be mapped: the right bytes, or a miss, in time
        for name, had in zip(chain, one.load(chain, limit_s=0.5), strict=True):
            assert had in (None, content(name))
        one.save(names(2, 50), limit_s=0.5)
        took_s = time.monotonic() - started_s  # noqa: TID251 - a real client
        assert took_s < 10.0
        wait_for(lambda: one.known(chain) == 0, "its blocks are forgotten", 30.0)
        cluster.restart("store-0")
        wait_for(lambda: one.save(chain) == 8, "the new store takes blocks", 60.0)
        one.sees(chain)
        assert one.load(chain) == [content(name) for name in chain]
    finally:
        one.client.close()


@pytest.mark.full
@pytest.mark.timeout(120)
def test_a_store_that_hangs_costs_the_limit_once(cluster: Cluster) -> None:
    one = joined(cluster)
    try:
        cluster.pause("store-0")
        started_s = time.monotonic()  # noqa: TID251 - a real client
        saved = [one.save(names(2, 10 * i), limit_s=0.3) for i in range(20)]
        took_s = time.monotonic() - started_s  # noqa: TID251 - a real client
        assert saved == [0] * 20
        assert took_s < 10.0
        cluster.resume("store-0")
        wait_for(lambda: one.save(names(2, 900)) == 2, "it takes blocks again", 60.0)
    finally:
        cluster.resume("store-0")
        one.client.close()


@pytest.mark.full
@pytest.mark.timeout(120)
def test_a_pool_without_room_drops_the_coldest_and_says_so(cluster: Cluster) -> None:
    one = joined(cluster)
    try:
        for first in range(0, 2000, 100):
            one.save(names(100, first))
            assert one.client.flush(20.0)
        recent = names(100, 1900)
        one.sees(recent)
        assert one.load(recent) == [content(name) for name in recent]
        # 32 MiB hold a thousand of them: the first are gone, or rightly there
        for name, had in zip(names(20), one.load(names(20)), strict=True):
            assert had in (None, content(name))
        assert one.hits(names(20)) < 20
    finally:
        one.client.close()


@pytest.mark.full
@pytest.mark.timeout(120)
def test_bytes_that_rot_in_the_pool_are_a_miss(cluster: Cluster) -> None:
    chain = names(4)
    one = joined(cluster)
    try:
        one.save(chain)
        one.sees(chain)
        marks = [content(name)[:4096] for name in chain]
        spoilt = 0
        for path in cluster.shm_dir().rglob("*"):
            if not path.is_file():
                continue
            data = path.read_bytes()
            at = data.find(marks[1])
            if at >= 0:
                with path.open("r+b") as file:
                    file.seek(at + 100)
                    file.write(b"rotten")
                spoilt += 1
        assert spoilt == 1
        expected = [content(name) for name in chain]
        had = one.load(chain)
        assert had[1] is None
        assert [had[0], *had[2:]] == [expected[0], *expected[2:]]
        wait_for(lambda: one.known(chain) == 1, "the bad copy is reported and dropped")
    finally:
        one.client.close()
