"""An engine that ends with the process that it works for, however that one ends.

An engine may be a process of its own, of which nobody is left who could end it once its
owner was killed: it would keep its memory, and a GPU, for ever.
"""

import os
import select
import signal
import threading

import structlog

log = structlog.get_logger("kvtide.connect")


def end_with(owner: int) -> None:
    """Have this process killed when process ``owner`` ends; at once if it has ended.

    Nothing is to be put in order: blocks that are half written never become visible, and
    who is gone is noticed. Where the kernel can't tell of a process (Linux before 5.3), a
    warning is all.
    """
    if owner == os.getpid():
        return
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    except OSError as error:
        log.warning("engine_may_outlive_its_worker", owner=owner, error=str(error))
        return
    threading.Thread(
        target=_wait_and_end, args=(handle,), name="kvtide owner", daemon=True
    ).start()


def _wait_and_end(handle: int) -> None:
    """Wait for the owner's end, which has no limit: an engine may live for months."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    while not poll.poll():
        pass
    os.kill(os.getpid(), signal.SIGKILL)
