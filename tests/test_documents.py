"""What the documents say can be done: the README's example runs, and links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    for target in targets:
        path, _, place = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{target} is not there"
        if place:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert place in anchors, f"{target}: no such heading"


def test_no_merge_was_left_half_done() -> None:
    """Its marks may stand in docstrings and pages, where nothing else minds them."""
    marks = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    folders = ("src", "tests", "benchmarks", "docs", "examples", "recipes")
    files = [*PAGES, *(file for name in folders for kind in ("py", "md") for file in (ROOT / name).rglob(f"*.{kind}"))]
    assert [str(file) for file in files if marks.search(file.read_text(encoding="utf-8"))] == []


def test_the_readmes_example_runs() -> None:
    pytest.importorskip("transformers")
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert example is not None
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", example[1]], capture_output=True, text=True, env=env, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    peak, _, policies = done.stdout.partition(" ")
    assert 0 < int(peak) <= 160 * 2**20
    assert "mixed" in policies or "full" in policies
