"""A role of the next release, whose messages have another protocol version.

``python -m tests.chaos.newer_process ROLE SETTINGS_JSON``, as ``cluster_process.py``.
"""

import sys

from tests.integration.cluster_process import run_role

from kvtide.bus import codec, roster, vitals

NEXT = codec.PROTOCOL + 1


def become_newer() -> None:
    """Speak, and understand, the next version alone."""
    codec.Codec.__init__.__defaults__ = (NEXT,)
    vitals.PROTOCOL = NEXT
    roster.PROTOCOL = NEXT


if __name__ == "__main__":
    become_newer()
    run_role(sys.argv[1], sys.argv[2])
