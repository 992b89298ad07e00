"""`explore`: one page about models, written to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jettison.progress import Progress, silent
from jettison.report.explorer import explorer_page
from jettison.whole_files import write_whole


def explore(models: Sequence[str], out: Path, *, jobs: int = 1, progress: Progress = silent) -> int:
    """Write the page; its bytes.

    Args:
        jobs: processes that work its data out, at most.
        progress: is told what is worked out.

    Raises:
        UsageError: a name that stands for no model.
    """
    text = explorer_page(models, jobs=jobs, progress=progress).encode("utf-8")
    write_whole(out, text)
    return len(text)
