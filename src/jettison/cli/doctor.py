"""`jettison doctor`: versions, cores, memory, accelerators; with --calibrate, the rates that they reach."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from jettison.cli.environment_notes import environment_notes
from jettison.errors import UsageError
from jettison.extras import install
from jettison.processors import cores
from jettison.units import format_bytes

if TYPE_CHECKING:
    from jettison.calibrate import Calibration

PACKAGES = ("jettison", "torch", "transformers", "numpy", "pydantic", "cyclopts", "rich", "highspy")


def facts() -> list[tuple[str, str]]:
    """(name, value) pairs in the order in which to show them."""
    found = [("python", platform.python_version()), ("platform", platform.platform())]
    found += [(name, _version(name)) for name in PACKAGES]
    found.append(("cpu cores", str(cores())))
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(("memory", format_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))))
    return found + _accelerators() + environment_notes(os.environ, cores())


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _accelerators() -> list[tuple[str, str]]:
    try:
        import torch
    except ImportError:
        return [("accelerators", f"unknown without torch: {install('torch')}")]
    if not torch.cuda.is_available():
        return [("accelerators", "none")]
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        names.append((f"cuda:{index}", f"{properties.name}, {format_bytes(properties.total_memory)}"))
    return names


# calibration ----------------------------------------------------------------------------------------------------------


def refuse_without_calibrate(**given: object) -> None:
    """Flags that mean nothing without --calibrate.

    Raises:
        UsageError: one of them was given.
    """
    for name, value in given.items():
        if value not in (None, False, 0):
            raise UsageError(f"got --{name} without --calibrate; give both, or neither")


def refuse_name(out: Path | None) -> None:
    """A hardware file is known by its ending.

    Raises:
        UsageError: it has another.
    """
    if out is not None and out.suffix != ".toml":
        raise UsageError(f"got --out {out}; expected a name that ends in .toml, so that --gpu takes it as a file")


def calibrated(*, device: str | None, quick: bool, ranks: int, say: Callable[[str], None]) -> Calibration:
    """Measure this machine.

    Raises:
        UsageError: torch is not installed, or there is no such device.
    """
    say("loading torch")
    try:
        from jettison.calibrate import calibrate
    except ImportError as error:
        raise UsageError(f"--calibrate needs torch ({error}): {install('torch')}") from None
    return calibrate(device, short=quick, ranks=ranks, say=say)


def busy() -> str | None:
    """Return a warning where other processes use the machine, which lowers measured rates."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= 0.5 * cores():
        return None
    return f"note: {load:.1f} processes were running on {cores()} cores; figures will be of a busy machine"
