"""``kvtide demo``: a guided minute on a fresh start, which checks what it claims."""

from kvtide.cli.demo.guide import demo

__all__ = ["demo"]
