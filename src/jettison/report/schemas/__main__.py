"""``python -m jettison.report.schemas FOLDER`` writes the JSON Schema of every document there."""

import json
import sys
from pathlib import Path

from jettison.report.schemas import SCHEMAS, json_schema

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for name in SCHEMAS:
    text = json.dumps(json_schema(name), indent=1, ensure_ascii=False) + "\n"
    (folder / f"{name.replace('/', '-')}.json").write_text(text, encoding="utf-8")
