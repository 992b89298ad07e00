"""How quickly the explorer's page shows, and how quickly its panels redraw: in a headless Chromium.

    python -m benchmarks.pages_speed [MODEL ...] [--steps 12]

First paint is the browser's own figure for a fresh profile; "all panels" is when the last one stands. A redraw is that
of one panel after a step of one of its sliders, or of a menu where it has none, until it is laid out again. Medians and
worst of all repetitions. Exit code 1 where a median is above a second or above 50 ms.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from jettison.report.explorer import explorer_page
from support.browser import FLAGS
from support.chromium import find_chromium

FIRST_PAINT_MILLISECONDS, REDRAW_MILLISECONDS = 1000, 50

PAINT = (
    "() => performance.getEntriesByType('paint').find((e) => e.name === 'first-contentful-paint')?.startTime ?? null"
)
DRAWN = "() => performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
REDRAW = """async ([id, times]) => {
  const figure = J.figures.get(id), took = [];
  const sliders = [...figure.node.querySelectorAll("input[type=range]")];
  const controls = sliders.length ? sliders : [...figure.node.querySelectorAll(".controls select")];
  for (let i = 0; i < times; i += 1) {
    await new Promise(requestAnimationFrame);
    const control = controls[i % controls.length];
    if (sliders.length) {
      control.value = Number(control.value) + 1 > Number(control.max) ? control.min : Number(control.value) + 1;
    } else {
      control.selectedIndex = (control.selectedIndex + 1) % control.options.length;
    }
    // sets the state; all panels that have it follow in a microtask
    control.dispatchEvent(new Event(sliders.length ? "input" : "change"));
    await new Promise(requestAnimationFrame);
    const begin = performance.now();
    figure.redraw();
    figure.node.getBoundingClientRect();
    took.push(performance.now() - begin);
  }
  return took;
}"""


def main() -> int:
    """Print a table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--steps", type=int, default=12)
    asked = parser.parse_args()
    program = find_chromium()
    if program is None:
        print("no Chromium found on this machine", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    text = explorer_page(asked.models)
    print(f"written in {time.perf_counter() - begin:.1f} s, {len(text.encode()):,} bytes")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "explore.html"
        file.write_text(text, encoding="utf-8")
        return _measure(program, file, asked.steps)


def _measure(program: str, file: Path, steps: int) -> int:
    from playwright.sync_api import sync_playwright

    late = False
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        paints, drawn = [], []
        for _ in range(5):
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(file.as_uri())
            while page.evaluate(PAINT) is None:
                page.wait_for_timeout(20)
            paints.append(page.evaluate(PAINT))
            drawn.append(page.evaluate(DRAWN))
            page.close()
        late |= _line("first paint", paints, FIRST_PAINT_MILLISECONDS)
        _line("all panels drawn", drawn, None)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(file.as_uri())
        for panel in page.evaluate("() => [...J.figures.keys()]"):
            if page.locator(f"#{panel} .controls :is(input[type=range], select)").count():
                late |= _line(f"redraw of {panel}", page.evaluate(REDRAW, [panel, steps]), REDRAW_MILLISECONDS)
        browser.close()
    return int(late)


def _line(name: str, took: list[float], limit: int | None) -> bool:
    median = statistics.median(took)
    over = limit is not None and median > limit
    words = "" if limit is None else f" of {limit} ms" + (" EXCEEDED" if over else "")
    print(f"{name:24} median {median:7.1f} ms, worst {max(took):7.1f} ms{words}")
    return over


if __name__ == "__main__":
    sys.exit(main())
