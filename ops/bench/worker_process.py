# pyright: reportPrivateUsage=false
"""A worker of one role that marks when things happen, behind a link that can be slowed.

``python ops/bench/worker_process.py ROLE SETTINGS_JSON FOLDER`` runs the role as the
command line does. It appends ``WHAT MONOTONIC_SECONDS`` to ``FOLDER/ROLE.marks``: when
the last layer of a prefill step is made, and when a decode step begins. What
``FOLDER/link`` holds is the bytes a second that reads from the pool take (0: as they are).
"""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.cluster_process import run_role

from kvtide.pool import PoolClient
from kvtide.worker.mixing import StepPart


def marker(path: Path) -> Callable[[str], None]:
    """Writes a line for each thing that happens."""
    lines = path.open("a", buffering=1)

    def mark(what: str) -> None:
        lines.write(f"{what} {time.monotonic():.6f}\n")  # noqa: TID251 - one host

    return mark


def mark_prefill(mark: Callable[[str], None]) -> None:
    """Mark when a step's last layer is made, before its parts are written."""
    from kvtide.prefill.compute import StepCompute  # noqa: PLC0415

    made = StepCompute._layer_made  # noqa: SLF001

    def layer_made(self: StepCompute, layer: int) -> None:
        if layer == self._layout.layers - 1:
            mark("layer")
        made(self, layer)

    StepCompute._layer_made = layer_made  # noqa: SLF001


def mark_decode(mark: Callable[[str], None]) -> None:
    """Mark when a step begins on the engine's thread."""
    from kvtide.decode import shell  # noqa: PLC0415

    make = shell.step_part

    def step_part(*arguments: Any) -> StepPart[Any]:
        part = make(*arguments)

        def begin() -> Any:
            mark("step")
            return part.begin()

        return StepPart(begin, part.finish, part.on_layer, part.cancelled, part.alone)

    shell.step_part = step_part


def slow_link(path: Path) -> None:
    """Have each read take as long as its bytes would over a link of that speed."""
    read = PoolClient.read_blocks

    async def read_blocks(
        self: PoolClient, located: Any, *given: Any, **named: Any
    ) -> Any:
        begin_s = time.monotonic()  # noqa: TID251 - of this process alone
        outcomes = await read(self, located, *given, **named)
        speed = float(path.read_text())  # noqa: ASYNC240 - a few bytes
        if speed:
            layout, parts = given[1], named.get("parts")
            count = layout.parts if parts is None else len(parts)
            size = count * layout.part_bytes * len(located)
            spent_s = time.monotonic() - begin_s  # noqa: TID251 - as above
            await asyncio.sleep(max(0.0, size / speed - spent_s))
        return outcomes

    PoolClient.read_blocks = read_blocks


if __name__ == "__main__":
    role, folder = sys.argv[1], Path(sys.argv[3])
    if role == "prefill":
        slow_link(folder / "link")
        mark_prefill(marker(folder / "prefill.marks"))
    else:
        mark_decode(marker(folder / "decode.marks"))
    run_role(role, sys.argv[2])
