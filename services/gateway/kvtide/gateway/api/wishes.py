"""Headers by which a client says what it wants of this one request."""

from dataclasses import dataclass

from starlette.requests import Request

from kvtide.gateway.api.problems import ApiError, bad_param

DEBUG_HEADER = "x-kvtide-debug"
PROGRESS_HEADER = "x-kvtide-progress"
TTFT_HEADER = "x-kvtide-ttft-ms"
TBT_HEADER = "x-kvtide-tbt-ms"
PRIORITY_HEADER = "x-kvtide-priority"
MOST_MS = 86_400_000.0
PRIORITY_BOUND = 1 << 31


@dataclass(frozen=True, slots=True)
class Wishes:
    """Targets in milliseconds and a priority, None where the defaults hold.

    ``debug``: the answer's headers say how it was made. ``progress``: comments in a
    stream say how far the prompt is.
    """

    ttft_ms: float | None = None
    tbt_ms: float | None = None
    priority: int | None = None
    debug: bool = False
    progress: bool = False


def wishes_of(request: Request) -> Wishes:
    """What the headers say.

    Raises:
        ApiError: 400 that names the header: not a number, or out of bounds.
    """
    return Wishes(
        ttft_ms=_milliseconds(request, TTFT_HEADER),
        tbt_ms=_milliseconds(request, TBT_HEADER),
        priority=_priority(request),
        debug=request.headers.get(DEBUG_HEADER) == "1",
        progress=request.headers.get(PROGRESS_HEADER) == "1",
    )


def _milliseconds(request: Request, name: str) -> float | None:
    given = request.headers.get(name)
    if given is None:
        return None
    try:
        value = float(given)
    except ValueError:
        raise _wrong(name, "a number of milliseconds") from None
    if not 0 < value <= MOST_MS:  # neither holds for NaN
        raise _wrong(name, f"more than 0 and at most {MOST_MS:.0f} milliseconds")
    return value


def _priority(request: Request) -> int | None:
    given = request.headers.get(PRIORITY_HEADER)
    if given is None:
        return None
    try:
        value = int(given)
    except ValueError:
        raise _wrong(PRIORITY_HEADER, "a whole number") from None
    if abs(value) >= PRIORITY_BOUND:
        raise _wrong(PRIORITY_HEADER, f"between -{PRIORITY_BOUND} and {PRIORITY_BOUND}")
    return value


def _wrong(name: str, wanted: str) -> ApiError:
    return bad_param(name, f"{name}: the header must be {wanted}")
