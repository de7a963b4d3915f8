"""Flags that several commands take, with one help text each."""

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        help="TOML file with settings. Default: $KVTIDE_CONFIG.",
        metavar="PATH",
        show_default=False,
    ),
]
Nats = Annotated[
    str | None,
    typer.Option(
        help="URL of the NATS server. Default: that of kvtide up.", show_default=False
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(help="Name of the cluster. Default: local.", show_default=False),
]
CatalogUrl = Annotated[
    str | None,
    typer.Option(
        help="SQLAlchemy URL. Default: SQLite in the state folder.", show_default=False
    ),
]
StateDir = Annotated[
    str | None,
    typer.Option(
        help="The state folder. Default: ~/.kvtide.", metavar="PATH", show_default=False
    ),
]
