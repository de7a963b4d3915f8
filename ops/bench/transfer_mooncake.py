"""Mooncake's transfer engine over TCP on loopback, for ``transfer.py``.

Run by the python of a virtual environment that holds
mooncake-transfer-engine-non-cuda and numpy: transfer_mooncake.py SECONDS SIZE...
Prints "= operation bytes GB/s"; the engine's own log is on standard error.
"""

# pyright: basic
# ruff: noqa: D103

import multiprocessing
import socket
import sys
import time

import numpy as np
from mooncake.engine import TransferEngine

ARENA_BYTES = 256 << 20


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def target(ready) -> None:  # noqa: ANN001
    engine = TransferEngine()
    engine.initialize(f"127.0.0.1:{free_port()}", "P2PHANDSHAKE", "tcp", "")
    arena = np.ones(ARENA_BYTES, dtype=np.uint8)
    engine.register_memory(arena.ctypes.data, arena.nbytes)
    ready.put((engine.get_rpc_port(), arena.ctypes.data))
    # until the other process is gone, however it went
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()


def main() -> None:
    seconds, *sizes = sys.argv[1:]
    ready = multiprocessing.Queue()
    peer = multiprocessing.Process(target=target, args=(ready,), daemon=True)
    peer.start()
    port, remote = ready.get()
    engine = TransferEngine()
    engine.initialize(f"127.0.0.1:{free_port()}", "P2PHANDSHAKE", "tcp", "")
    arena = np.ones(ARENA_BYTES, dtype=np.uint8)
    engine.register_memory(arena.ctypes.data, arena.nbytes)
    session = f"127.0.0.1:{port}"
    calls = {"read": engine.transfer_sync_read, "write": engine.transfer_sync_write}
    for size in map(int, sizes):
        for operation, call in calls.items():
            call(session, arena.ctypes.data, remote, size)
            started = time.perf_counter()
            moved = at = 0
            while (spent := time.perf_counter() - started) < float(seconds):
                # walk through the arenas, so that caches do not flatter
                if call(session, arena.ctypes.data + at, remote + at, size):
                    message = f"{operation} of {size} bytes failed"
                    raise RuntimeError(message)
                moved += size
                at = at + size if at + 2 * size <= ARENA_BYTES else 0
            print("=", operation, size, f"{moved / spent / 1e9:.4f}", flush=True)
    peer.terminate()


if __name__ == "__main__":
    main()
