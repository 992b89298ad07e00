"""The pages are a site without a warning; every public name, every page and every verb has its place in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jettison
from support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_every_public_name_is_in_the_page_about_python() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"auto(?:function|class|exception):: jettison\.(\w+)\n", page))
    assert named == set(jettison._HOME_OF)


def test_every_page_is_reached_from_the_first() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    entries = {line.strip() for line in index.splitlines()}
    pages = {path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md")}
    missing = [
        str(page)
        for page in pages
        if str(page) not in entries | {"index"} and page.parts[0] not in ("decisions", "generated", "_build")
    ]
    assert not missing


def test_files_that_pages_name_are_there() -> None:
    pages = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *DOCS.glob("how-to/*.md"), *DOCS.glob("lesson/*.md")]
    named = re.compile(r"`((?:(?:src|tests|benchmarks|examples)/[\w/.-]+|(?:\w+/)?test_\w+)\.\w+)`")
    found = {(page.name, path) for page in pages for path in named.findall(page.read_text(encoding="utf-8"))}
    assert len(found) > 40
    assert not {one for one in found if not (ROOT / one[1]).exists() and not (ROOT / "tests" / one[1]).exists()}


def test_decisions_say_whether_they_hold() -> None:
    """Each has a date and a status, and names the decision that changed or superseded it."""
    status = {path.name[:4]: path.read_text("utf-8").splitlines()[2] for path in DOCS.glob("decisions/0*.md")}
    held = re.compile(r"2026-1[12]-\d\d(?:, changed [^·]+)? · (?:accepted|superseded by \[)")
    assert not {number for number, line in status.items() if not held.match(line)}
    said = {
        (changed, number)
        for number, line in status.items()
        for part in line.split(" · ")
        if part.startswith(("supersedes", "changes")) or "; changes" in part
        for changed in re.findall(r"(?<![-(/\d])\b(\d{4})\b(?!-)", part)
    }
    assert len(said) > 20
    assert not {one for one in said if one[1] not in status[one[0]]}


def test_files_that_decisions_name_are_there() -> None:
    rooms = "|".join(path.name for path in (ROOT / "src/jettison").iterdir() if path.is_dir())
    named = re.compile(rf"(?<![\w/])((?:{rooms}|tests|benchmarks)/[\w/.-]+\.(?:py|toml))\b")
    homes = (ROOT, ROOT / "src/jettison")
    found = {
        (page.name[:4], path)
        for page in DOCS.glob("decisions/0*.md")
        for path in named.findall(page.read_text("utf-8"))
        if "NAME" not in path and "MODEL_TYPE" not in path
    }
    assert len(found) > 60
    assert not {one for one in found if not any((home / one[1]).exists() for home in homes)}


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_parser")
    pytest.importorskip("furo")
    flags = ["-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(tmp_path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *flags], capture_output=True, text=True, env=env, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    verbs = (tmp_path / "generated" / "commands.html").read_text(encoding="utf-8")
    for verb in ("ledger", "plan", "verify", "search", "list", "completion"):
        assert f"jettison {verb} " in verbs
    assert "auto_checkpoint" in (tmp_path / "api.html").read_text(encoding="utf-8")
