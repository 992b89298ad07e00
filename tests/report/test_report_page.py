"""The report in a browser: every figure is there, says the document's numbers, and can be read by keyboard."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jettison.cli.main import run
from jettison.cli.report import report
from jettison.report import page as page_module
from jettison.report.page import page
from support.browser import (
    Open,
    OpenedPage,
    axe_violations,
    no_sideways_scroll,
    print_pdf,
    settle,
    too_wide,
    walk_by_keyboard,
)
from support.chromium import find_chromium
from support.patience import PATIENCE
from support.report_cases import HOSTILE, proof, run_log

FIGURES = ["budget", "phases", "timeline", "layers", "tensors", "time"]


def written(folder: Path, *texts: str) -> Path:
    """The report about these documents, in a file."""
    paths = []
    for number, text in enumerate(texts):
        paths.append(folder / f"{number}.json")
        paths[-1].write_text(text, encoding="utf-8")
    target = folder / "report.html"
    target.write_text(report(paths).html(), encoding="utf-8")
    return target


def figures(opened: OpenedPage) -> list[str]:
    return opened.page.evaluate("[...J.figures.keys()]")


def until(opened: OpenedPage, script: str) -> None:
    """Wait for something to be so: the page's policy keeps playwright from waiting inside of it."""
    deadline = time.monotonic() + PATIENCE
    while not opened.page.evaluate(script):
        assert time.monotonic() < deadline, script
        opened.page.wait_for_timeout(20)


def numbers(opened: OpenedPage, figure: str) -> list[list[str]]:
    """Cells of its table, which is made when it is opened."""
    opened.page.locator(f"#{figure} summary").click()
    rows = opened.page.locator(f"#{figure} details tbody tr")
    rows.first.wait_for()
    return [row.locator("td").all_inner_texts() for row in rows.all()]


def test_a_proof_is_drawn_with_its_numbers(tmp_path: Path, open_page: Open) -> None:
    opened = open_page(written(tmp_path, proof().to_json()))
    assert figures(opened) == FIGURES
    for name in FIGURES:
        assert opened.page.locator(f"#{name} .drawing svg").count() >= 1, name
    assert numbers(opened, "budget")[:2] == [["budget", "9,000", "8.79 KiB"], ["predicted peak", "8,900", "8.69 KiB"]]
    assert ["backward", "measured", "8,750", "8.54 KiB"] in numbers(opened, "phases")
    assert opened.page.locator("#layers .caption").inner_text() == (
        "All 5 layers held what was predicted, to the byte."
    )
    assert numbers(opened, "layers")[0][:5] == ["layers.0", "per-tensor", "7,680", "1,536", "1,536"]
    grid = {row[0]: row[5:] for row in numbers(opened, "tensors")}
    assert grid["activation input"] == ["recomputed", "kept", "kept", "kept"]
    assert grid["softmax output"] == ["offloaded", "kept", "kept", "kept"]
    highs = [int(row[4].replace(",", "")) for row in numbers(opened, "timeline") if row[0] == "measured"]
    assert max(highs) == 8800


def test_the_grid_is_walked_with_arrow_keys(tmp_path: Path, open_page: Open) -> None:
    opened = open_page(written(tmp_path, proof().to_json()))
    opened.page.locator("#tensors .drawing [tabindex='0']").focus()

    def here() -> str:
        return opened.page.evaluate("document.activeElement.getAttribute('aria-label')").splitlines()[0]

    assert here() == "linear input of mlp in layers.0: kept"
    opened.page.keyboard.press("ArrowDown")
    assert here() == "activation input of mlp in layers.0: recomputed"
    assert opened.page.locator(".tip").inner_text().startswith(here())
    opened.page.keyboard.press("ArrowRight")
    assert here() == "activation input of mlp in layers.1: kept"
    opened.page.keyboard.press("End")
    assert here() == "shared input of mlp in layers.3: shared"
    assert opened.page.locator("#tensors .drawing [tabindex='0']").count() == 1


def test_two_proofs_are_compared(tmp_path: Path, open_page: Open) -> None:
    other = proof(measured=8700)
    kept = replace(other.layers[0], kept=(0, 1, 2, 3), offloaded=(), packed=())
    other = replace(other, layers=(kept, *other.layers[1:]), step_time_ratio=1.1)
    opened = open_page(written(tmp_path, proof().to_json(), other.to_json()))
    assert "3 differ between the two documents" in opened.page.locator("#tensors .caption").inner_text()
    assert [row[0] for row in numbers(opened, "time")] == ["A", "B"]
    opened.page.select_option("#tensors select", "1-0")
    flipped = opened.page.locator("#tensors [aria-label*='activation input']").first.get_attribute("aria-label")
    assert flipped is not None
    assert "recomputed in A" in flipped
    until(opened, "location.hash.includes('grid=1-0')")
    again = open_page(f"{opened.page.url}")
    assert again.page.locator("#tensors select").input_value() == "1-0"


def test_a_run_has_its_curves(tmp_path: Path, open_page: Open) -> None:
    target = tmp_path / "report.html"
    target.write_text(report([run_log(tmp_path / "run")]).html(), encoding="utf-8")
    opened = open_page(target)
    assert figures(opened) == ["budget", "phases", "timeline", "layers", "tensors", "loss", "seconds", "peaks"]
    assert numbers(opened, "loss")[:2] == [["1", "4.000000"], ["2", "2.000000"]]
    assert len(numbers(opened, "peaks")) == 2


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_described_plan_says_what_its_peak_is_made_of(tmp_path: Path, open_page: Open, dark: bool) -> None:
    flags = ["llama3-8b", "--gpu", "h100-80gb", "--dp", "8", "--zero", "3", "--seq", "8192", "--budget", "40GiB"]
    assert run(["plan", *flags, "--what-if", "--out", str(tmp_path / "plan.json")]) == 0
    document = json.loads((tmp_path / "plan.json").read_text())
    target = tmp_path / "r.html"
    target.write_text(report([tmp_path / "plan.json"]).html(), encoding="utf-8")
    opened = open_page(target, dark=dark)
    assert figures(opened) == ["budget", "roles", "layers", "tensors"]  # one stage is no figure of its own
    assert [row[0] for row in numbers(opened, "roles")] == list(document["peak_roles"])
    assert opened.page.locator("#does-0 tbody tr").count() < len(document["layers"])
    assert opened.page.locator("#next-0 tbody tr").count() == len(document["what_if"])
    assert axe_violations(opened) == []
    for width in (1440, 390):
        assert no_sideways_scroll(opened, width), too_wide(opened)
    opened.page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    settle(opened)
    wider = "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth)"
    assert (
        opened.page.evaluate(f"{wider}.map((e) => e.ariaLabel)") == []
    )  # on a telephone a row is a list of its values
    assert axe_violations(opened) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_everybody_can_read_it(tmp_path: Path, open_page: Open, dark: bool) -> None:
    opened = open_page(written(tmp_path, proof().to_json(), proof(measured=8700).to_json()), dark=dark)
    assert axe_violations(opened) == []
    for width in (390, 1440):
        assert no_sideways_scroll(opened, width), too_wide(opened)
    stops = walk_by_keyboard(opened)
    saving = [stop.name for stop in stops if stop.name.startswith("Save ")]
    assert len(saving) == 3 * len(FIGURES)
    assert all(stop.visible and (stop.ring or stop.role == "img") for stop in stops), stops


def test_names_run_nothing(tmp_path: Path, open_page: Open) -> None:
    hostile = replace(proof(name=HOSTILE), environment={HOSTILE: HOSTILE}, left_out=HOSTILE)
    hostile = replace(hostile, tensors=tuple(replace(t, role=HOSTILE, path=HOSTILE) for t in hostile.tensors))
    opened = open_page(written(tmp_path, hostile.to_json()))
    assert figures(opened) == FIGURES
    assert opened.page.locator("img").count() == 0
    assert opened.page.evaluate("typeof boom") == "undefined"
    for name in FIGURES:
        opened.page.locator(f"#{name} summary").click()
    assert opened.page.locator("main img, main script").count() == 0


def test_figures_are_saved_as_they_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chromium: object) -> None:
    program = find_chromium()
    monkeypatch.setattr(page_module, "find_browser", lambda: program)
    html = written(tmp_path, proof().to_json()).read_text(encoding="utf-8")
    paths = page_module.save_figures(html, tmp_path / "figs")
    assert {path.name for path in paths} == {f"{name}.{kind}" for name in FIGURES for kind in ("svg", "png")}
    for name in FIGURES:
        drawn = ElementTree.fromstring((tmp_path / "figs" / f"{name}.svg").read_text(encoding="utf-8"))
        text = ElementTree.tostring(drawn, encoding="unicode")
        assert "var(--" not in text, name
        assert drawn.find("{http://www.w3.org/2000/svg}title").text  # type: ignore[union-attr]
        png = (tmp_path / "figs" / f"{name}.png").read_bytes()
        assert png[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", png[16:24]) == (2 * int(drawn.get("width", "0")), 2 * int(drawn.get("height", "0")))


def test_it_prints(tmp_path: Path, open_page: Open) -> None:
    opened = open_page(written(tmp_path, proof().to_json()))
    assert print_pdf(opened, tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    opened.page.emulate_media(media="print", color_scheme="dark")
    assert not opened.page.locator("#budget .buttons").is_visible()
    assert opened.page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"


# the kit --------------------------------------------------------------------------------------------------------------

PANEL = """
J.figure({
  id: "one", title: "One", caption: (v) => `s is ${v.s}`,
  controls: [
    J.slider({ key: "s", label: "sequence", values: [512, 1024, 2048], value: 1024 }),
    J.slider({ key: "n", label: "count", min: 1, max: 9, step: 2, value: 5 }),
    J.select({ key: "m", label: "model", options: ["a", { value: "b", label: "B" }], value: "a" }),
    J.toggle({ key: "p", label: "parallel", value: true }),
  ],
  draw: (v) => J.plot({
    y: J.byteAxis("bytes", v.s),
    marks: [Plot.barY([v.s], { x: () => 1, y: (d) => d, fill: J.marks.hatch(1, J.color(0)) })],
  }),
  table: (v) => ({ columns: ["s", "n"], rows: [[v.s, v.n]] }),
  command: (v) => `jettison ledger x --seq ${v.s}`,
});
globalThis.values = () => JSON.stringify(J.figures.get("one").values());
"""


@pytest.fixture
def panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_page: Open) -> Callable[[str], OpenedPage]:
    """A page with one panel that has every control, opened with a hash."""
    from jettison.report import page as kit

    known = kit.asset
    monkeypatch.setattr(kit, "asset", lambda name: PANEL if name == "one" else known(name))
    target = tmp_path / "panel.html"
    target.write_text(page("Panel", intro="", scripts=["one"], data={"x": 1}), encoding="utf-8")
    return lambda hash_: open_page(f"{target.as_uri()}{hash_}")


@pytest.mark.parametrize(
    ("hash_", "expected"),
    [
        ("", {"s": 1024, "n": 5, "m": "a", "p": True}),
        ("#s=2048&n=7&m=b&p=0", {"s": 2048, "n": 7, "m": "b", "p": False}),
        ("#s=1e99&n=-5&m=%3Cscript%3E&p=yes", {"s": 2048, "n": 1, "m": "a", "p": False}),
        ("#s=NaN&n=8.2&m=__proto__", {"s": 1024, "n": 9, "m": "a", "p": True}),
    ],
)
def test_a_url_sets_only_what_a_control_could(
    panel: Callable[[str], OpenedPage], hash_: str, expected: dict[str, object]
) -> None:
    assert json.loads(panel(hash_).page.evaluate("values()")) == expected


def test_controls_redraw_and_make_a_link(panel: Callable[[str], OpenedPage]) -> None:
    opened = panel("")
    opened.page.get_by_label("sequence").focus()
    opened.page.keyboard.press("ArrowRight")
    assert opened.page.locator("#one .caption").inner_text() == "s is 2048"
    assert opened.page.locator("#one code").inner_text() == "jettison ledger x --seq 2048"
    opened.page.get_by_label("parallel").uncheck()
    until(opened, "location.hash === '#s=2048&p=0'")
    opened.page.evaluate("location.hash = '#s=512'")
    until(opened, "document.querySelector('#one .caption').textContent === 's is 512'")
    assert opened.page.get_by_label("sequence").get_attribute("aria-valuetext") == "512"
    assert opened.page.locator("#one pattern").count() == 1


def test_quantities_read_as_they_do_in_python(panel: Callable[[str], OpenedPage]) -> None:
    from jettison.core import units

    opened = panel("")
    kinds = {
        "bytes": (units.format_bytes, [0, 1023, 1024, 1048575, -5 * 2**30, 2**52 + 1, 10**15]),
        "seconds": (units.format_seconds, [0.0, 5e-7, 0.5, 59.994, 60, 3599.6, 86400.0, -0.25]),
        "count": (units.format_count, [0, 999, 12345, 999_999, 8_030_261_248, 10**13]),
        "flops": (units.format_flops, [0, 999, 1000, 3.21e12, 1e25]),
        "percent": (units.format_percent, [0.0, 0.034, 1.5]),
        "ratio": (units.format_ratio, [0.0, 1.234]),
    }
    for name, (ours, values) in kinds.items():
        theirs = opened.page.evaluate(f"(values) => values.map((v) => J.format.{name}(v))", values)
        assert theirs == [ours(value) for value in values], name  # type: ignore[operator]


def test_csv_holds_no_formulas(panel: Callable[[str], OpenedPage]) -> None:
    script = """() => J.save.csv({ columns: ["a", { label: "b" }], rows: [["=1+1", -3], ['say "x", y', null]] })"""
    assert panel("").page.evaluate(script) == 'a,b\n\'=1+1,-3\n"say ""x"", y",\n'
