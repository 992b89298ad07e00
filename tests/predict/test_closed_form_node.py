"""The page's interpreter in JavaScript, by node: hundreds of points that an ordinary walk works out, to the byte."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from jettison.report.page import asset
from support.closed_form import golden
from support.patience import PATIENCE

POINTS_OF_A_DOCUMENT = """
const figures = points.map(({ form, key, sizes }) => {
  const layer = J.ledger.layer(document, form, key, sizes);
  const each = (read) => document.modes.map((mode) => String(read(mode)));
  return {
    held: each(layer.held), again: each(layer.again), rerun: each(layer.rerun),
    sums: each((mode) => layer.entries.reduce((total, e) => (e.stays(mode) ? total + e.bytes : total), 0n)),
    forward: String(layer.forward), parameters: String(layer.parameters),
    transfers: layer.transfers.map((t) => [t.kind, Number(t.backward), String(t.bytes), String(t.wire)]),
  };
});
"""
"""From a document and points to what the page's interpreter makes of them."""
READ = 'const { document, points } = JSON.parse(require("fs").readFileSync(0, "utf8"));'
WRITE = "process.stdout.write(JSON.stringify(figures));"


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here: the browser's test reads the same points")
def test_node_reads_what_python_wrote(tmp_path: Path) -> None:
    document, points, expected = golden()
    assert len(points) >= 300
    script = tmp_path / "read.js"
    script.write_text(asset("kit/ledger.js") + READ + POINTS_OF_A_DOCUMENT + WRITE, encoding="utf-8")
    done = subprocess.run(
        ["node", str(script)],
        input=json.dumps({"document": document, "points": points}),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
