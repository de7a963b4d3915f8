"""Pages of an engine's tensors, through a real pool into another engine's."""

from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from tests.integration.cluster import Cluster, wait_for
from tests.integration.connect_world import ENGINE, settings

from kvtide.connect import EngineClient
from kvtide.connect.page_mover import Finished, PageMover
from kvtide.connect.pages import Pages
from kvtide.connect.prefix_plan import Claim, Move, Task
from kvtide.connect.space_book import SpaceBook

pytestmark = [pytest.mark.full, pytest.mark.timeout(120)]
ME, OTHER = Claim("me"), Claim("me", "an adapter")
NAMES = tuple(b"name %d" % i for i in range(6))


class Engine:
    """Three layers of sixteen pages, and a mover."""

    def __init__(self, cluster: Cluster) -> None:
        limits = {"load_timeout_s": 5.0, "save_timeout_s": 5.0}
        self.client = EngineClient(settings(cluster, **limits))
        self.layers = [torch.zeros(16, 2, 8, 32) for _ in range(3)]
        pages = Pages(self.layers, torch.uint8)
        book = SpaceBook(self.client, [ENGINE], [pages.shape])
        self.mover = PageMover(self.client, [pages], book)
        self.book = book
        wait_for(lambda: self.client.takes_blocks, "the engine found its store")

    def compute(self) -> None:
        for i, layer in enumerate(self.layers):
            layer.normal_(generator=torch.Generator().manual_seed(i))

    def hits(self, claim: Claim = ME) -> int:
        return self.client.exists(self.book.space(0, claim).keys(NAMES))

    def loaded(self, *tasks: Task) -> Finished:
        for task in tasks:
            self.mover.load(task)
        done = Finished()

        def over() -> bool:
            now = self.mover.finished()
            done.requests.update(now.requests)
            done.failed.update(now.failed)
            done.bad_blocks.update(now.bad_blocks)
            return len(done.requests) == len(tasks)

        wait_for(over, "all loads are over")
        return done

    def close(self) -> None:
        self.mover.close()
        self.client.close()


def task(request: str, *blocks: int, claim: Claim = ME) -> Task:
    return Task(request, claim, (Move(0, blocks, NAMES[: len(blocks)]),))


@pytest.fixture
def engines(tmp_path: Path) -> Generator[tuple[Engine, Engine]]:
    with Cluster(tmp_path, prefill=0, decode=0) as cluster:
        cluster.wait_ready()
        one, two = Engine(cluster), Engine(cluster)
        yield one, two
        one.close()
        two.close()


def test_pages_move_to_other_places_and_what_is_not_there_is_said(
    engines: tuple[Engine, Engine],
) -> None:
    one, two = engines
    one.compute()
    one.mover.save([task("a", 1, 2, 3), task("same prefix", 1, 2)])
    assert one.client.flush(10.0)
    assert one.client.counts().saved_blocks == 3
    wait_for(lambda: two.hits() == 3, "the blocks are known")
    assert two.hits(OTHER) == 0
    done = two.loaded(
        task("b", 9, 8, 7), task("c", 4, 5, 6, 10), task("d", 11, claim=OTHER)
    )
    assert done.requests == {"b", "c", "d"}
    assert done.failed == {"c", "d"}
    assert done.bad_blocks == {10, 11}
    for mine, theirs in zip(one.layers, two.layers, strict=True):
        for source, target in ((1, 9), (2, 8), (3, 7), (1, 4), (2, 5), (3, 6)):
            assert torch.equal(mine[source], theirs[target])
        assert not theirs[10:].any()
        assert not theirs[:4].any()
