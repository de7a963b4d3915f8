"""Prints the dependencies in pyproject.toml: the core's and those of the extras named.

So that an image layer with them changes only when they do, and not with the code.
"""

import sys
import tomllib
from pathlib import Path


def main(extras: list[str]) -> None:
    """Print one requirement a line."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    sys.stdout.write("\n".join(wanted) + "\n")


main(sys.argv[1:])
