"""What the kit runs on: versions, the device, and what of it torch can use."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.gpu.cases import Found, Log
from benchmarks.gpu.parts import grouped_mm
from benchmarks.gpu.setting import Setting, name_of, why_no_compiler
from jettison.core.units import format_bytes

PACKAGES = ("numpy", "triton", "pydantic", "highspy", "transformers")
"""None of them is needed; they are named because a run may differ where they are there."""


def run(setting: Setting, log: Log, *, quick: bool) -> None:
    """One list."""

    def look() -> Found:
        found = facts(setting, compiler=not quick)
        log.text = ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in found.items())]
        return Found(figures={"facts": found})

    log.case("environment", look, expect=0.0)


def facts(setting: Setting, *, compiler: bool) -> dict[str, str]:
    """By name, in the order in which to show them."""
    device = setting.device
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        **{name: _version(name) for name in PACKAGES},
        "device": name_of(device),
        "CPU cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "C compiler": next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), "none"),
        "grouped products": "none" if grouped_mm is None else grouped_mm.__name__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        found |= {
            "CUDA": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(),
            "compute capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory": f"{format_bytes(free)} free of {format_bytes(total)}",
            "allocator": os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "as it comes")),
            "cuBLAS workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "as it comes"),
        }
    if compiler and setting.compiles:
        found["torch.compile"] = why_no_compiler(device.type) or "works"
    return {name: str(value) for name, value in found.items()}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
