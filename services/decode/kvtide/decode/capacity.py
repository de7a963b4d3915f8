"""How much KV fits into this machine's memory."""

import psutil

from kvtide.decode.settings import DecodeSettings
from kvtide.kv import Layout, ModelFacts


def capacity_tokens(
    settings: DecodeSettings, facts: ModelFacts, device_tokens: int | None = None
) -> int:
    """Tokens of KV: as set, or as fit into a share of the memory that is free now.

    At most as many as fit on the device, where that has memory of its own.
    """
    host = _host_tokens(settings, facts)
    return host if device_tokens is None else min(host, device_tokens)


def _host_tokens(settings: DecodeSettings, facts: ModelFacts) -> int:
    if settings.kv_tokens:
        return settings.kv_tokens
    layout = Layout.of(facts)
    free_bytes = psutil.virtual_memory().available
    tokens = int(free_bytes * settings.kv_memory_share)
    return max(layout.block_tokens, tokens // (layout.parts * layout.token_bytes))
