"""Whose place a spare worker can take, of what ``kvtide up`` runs."""

import sys
from collections.abc import Sequence

from kvtide.cli.settings import own_command
from kvtide.cli.supervisor.children import ProcessSpec
from kvtide.cli.supervisor.readiness import HttpProbe
from kvtide.cli.supervisor.spare import NAME, SparePlan

WORKERS = ("decode", "prefill")


def spare_plan(specs: Sequence[ProcessSpec]) -> SparePlan | None:
    """A spare for the workers among ``specs``; None: there are none."""
    start = len(own_command())
    words = {
        spec.name: spec.argv[start:]
        for spec in specs
        if len(spec.argv) > start and spec.argv[start] in WORKERS
    }
    if not words:
        return None
    # decode first: open streams wait for it
    model = min(words.values(), key=lambda each: WORKERS.index(each[0]))
    environment: dict[str, str] = {}
    for spec in specs:
        if spec.name in words:
            environment |= spec.environment
    spec = ProcessSpec(
        name=NAME,
        argv=(sys.executable, "-m", "kvtide.cli.spare_process", *model),
        environment=environment,
        probe=HttpProbe("", 0),
        start_stage=0,
        stop_stage=0,
    )
    return SparePlan(spec, words)
