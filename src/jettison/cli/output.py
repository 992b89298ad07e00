"""How a verb's result leaves the program."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from jettison.errors import UsageError
from jettison.report.console import hint, show


def refuse_to_overwrite(out: Path | None, *, force: bool) -> None:
    """Before long work: is the file free to be written?

    Raises:
        UsageError: it is there already, or its folder is not.
    """
    if out is None:
        return
    if out.exists() and not force:
        raise UsageError(f"{out} is there already; give --force to replace it, or another --out")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent} is not a folder; make it first, or give another --out")


def deliver(document: dict[str, Any], table: RenderableType, *, form: str, out: Path | None) -> None:
    """The document as a table or as JSON on stdout, and as JSON in a file if one was asked for."""
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    if form == "json":
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    else:
        show(table)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
        hint(f"wrote {out}")
