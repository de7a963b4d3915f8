"""Versions of packages beside us: engines compute by them, so keys hold them."""

import importlib.metadata


def installed_version(*packages: str) -> str:
    """Of each that is installed, as ``1.2`` for one and ``a 1.2 b 3.4`` for several."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if len(packages) == 1:
        return "".join(found.values())
    return " ".join(f"{name} {version}" for name, version in found.items())
