"""What the host has left for this process."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from jettison.errors import UsageError

MEMINFO: Final = Path("/proc/meminfo")
GROUP: Final = Path("/sys/fs/cgroup")
"""Where Linux says what a machine has left, and a container."""


def left_on_host() -> int:
    """Bytes that Linux can give without swapping, or the container's limit if that is less; where torchrun started
    several ranks on a host, the part of each.

    Raises:
        UsageError: nobody says.
    """
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", _read(MEMINFO), re.MULTILINE)
    if found is None:
        raise UsageError(f"{MEMINFO} does not say how much memory is available; give the budget in bytes, as in '8GiB'")
    left = int(found[1]) * 1024
    most, used = _read(GROUP / "memory.max").strip(), _read(GROUP / "memory.current").strip()
    if most.isdigit() and used.isdigit():
        left = min(left, max(0, int(most) - int(used)))
    return left // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
