"""How many processors this process may use."""

from __future__ import annotations

import os


def cores() -> int:
    """Those that the system lets it use, where the system says; otherwise all that there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
