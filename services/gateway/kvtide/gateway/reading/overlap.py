"""Text that may become something when more of it comes."""


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that begins ``stop`` (not all of it)."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
