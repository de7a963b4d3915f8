"""A plugin of pytest for runs in several processes: `-p tests.side_by_side -n 3`."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

_ANSWERS = ("test_e2e_oracle.py", "test_engine_demo_model.py")


class SideBySide(LoadScopeScheduling):
    """What may run side by side.

    The tests of a file share its fixtures. Those of the whole system share the machine,
    as many at once would only wait for one another: those that compare answers with the
    oracle's are one half of them, all others, with the faults, the other.
    """

    def _split_scope(self, nodeid: str) -> str:
        folder, _, file = nodeid.partition("::")[0].rpartition("/")
        if folder.endswith(("e2e", "chaos")):
            return "answers" if file in _ANSWERS else "systems"
        return f"{folder}/{file}"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> SideBySide:
    """Of each run with several processes."""
    return SideBySide(config, log)
