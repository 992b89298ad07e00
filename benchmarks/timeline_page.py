"""How smoothly the page of a memory snapshot pans: frames a second in a headless Chromium.

    python -m benchmarks.timeline_page [--births 500000] [--seconds 3]

Allocations by chance, of which up to 3,000 are there at a time; each birth and death is an event. Panned by one key
press a frame at three widths of the view. Chromium runs without a GPU, as on a machine that has none.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from playwright.sync_api import sync_playwright

from jettison.report.snapshot import packed_timeline, timelines_page
from support.chromium import find_chromium
from support.snapshot_cases import random_timeline

PAN = """async (milliseconds) => {
  const canvas = document.querySelector("canvas.main");
  const before = Number(canvas.dataset.draws), start = performance.now();
  const drawing = [];
  let worst = 0, last = start;
  for (let i = 0; last - start < milliseconds; i += 1) {
    canvas.dispatchEvent(new KeyboardEvent("keydown", { key: i % 40 < 20 ? "ArrowRight" : "ArrowLeft" }));
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    worst = Math.max(worst, now - last);
    last = now;
    drawing.push(Number(canvas.dataset.ms));
  }
  drawing.sort((a, b) => a - b);
  return [(1000 * (Number(canvas.dataset.draws) - before)) / (last - start), worst, drawing[drawing.length >> 1]];
}"""


def main() -> None:
    """Print a line for each width of the view."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--births", type=int, default=500_000)
    parser.add_argument("--seconds", type=float, default=3.0)
    asked = parser.parse_args()
    timeline = random_timeline(asked.births)
    began = time.perf_counter()
    html = timelines_page("benchmark", [packed_timeline(timeline) | {"name": "allocations by chance"}])
    made = time.perf_counter() - began
    print(f"{len(timeline.allocation):,} events, a page of {len(html) / 1e6:.1f} MB made in {made:.1f} s")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "page.html"
        path.write_text(html, encoding="utf-8")
        browser = playwright.chromium.launch(
            executable_path=str(find_chromium()), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        began = time.perf_counter()
        page.goto(path.as_uri())
        print(f"ready after {time.perf_counter() - began:.1f} s; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        page.locator("canvas.main").focus()
        for presses, words in ((0, "everything"), (6, "an eighth"), (20, "1 in 10,000")):
            for _ in range(presses):
                page.keyboard.press("+")
            frames, worst, drawing = page.evaluate(PAN, 1000 * asked.seconds)
            print(f"{words}: {frames:.0f} frames a second, {drawing:.1f} ms a drawing (median), worst {worst:.0f} ms")
        browser.close()


if __name__ == "__main__":
    main()
