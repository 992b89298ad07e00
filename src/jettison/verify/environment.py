"""What a figure was measured on, in words: versions, cores, accelerator. Nothing that names a machine or its owner."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from jettison import __version__
from jettison.core.process import cores
from jettison.core.units import format_bytes

_PACKAGES = ("transformers", "numpy")


def environment() -> dict[str, str]:
    """Names and values in the order in which to show them."""
    found = {
        "jettison": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: text for name in _PACKAGES if name in sys.modules and (text := _version(name)) is not None},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu cores": str(cores()),
        "threads": str(torch.get_num_threads()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["accelerator"] = f"{properties.name}, {format_bytes(properties.total_memory)}"
        found["cuda"] = str(torch.version.cuda)
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
