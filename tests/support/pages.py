"""What is in a page's file, read without a browser."""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

_BLOCK = re.compile(
    r'<script type="application/(json|json\+deflate)" id="data-([a-z0-9_-]+)">(.*?)</script>', re.DOTALL
)


def page_data(text: str) -> dict[str, Any]:
    """What ``J.data`` gives the scripts, by name."""
    return {
        name: json.loads(body if kind == "json" else zlib.decompress(base64.b64decode(body)))
        for kind, name, body in _BLOCK.findall(text)
    }
