"""Lightning Fabric, whose models are to be trained by their Fabric alone."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def started_by_fabric() -> Iterator[None]:
    """Outputs of a model that Lightning Fabric has set up refuse a backward that it did not start
    (lightning/fabric/wrappers.py).
    """
    wrappers = sys.modules.get("lightning.fabric.wrappers") or sys.modules.get("lightning_fabric.wrappers")
    before = getattr(wrappers, "_in_fabric_backward", None)
    if wrappers is None or before is None:
        yield
        return
    wrappers._in_fabric_backward = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        wrappers._in_fabric_backward = before  # type: ignore[attr-defined]
