"""``kvtide explain``: why a request went where it went."""

import asyncio

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtide.bus.messages import Explained, ExplainQuery, Failure
from kvtide.cli.access import NoConductorError, ask_conductor, open_bus
from kvtide.kv import RequestId
from kvtide.runtime.settings import RoleSettings


def show_explanation(
    settings: RoleSettings, request: str, *, as_json: bool, console: Console
) -> None:
    """Ask a conductor about ``request`` and print its candidates, best first.

    Raises:
        NoNatsError, NoConductorError: nobody answers, or nobody knows the request.
    """
    explained = asyncio.run(_ask(settings, RequestId(request)))
    if as_json:
        console.print_json(msgspec.json.encode(explained).decode())
        return
    console.print(
        f"{explained.request}, attempt {explained.attempt}: {explained.reason}",
        highlight=False,
        markup=False,
    )
    table = Table(box=None)
    for title in ("prefill", "decode", "hit", "queue", "transfer", "prefill", "TTFT"):
        table.add_column(title)
    for candidate in explained.candidates:
        table.add_row(
            escape(candidate.prefill),
            escape(candidate.decode),
            f"{candidate.hit_tokens} tokens",
            f"{candidate.queue_ms:.1f} ms",
            f"{candidate.transfer_ms:.1f} ms",
            f"{candidate.prefill_ms:.1f} ms",
            f"{candidate.ttft_ms:.1f} ms",
        )
    console.print(table)


async def _ask(settings: RoleSettings, request: RequestId) -> Explained:
    async with open_bus(settings) as bus:
        reply = await ask_conductor(bus, ExplainQuery(request=request))
    if isinstance(reply, Explained):
        return reply
    reason = reply.reason if isinstance(reply, Failure) else type(reply).__name__
    raise NoConductorError(reason)
