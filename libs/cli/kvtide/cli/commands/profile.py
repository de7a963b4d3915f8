"""``kvtide profile``: what workers' work was measured to cost, to seed a conductor."""

import asyncio
from pathlib import Path

from rich.console import Console

from kvtide.bus.messages import CostsKnown, CostsQuery
from kvtide.cli.access import ask_conductors, open_bus
from kvtide.runtime import KvtideError
from kvtide.runtime.settings import RoleSettings


class NothingMeasuredError(KvtideError):
    """No conductor has seen enough work to say what it costs."""


def show_profile(settings: RoleSettings, out: Path | None, *, console: Console) -> None:
    """Print, or write to ``out``, the profiles of the conductor that has seen most.

    Raises:
        NothingMeasuredError: none has seen enough.
        NoConductorError: none answers.
    """
    known = asyncio.run(_known(settings))
    best = max(known, key=lambda each: each.samples, default=None)
    if best is None or not best.profiles.strip():
        raise NothingMeasuredError(
            "nothing was measured yet: send some requests first, "
            "`kvtide bench` for instance"
        )
    if out is None:
        console.print(best.profiles, highlight=False, markup=False, end="")
        return
    out.write_text(best.profiles)
    console.print(
        f"{out}: costs fitted to {best.samples} samples; give it to conductors as "
        "profiles",
        highlight=False,
        markup=False,
    )


async def _known(settings: RoleSettings) -> list[CostsKnown]:
    async with open_bus(settings) as bus:
        answers = await ask_conductors(bus, CostsQuery())
    return [answer for answer in answers.values() if isinstance(answer, CostsKnown)]
