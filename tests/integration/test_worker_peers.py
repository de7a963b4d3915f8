"""Two prefill workers and one prompt: the second waits for what the first computes."""

from collections.abc import AsyncGenerator, Generator

import pytest
from tests.e2e.oracle.prompts import text_tokens
from tests.e2e.oracle.reference import Oracle
from tests.integration.cluster import Cluster
from tests.integration.pretended_gateway import (
    Asked,
    PretendedGateway,
    pretended_gateway,
)
from tokenizers import Tokenizer

from kvtide.engine.demo import default_cache_dir, ensure_demo_model

pytestmark = [pytest.mark.timeout(300), pytest.mark.full]

TOKENS = 1100
FIRST, SECOND = "prefill-0", "prefill-1"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster]:
    settings = {"prefill": {"chunk_tokens": 128}}
    folder = tmp_path_factory.mktemp("peers")
    with Cluster(folder, prefill=2, settings=settings) as cluster:
        cluster.wait_ready()
        yield cluster


@pytest.fixture
async def gateway(cluster: Cluster) -> AsyncGenerator[PretendedGateway]:
    async with pretended_gateway(cluster, FIRST, SECOND, "decode-0") as gateway:
        yield gateway


def prompt(first: int) -> list[int]:
    folder = ensure_demo_model(default_cache_dir())
    text = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return text_tokens(lambda part: text.encode(part).ids, TOKENS, first)


async def both(gateway: PretendedGateway, first: int) -> tuple[Asked, Asked]:
    """The same prompt for two requests; the first is being computed."""
    ids = prompt(first)
    one = await gateway.send(ids, 4, prefill=FIRST)
    await gateway.pooled(ids, 2)
    return one, await gateway.send(ids, 4, prefill=SECOND)


async def right(gateway: PretendedGateway, asked: Asked) -> int:
    """Its answer is the reference's; how many tokens were computed for it."""
    await gateway.finished(asked)
    assert (
        Oracle(ensure_demo_model(default_cache_dir()))
        .check(asked.prompt, asked.ids)
        .right
    )
    await gateway.until(asked, lambda: asked.prefill_done)
    done = asked.prefill_done
    assert done is not None
    assert done.reused_tokens + done.computed_tokens == TOKENS - 1
    return done.computed_tokens


async def test_the_second_loads_what_the_first_has_made(
    gateway: PretendedGateway,
) -> None:
    one, other = await both(gateway, 10)
    # two blocks were there already; how many more it waits for, the clock decides
    assert await right(gateway, other) < TOKENS - 1 - 2 * 64
    assert await right(gateway, one) == TOKENS - 1


async def test_when_the_first_is_cancelled_the_second_computes_the_rest(
    gateway: PretendedGateway,
) -> None:
    one, other = await both(gateway, 3000)
    await gateway.cancel(one)
    assert await right(gateway, other) > 0


async def test_when_the_first_worker_dies_the_second_computes(
    cluster: Cluster, gateway: PretendedGateway
) -> None:
    one, other = await both(gateway, 6000)
    cluster.kill(FIRST)
    assert await right(gateway, other) > 0
    gateway.open.pop(one.ref, None)
