"""What ``kvtide blocks list`` prints can be read and copied, however narrow the terminal."""

import io

import pytest
from rich.console import Console

from kvtide.cli.commands.blocks import ShownBlock, print_blocks

BLOCK = ShownBlock(
    key="0031c078f29df9289d050bb4537ec2dd",
    node="store-0",
    tier="dram",
    tenant="#44cc7f7e",
    tenant_tag="44cc7f7e7665a88c995a89257c405eb0",
    model="smollm2-135m-instruct",
    model_tag="207928a9e47b96a8613c9108de64a30a",
    tokens=64,
    bytes=2_950_720,
    uses=1,
    age_s=8.0,
)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_each_copy_is_whole_and_has_one_line(columns: int, terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, width=columns, force_terminal=terminal)
    print_blocks(console, (BLOCK,))
    head, line = file.getvalue().splitlines()
    for word in ("key", "node", "tenant", "model", "tokens", "size", "age"):
        assert word in head
    for word in (BLOCK.key, BLOCK.node, BLOCK.tenant, BLOCK.model, "2.8 MiB", "8 s"):
        assert word in line
