"""Where the keys and certificates of a NATS server of ours are; see ``nats_access``."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OPERATOR = "operator"
"""Whose key commands use."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Where the keys of one server and its nodes are."""

    folder: Path

    @property
    def ca_file(self) -> Path:
        """The authority that signed the server's certificate; for every node."""
        return self.folder / "ca.pem"

    @property
    def certificate(self) -> Path:
        """The server's certificate."""
        return self.folder / "server.pem"

    @property
    def certificate_key(self) -> Path:
        """The server's own."""
        return self.folder / "server.key"

    def key_file(self, name: str) -> Path:
        """The seed of one node's key; for that node alone."""
        return self.folder / f"{name}.seed"


def keys_of(state_dir: Path) -> Keys:
    """The keys of a ``kvtide up`` on this state folder."""
    return Keys(state_dir / "nats" / "keys")


def node_flags(keys: Keys | None, name: str) -> Mapping[str, str]:
    """The flags of a role that has a key there."""
    if keys is None:
        return {}
    return {
        "nats-key-file": str(keys.key_file(name)),
        "nats-ca-file": str(keys.ca_file),
    }
