"""A real browser for tests of pages: one Chromium for a test process, a fresh profile for each page.

A page records what its console says, what it throws and what it asks for; where a test ends and there was an error, or
a request that left the page's own origin, the test fails. Nothing here uses the network: `file:` and loopback alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from support.chromium import WITHOUT, find_chromium, needed
from support.words import avoided

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

FLAGS = (
    "--no-sandbox",  # root in a container has no other way
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LOAD_MILLISECONDS = 120_000
"""Machines are busy; only what hangs is not there by then."""
AXE_TAGS = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")
INSIDE = ("data", "blob", "about")

Open = Callable[..., "OpenedPage"]


@dataclass(kw_only=True)
class OpenedPage:
    """A page of the browser, and all that it said and asked for. ``page`` is playwright's."""

    page: Page
    origin: str
    errors: list[str] = field(default_factory=list)
    """What the console showed as an error or a warning (a breach of the CSP is one), and what was thrown."""
    requests: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()

    def expect_error(self, part: str) -> None:
        """Errors with this text are what the test is about."""
        self.expected = (*self.expected, part)

    def left(self) -> list[str]:
        """Requests that went elsewhere than to the page's own file or origin."""
        return [url for url in self.requests if urlsplit(url).scheme not in INSIDE and not _within(url, self.origin)]

    def unexpected(self) -> list[str]:
        """Errors that nobody expected."""
        return [error for error in self.errors if not any(part in error for part in self.expected)]


def _within(url: str, origin: str) -> bool:
    parts = urlsplit(url)
    return (url.partition("#")[0] if parts.scheme == "file" else f"{parts.scheme}://{parts.netloc}") == origin


# fixtures -------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Driver:
    """The browser of a test process. Playwright's loop is this thread's running one only while a test has pages."""

    browser: Browser
    loop: asyncio.AbstractEventLoop | None = None

    def park(self) -> None:
        """Other tests may run loops of their own."""
        self.loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)

    def resume(self) -> None:
        """What playwright expects to find."""
        asyncio._set_running_loop(self.loop)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Driver]:
    """One headless Chromium; where there is none the test fails, unless the environment says that none is wanted."""
    if os.environ.get(WITHOUT) == "1":
        pytest.skip(f"{WITHOUT}=1")
    program = find_chromium()
    if program is None:
        pytest.fail(needed(), pytrace=False)
    if find_spec("playwright") is None:
        pytest.fail("no playwright: run `make setup` again (or pip install -e '.[dev]')", pytrace=False)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, headless=True, args=list(FLAGS))
        driver = Driver(browser=browser)
        driver.park()
        yield driver
        driver.resume()
        browser.close()


@pytest.fixture
def open_page(chromium: Driver) -> Iterator[Open]:
    """``open_page(target, width=1440, height=900, dark=False)``: an HTML file or a URL, loaded.

    When the test ends each page has to be without unexpected errors, and nothing may have left its origin.
    """
    chromium.resume()
    contexts: list[BrowserContext] = []
    opened: list[OpenedPage] = []

    def open_one(target: Path | str, *, width: int = 1440, height: int = 900, dark: bool = False) -> OpenedPage:
        context = chromium.browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        contexts.append(context)
        found = _load(context, target.resolve().as_uri() if isinstance(target, Path) else target)
        opened.append(found)
        return found

    try:
        yield open_one
        for one in opened:
            assert not one.unexpected(), one.unexpected()
            assert no_requests_left(one), one.left()
    finally:
        for context in contexts:
            context.close()
        chromium.park()


def _load(context: BrowserContext, url: str) -> OpenedPage:
    page = context.new_page()
    page.set_default_timeout(LOAD_MILLISECONDS)
    parts = urlsplit(url)
    origin = url.partition("#")[0] if parts.scheme == "file" else f"{parts.scheme}://{parts.netloc}"
    found = OpenedPage(page=page, origin=origin)
    page.on("console", lambda m: found.errors.append(f"{m.type}: {m.text}") if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: found.errors.append(f"thrown: {error}"))
    page.on("crash", lambda _page: found.errors.append("the page crashed"))
    page.on("request", lambda request: found.requests.append(request.url))
    page.goto(url, wait_until="load")
    return found


# what a page is asked -------------------------------------------------------------------------------------------------


def no_requests_left(opened: OpenedPage) -> bool:
    """Whether all that it asked for was its own file or origin, data or blobs."""
    return not opened.left()


def axe_violations(opened: OpenedPage, *, within: str | None = None, leave_out: tuple[str, ...] = ()) -> list[str]:
    """What axe-core finds against WCAG 2.2 A and AA and its best practices: a line for each node.

    Args:
        within: a CSS selector, to look at one part.
        leave_out: rules by their id, such as "region".
    """
    import axe_playwright_python

    # evaluated by the debugger, to which the page's CSP does not apply
    opened.page.evaluate((Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    options = {
        "runOnly": {"type": "tag", "values": AXE_TAGS},
        "rules": {rule: {"enabled": False} for rule in leave_out},
        "resultTypes": ["violations"],
    }
    script = "([within, options]) => axe.run(within ?? document, options)"
    found = opened.page.evaluate(script, [within, options])["violations"]
    return [
        f"{rule['id']}: {rule['help']}: {node['html'][:200]} ({' '.join(node['failureSummary'].split())})"
        for rule in found
        for node in rule["nodes"]
    ]


def avoided_words(opened: OpenedPage) -> list[str]:
    """Shown texts that avoid the field's terms, in drawings, choices and labels as well."""
    script = """() => {
        const texts = [], all = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        while (all.nextNode()) {
            if (!all.currentNode.parentElement.closest("script, style, code")) texts.push(all.currentNode.data);
        }
        for (const one of document.querySelectorAll("[aria-label]")) texts.push(one.getAttribute("aria-label"));
        return texts.map((one) => one.replaceAll("\\n", " "));
    }"""
    return avoided("\n".join(opened.page.evaluate(script)))


def no_sideways_scroll(opened: OpenedPage, width: int) -> bool:
    """Whether the page at this width can be read without scrolling sideways. The width stays."""
    height = (opened.page.viewport_size or {"height": 900})["height"]
    opened.page.set_viewport_size({"width": width, "height": height})
    settle(opened)
    return opened.page.evaluate("document.documentElement.scrollWidth") <= width


def too_wide(opened: OpenedPage) -> list[str]:
    """Elements that reach beyond the right edge: for the message of a test that `no_sideways_scroll` fails."""
    script = """() => [...document.body.querySelectorAll("*")]
        .filter((e) => e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
        .map((e) => `${e.tagName.toLowerCase()}#${e.id}.${e.getAttribute("class") ?? ""}`).slice(0, 20)"""
    return opened.page.evaluate(script)


def settle(opened: OpenedPage) -> None:
    """Wait until what was changed has been laid out and painted: two frames."""
    opened.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def screenshot(opened: OpenedPage, path: Path, *, of: str | None = None) -> Path:
    """The whole page, or one element by its selector, as a PNG."""
    settle(opened)
    if of is None:
        opened.page.screenshot(path=path, full_page=True)
    else:
        opened.page.locator(of).screenshot(path=path)
    return path


def set_dark(opened: OpenedPage, dark: bool) -> None:
    """What `prefers-color-scheme` answers from now on."""
    opened.page.emulate_media(color_scheme="dark" if dark else "light")
    settle(opened)


def print_pdf(opened: OpenedPage, path: Path) -> Path:
    """What the printer would get, on A4."""
    opened.page.pdf(path=path, format="A4")
    return path


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Where Tab stopped. ``ring``: whether something shows the focus (an outline, a shadow or a border of its own)."""

    tag: str
    id: str
    role: str
    name: str
    ring: bool
    visible: bool


_STOP = """() => {
  const e = document.activeElement;
  if (!e || e === document.body || e === document.documentElement) return null;
  const s = getComputedStyle(e), box = e.getBoundingClientRect();
  const label = e.labels?.length ? e.labels[0].textContent : null;
  return {
    tag: e.tagName.toLowerCase(), id: e.id, role: e.getAttribute("role") ?? "",
    name: (e.getAttribute("aria-label") ?? label ?? e.textContent ?? "").trim().replace(/\\s+/g, " ").slice(0, 80),
    ring: (s.outlineStyle !== "none" && parseFloat(s.outlineWidth) > 0) || s.boxShadow !== "none",
    visible: box.width > 0 && box.height > 0 && s.visibility === "visible",
  };
}"""


def walk_by_keyboard(opened: OpenedPage, *, most: int = 500) -> list[Stop]:
    """Press Tab from the top of the page until the focus leaves it: all stops, in their order.

    Raises:
        AssertionError: the focus does not come out (a trap), or there are more than ``most`` stops.
    """
    opened.page.evaluate("() => { document.activeElement?.blur(); window.scrollTo(0, 0); }")
    opened.page.evaluate("() => getSelection().setPosition(document.body, 0)")
    stops: list[Stop] = []
    for _ in range(most):
        opened.page.keyboard.press("Tab")
        found = opened.page.evaluate(_STOP)
        if found is None:
            return stops
        stops.append(Stop(**found))
    raise AssertionError(f"the focus is still on the page after {most} steps; the last ones: {stops[-3:]}")


def redraw_milliseconds(opened: OpenedPage, change: str, *, times: int = 10) -> list[float]:
    """How long each of ``times`` changes takes until it is laid out, sorted.

    Args:
        change: the body of a JavaScript function of ``i``, such as ``document.querySelector("#x").value = i``.
    """
    script = f"""async (times) => {{
      const change = async (i) => {{ {change} }};
      const took = [];
      for (let i = 0; i < times; i++) {{
        await new Promise(requestAnimationFrame);
        const begin = performance.now();
        await change(i);
        document.body.getBoundingClientRect(); // lay out now
        took.push(performance.now() - begin);
      }}
      return took.sort((a, b) => a - b);
    }}"""
    return opened.page.evaluate(script, times)


def frames_per_second(opened: OpenedPage, change: str = "", *, seconds: float = 1.0) -> float:
    """Frames a second while ``change``, the body of a function of the frame's number ``i``, runs in each of them."""
    script = f"""(seconds) => new Promise((done) => {{
      const change = (i) => {{ {change} }};
      let begin = null, frames = 0;
      const frame = (now) => {{
        begin ??= now;
        if (now - begin >= seconds * 1000) return done(frames / ((now - begin) / 1000));
        change(frames++);
        requestAnimationFrame(frame);
      }};
      requestAnimationFrame(frame);
    }})"""
    return opened.page.evaluate(script, seconds)
