"""torch.distributed's gloo on loopback, for ``transfer.py``.

transfer_gloo.py SECONDS SIZE...; prints "= operation bytes GB/s". Gloo has no
one-sided operation: "write" is a send that the other process receives, "read" is a
small message that asks and the receive of what comes.
"""

# pyright: basic
# ruff: noqa: D103

import datetime as dt
import multiprocessing
import socket
import sys
import time

import torch
from torch import distributed

ARENA_BYTES = 256 << 20


def join(rank: int, port: int) -> None:
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=dt.timedelta(seconds=120),
    )


def target(port: int) -> None:
    join(1, port)
    arena = torch.ones(ARENA_BYTES, dtype=torch.uint8)
    ask = torch.zeros(3, dtype=torch.int64)
    while True:
        distributed.recv(ask, 0)
        operation, size, at = ask.tolist()
        if operation == 0:
            return
        part = arena[at : at + size]
        if operation == 1:
            distributed.send(part, 0)
        else:
            distributed.recv(part, 0)


def main() -> None:
    seconds, *sizes = sys.argv[1:]
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    peer = multiprocessing.get_context("spawn").Process(target=target, args=(port,))
    peer.start()
    join(0, port)
    arena = torch.ones(ARENA_BYTES, dtype=torch.uint8)
    for size in map(int, sizes):
        for number, operation in ((1, "read"), (2, "write")):
            started = time.perf_counter()
            moved = at = 0
            while (spent := time.perf_counter() - started) < float(seconds):
                part = arena[at : at + size]
                distributed.send(torch.tensor([number, size, at]), 1)
                if number == 1:
                    distributed.recv(part, 1)
                else:
                    distributed.send(part, 1)
                moved += size
                at = at + size if at + 2 * size <= ARENA_BYTES else 0
            print("=", operation, size, f"{moved / spent / 1e9:.4f}", flush=True)
    distributed.send(torch.tensor([0, 0, 0]), 1)
    peer.join()


if __name__ == "__main__":
    main()
