"""The instruments that look at pages: each finds what it is there to find, and nothing on a page that is in order."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import chromium as programs
from support.browser import (
    Driver,
    Open,
    axe_violations,
    frames_per_second,
    no_requests_left,
    no_sideways_scroll,
    print_pdf,
    redraw_milliseconds,
    screenshot,
    set_dark,
    too_wide,
    walk_by_keyboard,
)
from support.patience import PATIENCE

ORDERLY = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Bytes</title>
<meta name="viewport" content="width=device-width">
<style>body { background: #fff; color: #111; } @media (prefers-color-scheme: dark) { body { background: #111;
color: #eee; } } :focus-visible { outline: 2px solid #06c; }</style></head>
<body><main><h1>Bytes</h1><label>Layers <input id="layers" type="range" min="1" max="9"></label>
<button id="copy" type="button">Copy</button><p id="said"></p></main></body></html>"""


def written(folder: Path, html: str) -> Path:
    (folder / "page.html").write_text(html, encoding="utf-8")
    return folder / "page.html"


def test_a_page_in_order_is_found_so(open_page: Open, tmp_path: Path) -> None:
    opened = open_page(written(tmp_path, ORDERLY))
    assert opened.errors == []
    assert opened.requests == [(tmp_path / "page.html").as_uri()]
    assert axe_violations(opened) == []
    assert no_sideways_scroll(opened, 390)
    assert too_wide(opened) == []
    stops = walk_by_keyboard(opened)
    assert [(stop.tag, stop.id, stop.name, stop.ring, stop.visible) for stop in stops] == [
        ("input", "layers", "Layers", True, True),
        ("button", "copy", "Copy", True, True),
    ]
    assert screenshot(opened, tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    assert print_pdf(opened, tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    colour = "getComputedStyle(document.body).backgroundColor"
    assert opened.page.evaluate(colour) == "rgb(255, 255, 255)"
    set_dark(opened, True)
    assert opened.page.evaluate(colour) == "rgb(17, 17, 17)"
    assert open_page(tmp_path / "page.html", dark=True).page.evaluate(colour) == "rgb(17, 17, 17)"


def test_what_is_wrong_is_found(open_page: Open, tmp_path: Path) -> None:
    wrong = ORDERLY.replace(
        "</main>",
        """<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw="><div id="broad" style="width: 600px">x</div></main>
        <script>console.error("first"); setTimeout(() => { throw new Error("second"); });</script>""",
    )
    opened = open_page(written(tmp_path, wrong))
    while len(opened.errors) < 2:  # the second one is thrown when the page has time
        opened.page.wait_for_timeout(20)
    assert [error.partition("\n")[0] for error in opened.errors] == ["error: first", "thrown: second"]
    assert opened.unexpected()
    opened.expect_error("first")
    opened.expect_error("second")
    assert not opened.unexpected()
    assert [line.partition(":")[0] for line in axe_violations(opened)] == ["image-alt"]
    assert axe_violations(opened, within="label") == axe_violations(opened, leave_out=("image-alt",)) == []
    assert no_sideways_scroll(opened, 1440)
    assert not no_sideways_scroll(opened, 390)
    assert too_wide(opened) == ["div#broad."]


def test_requests_that_leave_are_seen(open_page: Open, tmp_path: Path) -> None:
    other = tmp_path / "other.js"
    other.write_text("", encoding="utf-8")
    opened = open_page(written(tmp_path, ORDERLY.replace("</main>", '<script src="other.js"></script></main>')))
    assert opened.left() == [other.as_uri()]
    assert not no_requests_left(opened)
    opened.requests.clear()  # seen, and meant


def test_a_breach_of_the_policy_is_an_error(open_page: Open, tmp_path: Path) -> None:
    policy = """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">"""
    page = ORDERLY.replace("<title>", f"{policy}<title>").replace("</main>", "<script>1</script></main>")
    opened = open_page(written(tmp_path, page))
    assert len(opened.errors) == 1
    assert "Content Security Policy" in opened.errors[0]
    opened.expect_error("Content Security Policy")
    assert axe_violations(opened) == []  # looks in spite of it


def test_a_trap_for_the_keyboard_is_found(open_page: Open, tmp_path: Path) -> None:
    trap = (
        """<script>document.getElementById("copy").addEventListener("keydown", (e) => e.preventDefault());</script>"""
    )
    opened = open_page(written(tmp_path, ORDERLY.replace("</main>", f"{trap}</main>")))
    with pytest.raises(AssertionError, match="still on the page after 9 steps"):
        walk_by_keyboard(opened, most=9)


def test_times_are_of_what_is_done(open_page: Open, tmp_path: Path) -> None:
    opened = open_page(written(tmp_path, ORDERLY))
    busy = "const end = performance.now() + 30; while (performance.now() < end);"
    quick = redraw_milliseconds(opened, 'document.querySelector("#said").textContent = i;', times=5)
    slow = redraw_milliseconds(opened, busy, times=5)
    assert len(quick) == len(slow) == 5
    assert quick[0] < 30 <= slow[0]
    assert opened.page.inner_text("#said") == "4"
    assert 1 < frames_per_second(opened, busy, seconds=0.3) < 37  # 33 a second, and the one that was under way


def test_others_may_run_loops_of_their_own(chromium: Driver) -> None:
    """Playwright's loop is this thread's only while a test has pages open."""
    assert chromium.browser.is_connected()
    assert asyncio.run(asyncio.sleep(0, "done")) == "done"


def test_what_to_do_without_a_browser(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv(programs.NAMED, raising=False)
    monkeypatch.delenv(programs.WITHOUT, raising=False)
    monkeypatch.setattr(programs, "ELSEWHERE", ())
    assert programs.find_chromium() is None
    assert programs.main() == 1
    assert "there is no Chromium, Chrome or Edge on PATH: install one" in capsys.readouterr().err
    monkeypatch.setenv(programs.NAMED, "/nowhere/chromium")
    assert programs.main() == 1
    assert "JETTISON_BROWSER=/nowhere/chromium is no program" in capsys.readouterr().err
    monkeypatch.setenv(programs.NAMED, sys.executable)
    assert programs.find_chromium() == sys.executable
    monkeypatch.setenv(programs.NAMED, "/nowhere/chromium")
    monkeypatch.setenv(programs.WITHOUT, "1")
    assert programs.main() == 0


@pytest.mark.parametrize(("without", "outcome"), [("0", "1 error"), ("1", "1 skipped")])
def test_nothing_is_skipped_in_silence(without: str, outcome: str, tmp_path: Path) -> None:
    """Where there is no browser tests fail, unless the environment says that none is wanted."""
    probe = tmp_path / "test_probe.py"
    probe.write_text("from support.browser import chromium, open_page\n\n\ndef test_it(open_page):\n    pass\n")
    env = os.environ | {programs.NAMED: "/nowhere/chromium", programs.WITHOUT: without}
    env |= {"PYTHONPATH": str(Path(__file__).resolve().parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(probe)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path, check=False)
    assert outcome in done.stdout, done.stdout
