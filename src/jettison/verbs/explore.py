"""`explore`: one page about models, written to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jettison.report.explorer import explorer_page


def explore(models: Sequence[str], out: Path, *, jobs: int = 1) -> int:
    """Write the page; its bytes.

    Args:
        jobs: processes that work its data out, at most.

    Raises:
        UsageError: a name that stands for no model.
    """
    text = explorer_page(models, jobs=jobs).encode("utf-8")
    out.write_bytes(text)
    return len(text)
