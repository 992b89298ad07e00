"""Every picture in docs/images, drawn again: figures of the explorer, a report and a timeline, as a reader has them.

    python -m benchmarks.pictures [FOLDER] [--quick]

Commands make the pages, a headless Chromium takes the pictures. Exit code 2 where there is no Chromium. Nothing is
replaced before all are drawn. The build of the docs asks for --quick: the report is then of a demo a tenth the size.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from jettison.cli.demo_run import DemoSize, run_demo
from jettison.report.explorer import PANELS, explorer_page
from support.browser import FLAGS
from support.chromium import find_chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parents[1]
MARGINS = 40  # a page's padding on both sides
WIDTHS = dict.fromkeys(("budget", "floor", "ranks", "trade", "ladder"), 760)
"""Pixels of a drawing: figures of one layer stand smaller on their page."""
WIDTH = 820
STEP = "estimate gpt-22b --tp 8 --pp 4 --micro-batches 8 --gpu a100-80gb --snapshot step.pickle"


def draw(folder: Path, *, quick: bool = False) -> list[Path]:
    """Write the pictures; their files.

    Args:
        quick: the report is of a smaller demo, whose training else takes most of the time.

    Raises:
        RuntimeError: no Chromium on this machine.
    """
    from playwright.sync_api import sync_playwright

    program = find_chromium()
    if program is None:
        raise RuntimeError("no Chromium found on this machine: `make browser` looks for one and says what to do")
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        scratch, drawn = Path(place), Path(place) / "drawn"
        drawn.mkdir()
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        written = [*_explorer(browser, scratch, drawn), _timeline(browser, scratch, drawn)]
        browser.close()
        written.append(_report(scratch, drawn, quick=quick))
        folder.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy(file, folder / file.name)) for file in written]


def _open(browser: Browser, page: Path, width: int, height: int = 900) -> Page:
    opened = browser.new_page(viewport={"width": width, "height": height})
    opened.goto(page.as_uri())
    opened.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return opened


def _explorer(browser: Browser, scratch: Path, folder: Path) -> list[Path]:
    file = scratch / "explore.html"
    file.write_text(explorer_page([]), encoding="utf-8")
    written = []
    for width in sorted({WIDTHS.get(panel.name, WIDTH) for panel in PANELS}):
        page = _open(browser, file, width + MARGINS)
        for panel in PANELS:
            if WIDTHS.get(panel.name, WIDTH) == width:
                written.append(folder / f"explore-{panel.name}.png")
                page.locator(f"#{panel.name} .drawing").screenshot(path=written[-1])
        page.close()
    return written


def _timeline(browser: Browser, scratch: Path, folder: Path) -> Path:
    _jettison(STEP, scratch)
    _jettison("report step.pickle --out step.html", scratch)
    page = _open(browser, scratch / "step.html", 1000, 880)
    page.screenshot(path=folder / "timeline.png")
    return folder / "timeline.png"


def _report(scratch: Path, folder: Path, *, quick: bool) -> Path:
    if quick:
        small = DemoSize(hidden=96, heads=4, kv_heads=2, ffn=256, sequence=128, micro_batch=2)
        run_demo(scratch / "demo", steps=1, size=small, rounds=1)
    else:
        _jettison("demo --steps 2 --out demo", scratch)
    _jettison("report demo/proof.json --out proof.html --figures figures", scratch)
    target = folder / "report-timeline.svg"
    target.write_bytes((scratch / "figures" / "timeline.svg").read_bytes())
    return target


def _jettison(line: str, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "jettison", *line.split()], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    """Draw them and name them; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--quick", action="store_true", help="the report of a smaller demo")
    asked = parser.parse_args()
    try:
        written = draw(asked.folder, quick=asked.quick)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    for file in written:
        print(f"{file.name:24} {file.stat().st_size:>9,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
