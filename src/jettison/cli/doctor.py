"""What `jettison doctor` says: versions, cores, memory, accelerators."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from jettison.units import format_bytes

PACKAGES = ("jettison", "torch", "transformers", "numpy", "pydantic", "cyclopts", "rich", "highspy")


def facts() -> list[tuple[str, str]]:
    """(name, value) pairs in the order in which to show them."""
    found = [("python", platform.python_version()), ("platform", platform.platform())]
    found += [(name, _version(name)) for name in PACKAGES]
    found.append(
        ("cpu cores", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))
    )
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(("memory", format_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))))
    return found + _accelerators()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _accelerators() -> list[tuple[str, str]]:
    try:
        import torch
    except ImportError:
        return [("accelerators", "unknown without torch: pip install 'jettison[torch]'")]
    if not torch.cuda.is_available():
        return [("accelerators", "none")]
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        names.append((f"cuda:{index}", f"{properties.name}, {format_bytes(properties.total_memory)}"))
    return names
