"""Two hosts that a network joins, or does not, under load: the kernel's, not ours."""

import time
from collections.abc import Iterator, Sequence

import pytest
from tests.chaos.conftest import asked_of, running
from tests.chaos.load import Allowed
from tests.chaos.namespaces import ApartSite
from tests.chaos.rounds import disturbed
from tests.chaos.test_chaos_network import each_exact
from tests.e2e.fault_rounds import Question
from tests.e2e.system import wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

PARTED_S = 20.0
CUT_OFF_S = 20.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApartSite]:
    """In place of the site of all other rounds; the answers are of the same model."""
    yield from running(ApartSite(tmp_path_factory.mktemp("apart") / "site"))


@pytest.fixture(scope="module")
def asked(site: ApartSite, pytestconfig: pytest.Config) -> Sequence[Question]:
    return asked_of(site, pytestconfig)


def all_is_exact(site: ApartSite) -> None:
    wait_for(lambda: site.all_seen() and each_exact(site), 120, "indexes are exact")


def test_hosts_are_parted(site: ApartSite, asked: Sequence[Question]) -> None:
    """Neither reaches the other; both hear of it over NATS and serve on."""
    done = f"network namespaces as hosts: parted from one another, {PARTED_S:.0f} s"
    with disturbed(site, asked, "F7", done) as it:
        assert site.network.reaches(0, 2)
        before = [site.network.packets(host) for host in (0, 1)]
        site.network.part()
        it.did()
        began_s = time.monotonic()
        assert not site.network.reaches(0, 2)
        assert site.network.reaches(0, 0)
        it.load.answered(4)
        time.sleep(max(0.0, began_s + PARTED_S - time.monotonic()))
        site.network.heal()
        assert site.network.reaches(1, 1)
        it.load.answered(2)
        all_is_exact(site)
        now = [site.network.packets(host) for host in (0, 1)]
        sent = sum(now) - sum(before)
        it.saw(f"served on; {sent} packets to both hosts in all")


def test_a_host_is_cut_off(site: ApartSite, asked: Sequence[Question]) -> None:
    """Its link is down: whoever asks its gateway hears nothing, the other serves on."""
    allowed = Allowed(errors=("500", "502", "503"), broken=True)
    done = f"network namespaces as hosts: the link of one down, {CUT_OFF_S:.0f} s"
    with disturbed(site, asked, "F7", done, allowed) as it:
        lives = site.epochs()
        site.network.cut_off(1)
        it.did()
        began_s = time.monotonic()
        assert not site.network.reaches(1, 0)
        wait_for(
            lambda: not site.loads("store").get("store-1"), 60, "it is taken for gone"
        )
        finished = sum(e.finished and e.gateway == 0 for e in it.load.entries)
        wait_for(
            lambda: (
                sum(e.finished and e.gateway == 0 for e in it.load.entries)
                >= finished + 2
            ),
            240,
            f"the other host serves; {it.load.seen()}",
        )
        time.sleep(max(0.0, began_s + CUT_OFF_S - time.monotonic()))
        site.network.heal()
        wait_for(site.ready, 150, "all are ready again")
        all_is_exact(site)
        it.load.answered(2)
        back = sum(site.epochs()[name] > epoch for name, epoch in lives.items())
        it.saw(f"the other host served on; {back} nodes began a new life")
