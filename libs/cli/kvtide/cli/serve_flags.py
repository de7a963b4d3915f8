"""The flags of ``kvtide bench serve``."""

from pathlib import Path
from typing import Annotated

import typer

Url = Annotated[str, typer.Argument(help="A server that speaks OpenAI's API.")]
ApiName = Annotated[str, typer.Option("--api", help="completions or chat.")]
Model = Annotated[
    str,
    typer.Option(help="Default: the first that the server names.", show_default=False),
]
ApiKey = Annotated[
    str,
    typer.Option(
        help="Sent as a bearer token.",
        envvar="KVTIDE_BENCH_API_KEY",
        show_default=False,
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        help="Keep so many conversations open.", min=1, max=4096, show_default=False
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        help="Begin so many conversations a second, as a Poisson process.",
        min=1e-6,
        show_default=False,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        help="Replay it: JSON lines, perhaps compressed; see examples/traces.",
        metavar="PATH",
        show_default=False,
    ),
]
Speed = Annotated[
    float, typer.Option(help="Of a trace: arrivals, times as dense.", min=1e-6)
]
LengthScale = Annotated[
    float,
    typer.Option(help="Of a trace: prompts and answers, times as long.", min=1e-6),
]
Sample = Annotated[
    float,
    typer.Option(
        help="Of a trace: keep this share of its conversations, each whole.",
        min=0.0001,
        max=1,
    ),
]
Skip = Annotated[int, typer.Option(help="Of a trace: leave out the first ones.", min=0)]
Requests = Annotated[
    int,
    typer.Option(
        help="Conversations, or requests of a trace; 0: 100, or the whole trace.", min=0
    ),
]
Span = Annotated[
    float | None,
    typer.Option(help="Begin none after so many seconds.", min=0, show_default=False),
]
PromptTokens = Annotated[int, typer.Option(help="Own text of a prompt, mean.", min=1)]
OutputTokens = Annotated[int, typer.Option(help="Of an answer, mean.", min=1)]
Variation = Annotated[
    float,
    typer.Option(help="Of lengths: sigma of a log-normal; 0: all alike.", min=0, max=3),
]
Prefixes = Annotated[
    int, typer.Option(help="Shared prefixes to draw from, Zipf.", min=1, max=1_000_000)
]
PrefixTokens = Annotated[int, typer.Option(help="Of a shared prefix; 0: none.", min=0)]
Zipf = Annotated[
    float, typer.Option(help="How much some prefixes are preferred.", min=0)
]
Turns = Annotated[int, typer.Option(help="Of a conversation.", min=1, max=1000)]
Think = Annotated[float, typer.Option(help="Mean pause before a later turn.", min=0)]
MostTokens = Annotated[
    int, typer.Option(help="Prompt and answer together: what is longer is cut.", min=2)
]
MostOutput = Annotated[int, typer.Option(help="Longest answer to ask for.", min=1)]
Timeout = Annotated[float, typer.Option(help="Of a request.", min=0.001)]
MostOpen = Annotated[
    int, typer.Option(help="Most open at once; what is due then is sent late.", min=1)
]
Warmup = Annotated[int, typer.Option(help="Short requests before, not counted.", min=0)]
Ttft = Annotated[
    float | None, typer.Option(help="Target, for goodput.", min=0, show_default=False)
]
Tbt = Annotated[
    float | None, typer.Option(help="Target, for goodput.", min=0, show_default=False)
]
TellTargets = Annotated[
    bool,
    typer.Option("--tell-targets", help="Tell kvtide the targets with each request."),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(help="Answers as long as asked: an extension of kvtide and vLLM."),
]
Metrics = Annotated[
    list[str] | None,
    typer.Option(
        help="A page with the server's counters, such as http://…/metrics; may be "
        "given again.",
        show_default=False,
    ),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        help="State folder of the kvtide up that is asked: its nodes' counters are read.",
        metavar="PATH",
        show_default=False,
    ),
]
Seed = Annotated[
    int, typer.Option(help="Of text and times. The same text again hits caches.", min=0)
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder for table, JSON and plot.", metavar="PATH", show_default=False
    ),
]
