"""An owner without asyncio: says where it is, then what its callbacks hear, and ends with its input.

``python transfer_blocking.py FOLDER``: FOLDER is for shared memory; "-": none.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from kvtide.runtime import SystemClock
from kvtide.transfer import Access, Endpoint, EndpointAddress, RegionHandle

SECRET = b"the secret of this test's cluster"
LENGTH = 1 << 20


def endpoint(node: str, shm_dir: Path | None) -> Endpoint:
    return Endpoint(
        node=node, epoch=1, secret=SECRET, clock=SystemClock(), shm_dir=shm_dir
    )


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def address_and_handle(line: str) -> tuple[EndpointAddress, RegionHandle]:
    """What the owner's first line says."""
    said = json.loads(line)
    capability = bytes.fromhex(said["handle"].pop("capability"))
    handle = RegionHandle(**said["handle"], capability=capability)
    return EndpointAddress(**said["address"]), handle


def main(folder: str) -> None:
    with endpoint("owner", None if folder == "-" else Path(folder)) as owner:
        region = owner.allocate(LENGTH, name="arena")
        region.view[:] = bytes(range(256)) * (LENGTH // 256)
        owner.on_notification(
            lambda node, _epoch, words: say(f"{node} {words.decode()}")
        )
        owner.on_peer_gone(lambda node, _epoch: say(f"{node} is gone"))
        handle = asdict(region.handle(Access.WRITE, ttl_s=60))
        handle["capability"] = handle["capability"].hex()
        say(json.dumps({"address": asdict(owner.address), "handle": handle}))
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
