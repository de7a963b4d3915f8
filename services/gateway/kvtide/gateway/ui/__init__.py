"""The dashboard at ``/ui``: what is cached where, and why a request went where it went.

``journal``, ``chains``, ``picture`` and ``series`` are pure; ``watch`` feeds them from
the bus, ``answers`` asks others, ``routes`` shows both; ``static`` is what a browser gets.
"""

from kvtide.gateway.ui.dashboard import Dashboard

__all__ = ["Dashboard"]
