"""How much KV fits into this machine's memory."""

import psutil

from kvtide.decode.settings import DecodeSettings
from kvtide.kv import Layout, ModelFacts


def capacity_tokens(settings: DecodeSettings, facts: ModelFacts) -> int:
    """Tokens of KV: as set, or as fit into a share of the memory that is free now."""
    if settings.kv_tokens:
        return settings.kv_tokens
    layout = Layout.of(facts)
    free_bytes = psutil.virtual_memory().available
    tokens = int(free_bytes * settings.kv_memory_share)
    return max(layout.block_tokens, tokens // (layout.parts * layout.token_bytes))
