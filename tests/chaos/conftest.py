"""One site for all rounds of a run, and the questions that they ask."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import pytest
from tests.chaos.load import TOKENS, questions
from tests.chaos.model import chosen
from tests.chaos.site import ChaosSite, NoMountsError
from tests.e2e.fault_rounds import Question

AnySite = TypeVar("AnySite", bound=ChaosSite)
COUNT = 12
ANSWERS = f"chaos/answers-{chosen()}-{TOKENS}"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosSite]:
    yield from running(ChaosSite(tmp_path_factory.mktemp("chaos") / "site"))


def running(site: AnySite) -> Iterator[AnySite]:
    """Started, until it is no longer needed; skips where there can be none."""
    try:
        with site:
            yield site
    except NoMountsError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def asked(site: ChaosSite, pytestconfig: pytest.Config) -> Sequence[Question]:
    return asked_of(site, pytestconfig)


def asked_of(site: ChaosSite, config: pytest.Config) -> Sequence[Question]:
    """Asked once, in peace; later runs remember the answers.

    Were they of another build's rounding, the oracle would still allow theirs.
    """
    known = remembered(config)
    if len(known) == COUNT:
        return known
    made = questions(site, COUNT)
    if config.cache:
        lines = [[list(q.prompt), q.sampling, list(q.answer)] for q in made]
        config.cache.set(ANSWERS, lines)
    return made


Remembered = list[tuple[list[int], dict[str, Any], list[int]]]


def remembered(config: pytest.Config) -> list[Question]:
    cache = cast("Any", config.cache)
    told: Remembered = cache.get(ANSWERS, []) if cache else []
    return [Question(prompt, how, tuple(ids)) for prompt, how, ids in told]
