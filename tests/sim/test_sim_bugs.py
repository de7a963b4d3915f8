"""A checker that never fails proves nothing: it finds every bug that is planted."""

import pytest
from tests.sim.sim_bugs import BUGS

from kvtide.sim import drawn

SEEDS = range(1, 201)
QUICK = ("a gap in the tokens is not seen", "a lease never ends")

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.full)
        for name in BUGS
    ],
)
def test_a_planted_bug_is_found(name: str) -> None:
    with BUGS[name]():
        found = next((seed for seed in SEEDS if drawn(seed).run().violations), None)
    assert found is not None, f"{name}: no seed of {len(SEEDS)} sees it"
