"""``kvtide top``: the cluster and the newest requests, in a terminal, each second."""

import asyncio
from collections import deque

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvtide.bus.interface import Incoming
from kvtide.bus.messages import RequestEnded, StatusQuery, StatusReply
from kvtide.cli.access import NoConductorError, ask_conductor, open_bus
from kvtide.cli.commands.status import status_table, summary
from kvtide.runtime import Clock, SystemClock
from kvtide.runtime.settings import RoleSettings

SHOWN_REQUESTS = 12


def top(
    settings: RoleSettings, *, every_s: float, rounds: int, console: Console
) -> None:
    """Show until interrupted, or ``rounds`` times (0: for ever).

    Raises:
        NoNatsError: nobody answers at the start.
    """
    asyncio.run(_show(settings, every_s, rounds, console, SystemClock()))


async def _show(
    settings: RoleSettings, every_s: float, rounds: int, console: Console, clock: Clock
) -> None:
    ended: deque[RequestEnded] = deque(maxlen=SHOWN_REQUESTS)

    async def on_ended(incoming: Incoming) -> None:
        if isinstance(incoming.message, RequestEnded):
            ended.append(incoming.message)

    async with open_bus(settings) as bus:
        subscription = await bus.subscribe(bus.subjects.all_ended(), on_ended)
        try:
            with Live(console=console, auto_refresh=False) as screen:
                shown = 0
                while rounds == 0 or shown < rounds:
                    try:
                        reply = await ask_conductor(bus, StatusQuery())
                    except NoConductorError as error:
                        screen.update(Text(str(error)), refresh=True)
                    else:
                        screen.update(picture(reply, tuple(ended)), refresh=True)
                    shown += 1
                    await clock.sleep(every_s)
        finally:
            await subscription.close()


def picture(reply: object, ended: tuple[RequestEnded, ...]) -> RenderableType:
    """What is shown of one reply and of the requests that ended lately. Pure."""
    if not isinstance(reply, StatusReply):
        return Text("the conductor did not answer with a status")
    return Group(Text(summary(reply)), status_table(reply), Text(""), _requests(ended))


def _requests(ended: tuple[RequestEnded, ...]) -> Table:
    table = Table(box=None, title="newest requests", title_justify="left")
    for title in ("request", "end", "prompt", "cached", "output"):
        table.add_column(title)
    for title in ("TTFT", "TBT", "total"):
        table.add_column(title, justify="right")
    for record in reversed(ended):
        cached = record.cached_tokens / max(1, record.prompt_tokens)
        table.add_row(
            escape(record.request[:16]),
            f"{record.outcome.value} {escape(record.code)}".strip(),
            str(record.prompt_tokens),
            f"{record.cached_tokens} ({cached:.0%})",
            str(record.output_tokens),
            *(
                "" if value is None else f"{value:.0f} ms"
                for value in (record.ttft_ms, record.tbt_ms, record.total_ms)
            ),
        )
    return table
