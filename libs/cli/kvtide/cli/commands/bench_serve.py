"""``kvtide bench serve``: a load on any server that speaks OpenAI's API."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import uvloop
from rich.console import Console

from kvtide.bus.messages import StatusQuery, StatusReply
from kvtide.cli.access import ask_conductor, open_bus
from kvtide.cli.exits import CLEAN, FAILED, INTERRUPTED
from kvtide.cli.resolve import resolve_look
from kvtide.cli.serve_bench.counters import Counts, counts, grown
from kvtide.cli.serve_bench.dialogue import Style
from kvtide.cli.serve_bench.figures import summary
from kvtide.cli.serve_bench.load import Load, Manner, client_of, model_of, pages_of
from kvtide.cli.serve_bench.outcomes import Exchange, Outcome
from kvtide.cli.serve_bench.report import Report, rows, tables, write
from kvtide.cli.serve_bench.wanted import Flags
from kvtide.cli.serve_bench.workload import Conversation
from kvtide.runtime import ConfigError, SystemClock
from kvtide.runtime.metrics import version

_MOST_SHOWN = 3


@dataclass(frozen=True, slots=True)
class _Sent:
    model: str
    exchanges: tuple[Exchange, ...]
    counters: Counts


def bench_serve(flags: Flags, console: Console) -> int:
    """Send the load, print, keep in ``flags.out``; 1 if a request failed.

    Raises:
        ConfigError: flags that make no load, or no HTTP URL.
        LoadError: no server there, or the warm-up failed.
    """
    parts = urlsplit(flags.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{flags.url!r} is no http:// or https:// URL", key="url")
    if not (flags.api_key.isascii() and flags.api_key.isprintable()):
        raise ConfigError("a key has visible ASCII characters only", key="api_key")
    manner = _manner(flags)
    conversations, cut = flags.conversations()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sent = runner.run(_send(conversations, manner, flags))
    report = Report(
        url=flags.url,
        model=sent.model,
        kvtide=version(),
        load=flags.shown,
        cut_turns=cut,
        summary=summary(sent.exchanges, flags.targets),
        counters=sent.counters,
        requests=rows(sent.exchanges),
    )
    if flags.out is not None:
        write(report, sent.exchanges, flags.out)
    if flags.json:
        console.print_json(msgspec.json.encode(report).decode())
    else:
        _show(report, sent.exchanges, flags.out, console)
    ends = report.summary.outcomes
    if Outcome.INTERRUPTED.value in ends:
        return INTERRUPTED
    return CLEAN if set(ends) == {Outcome.COMPLETED.value} else FAILED


def _manner(flags: Flags) -> Manner:
    return Manner(
        flags.which_api(),
        Style(flags.model, seed=flags.seed, ignore_eos=flags.ignore_eos),
        flags.seed,
        flags.timeout_s,
        concurrency=flags.concurrency,
        most_open=flags.max_open,
        warmup=flags.warmup,
    )


async def _send(
    conversations: Sequence[Conversation], manner: Manner, flags: Flags
) -> _Sent:
    pages = [*(flags.metrics or ()), *await _pages_of_nodes(flags.state_dir)]
    async with client_of(flags.url, _headers(flags)) as client:
        model = flags.model or await model_of(client)
        manner = replace(manner, style=replace(manner.style, model=model))
        load = Load(client, manner, SystemClock())
        await load.warm_up()
        before = counts(await pages_of(pages))
        exchanges = await load.run(conversations)
        after = counts(await pages_of(pages))
    return _Sent(model, exchanges, grown(before, after))


def _headers(flags: Flags) -> dict[str, str]:
    headers: dict[str, str] = {}
    if flags.api_key:
        headers["authorization"] = f"Bearer {flags.api_key}"
    if flags.tell_targets:
        named = (("ttft", flags.ttft_ms), ("tbt", flags.tbt_ms))
        headers |= {f"x-kvtide-{n}-ms": f"{ms:g}" for n, ms in named if ms is not None}
    return headers


async def _pages_of_nodes(state_dir: Path | None) -> list[str]:
    """Of every node of a ``kvtide up``.

    Raises:
        NoNatsError, NoConductorError: it does not run.
    """
    if state_dir is None:
        return []
    settings = resolve_look(None, {"state_dir": str(state_dir)})
    async with open_bus(settings) as bus:
        reply = await ask_conductor(bus, StatusQuery())
    if not isinstance(reply, StatusReply):
        return []
    found = {view.beat.http for view in reply.nodes if view.beat.http}
    return [f"{url}/metrics" for url in sorted(found)]


def _show(
    report: Report, exchanges: Sequence[Exchange], out: Path | None, console: Console
) -> None:
    for table in tables(report):
        console.print(table)
    failed = Counter(each.detail for each in exchanges if each.detail)
    for detail, count in failed.most_common(_MOST_SHOWN):
        console.print(f"{count} times: {detail}", markup=False, highlight=False)
    if out is not None:
        console.print(
            f"kept in {out}: serve.json, serve.md, serve.svg", highlight=False
        )
