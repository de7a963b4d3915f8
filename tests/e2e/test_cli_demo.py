"""``kvtide demo`` plays unattended, holds its claims and leaves nothing."""

import subprocess
import sys

import pytest
from tests.e2e.system import shared_memory, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.full
def test_the_demo_holds_what_it_claims() -> None:
    before = shared_memory()
    done = subprocess.run(
        [sys.executable, "-m", "kvtide.cli", "demo"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=580,
        check=False,
    )
    text = done.stdout.decode()
    assert done.returncode == 0, text + done.stderr.decode()
    assert "7 of 7 claims held" in text
    assert "broken" not in text
    # what other tests have there goes with them
    new = shared_memory() - before
    wait_for(lambda: not new & shared_memory(), 60, "nothing is left in shared memory")
