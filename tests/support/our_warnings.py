"""Warnings of Jettison's, told from those of torch's wherever both are installed."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import jettison

_FOLDER = Path(jettison.__file__).parent
_WORDS = re.compile(r"\b(plan|plans|planned|planning|budget)\b")


def is_ours(warning: warnings.WarningMessage) -> bool:
    """Whether its file is one of Jettison's, or, where it names its caller's line, its text speaks of plans."""
    return _FOLDER in Path(warning.filename).parents or bool(_WORDS.search(str(warning.message)))
