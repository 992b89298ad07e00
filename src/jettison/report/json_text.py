"""A document as the text that is printed, written to a file and served."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def json_text(document: Mapping[str, Any]) -> str:
    """A document as JSON, a line for each key and for each item of a list: quick to write, and easy to grep."""
    lines = ",\n".join(f" {_json(key)}: {_value(value)}" for key, value in document.items())
    return f"{{\n{lines}\n}}\n"


def _value(value: object) -> str:
    if not isinstance(value, list) or not value:
        return _json(value)
    return "[\n" + ",\n".join(f"  {_json(item)}" for item in value) + "\n ]"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
