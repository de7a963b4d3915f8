"""The ``kvtide`` command: every role, the supervisor, and eyes to look with."""
