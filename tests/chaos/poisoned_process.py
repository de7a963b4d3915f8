"""A role that dies of one prompt, as one does whose native code fails.

``python poisoned_process.py ROLE SETTINGS_JSON``, as ``cluster_process.py``.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from kvtide.engine.runner import Chunk, Runner

POISON = 49_000
"""A token that no other prompt of these tests has."""
_step = Runner.step


def poisoned_step(
    self: Runner,
    chunks: Sequence[Chunk],
    on_layer: Callable[[int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> list[Tensor | None]:
    """A step with the token kills the process before it has computed anything."""
    if any(POISON in chunk.tokens for chunk in chunks):
        os.kill(os.getpid(), signal.SIGKILL)
    return _step(self, chunks, on_layer, cancelled)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.integration.cluster_process import run_role

    Runner.step = poisoned_step
    run_role(sys.argv[1], sys.argv[2])
