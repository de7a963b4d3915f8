"""``kvtide health URL``: for health checks of containers; needs no curl."""

import urllib.error
import urllib.request

from rich.console import Console

from kvtide.runtime import ConfigError

TIMEOUT_S = 5.0
_OK = 200


def check(url: str, console: Console) -> int:
    """0 when ``GET url`` answers 200, else 1; prints the answer.

    Raises:
        ConfigError: not an HTTP URL.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no HTTP URL", key="url")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_S) as response:
            status, body = response.status, response.read(4096)
    except urllib.error.HTTPError as error:
        status, body = error.code, error.read(4096)
    except OSError as error:
        console.print(f"no answer: {error}", markup=False, highlight=False)
        return 1
    text = body.decode(errors="replace").strip()
    console.print(f"{status} {text}", markup=False, highlight=False)
    return 0 if status == _OK else 1
