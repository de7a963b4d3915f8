"""How a request's name within the cluster is made from the id that a client gave. Pure.

``GIVEN`` (its first ``GIVEN_CHARS`` characters) ``.`` 32 random hex digits, and ``.N``
for answer N of several: at most ``NAME_CHARS`` characters, which is what tables take.
"""

from kvtide.kv.ids import RequestId

NAME_CHARS = 128
GIVEN_CHARS = 90


def cluster_name(given: str, unique: str) -> RequestId:
    """The name of the request that a client calls ``given``; ``unique`` is 32 digits."""
    return RequestId(f"{given[:GIVEN_CHARS]}.{unique}")


def answer_name(request: RequestId, index: int) -> RequestId:
    """The name of answer ``index`` of a request, from 0; the first has the request's."""
    return request if index == 0 else RequestId(f"{request}.{index}")


def name_prefix(asked: str) -> str:
    """What all names begin with that were made from the id or name ``asked``."""
    return f"{asked[:GIVEN_CHARS]}."
