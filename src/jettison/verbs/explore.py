"""`explore`: one page about models, written to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jettison.report.explorer import explorer_page


def explore(models: Sequence[str], out: Path) -> int:
    """Write the page; its bytes.

    Raises:
        UsageError: a name that stands for no model.
    """
    text = explorer_page(models).encode("utf-8")
    out.write_bytes(text)
    return len(text)
