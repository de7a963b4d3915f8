"""Where hits came from, by the counters that servers show at ``/metrics``.

Kvtide's workers count bytes read from the pool by path (this host's memory, another
host's), its stores the blocks staged from SSD, and vLLM its prefix cache's hits.
"""

import re
from collections.abc import Iterable, Mapping

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([^ ]+)(?: \d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Counts = Mapping[str, float]
"""Name of a figure → what it was counted to."""

_NAMES = {
    "kvtide_prefill_tokens_total": ("source", "prompt tokens, {}"),
    "kvtide_pool_read_bytes_total": ("path", "bytes reused over {}"),
    "kvtide_store_staged_total": ("", "blocks staged from SSD"),
    "kvtide_store_evicted_total": ("", "blocks evicted"),
    "kvtide_store_ssd_demoted_total": ("", "blocks moved to SSD"),
    "vllm:prefix_cache_queries_total": ("", "vLLM: prompt tokens looked up"),
    "vllm:prefix_cache_hits_total": ("", "vLLM: prompt tokens found"),
    "vllm:num_preemptions_total": ("", "vLLM: preemptions"),
}


def counts(pages: Iterable[str]) -> Counts:
    """The sums over the pages of several processes; what is unknown is left out."""
    found: dict[str, float] = {}
    for page in pages:
        for line in page.splitlines():
            match = _LINE.match(line)
            if match is None or match[1] not in _NAMES:
                continue
            labels = dict(_LABEL.findall(match[2] or ""))
            if labels.get("purpose", "reuse") != "reuse":
                continue  # a hand-over is no hit
            label, name = _NAMES[match[1]]
            key = name.format(labels.get(label, ""))
            found[key] = found.get(key, 0.0) + float(match[3])
    return found


def grown(before: Counts, after: Counts) -> Counts:
    """By how much each has grown.

    A process that began anew in between counts from 0: what it shows is all new.
    """
    return {
        name: value - before.get(name, 0.0) if value >= before.get(name, 0.0) else value
        for name, value in sorted(after.items())
    }
