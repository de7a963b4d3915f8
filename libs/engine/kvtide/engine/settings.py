"""The environment that torch's thread pool reads before torch is imported."""

import os
from collections.abc import Mapping


def openmp_environment(threads: int | None) -> Mapping[str, str]:
    """The process environment, changed so that torch's threads wait passively.

    Spinning threads of several workers on the same cores cost ten times. OpenMP reads
    these variables when torch is imported, so they must be set for the process that is
    started: pass the result as its environment. `threads=None` leaves the count open.
    """
    changed = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    if threads is not None:
        changed["OMP_NUM_THREADS"] = str(threads)
    return changed
