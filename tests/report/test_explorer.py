"""The explorer's page: one file, and panels whose numbers are the ledger's to the byte wherever a control stands."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import jettison.report.explorer
from jettison.cli.main import run
from jettison.families.presets import PRESETS
from jettison.report.explorer import PANELS, built, explorer_page
from jettison.report.explorer_closed_form import RANKS, SEQUENCES, closed_forms
from jettison.report.explorer_models import page_models
from jettison.report.explorer_plans import fit_data, segments_data
from jettison.report.explorer_steps import step_data
from jettison.report.page import page as whole_page
from predict.test_closed_form_node import POINTS_OF_A_DOCUMENT
from support.browser import (
    Open,
    OpenedPage,
    avoided_words,
    axe_violations,
    no_sideways_scroll,
    print_pdf,
    set_dark,
    settle,
    too_wide,
    walk_by_keyboard,
)
from support.closed_form import Reader, golden
from support.pages import page_data
from support.patience import PATIENCE

CLOSED_FORM = ("budget", "floor", "ranks", "trade", "ladder")
PANEL = [panel for panel in PANELS if panel.name in CLOSED_FORM]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The closed form's panels, about a model with grouped queries and the published GPTs."""
    path = tmp_path_factory.mktemp("explorer") / "explore.html"
    path.write_text(explorer_page(["llama3-8b"], panels=PANEL), encoding="utf-8")
    return path


# without a browser ----------------------------------------------------------------------------------------------------


def test_a_panel_is_called_as_its_figure() -> None:
    """Pictures of the pages are drawn by that name."""
    assets = Path(jettison.report.explorer.__file__).parent / "assets"
    for panel in PANELS:
        assert f'\n    id: "{panel.name}",' in (assets / panel.script).read_text(encoding="utf-8"), panel.name


def test_the_command_writes_one_small_file_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from jettison.cli.main import run; code = run(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    out = tmp_path / "page.html"
    command = [sys.executable, "-c", code, "explore", "llama3-70b", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert out.name in done.stderr
    assert out.stat().st_size < 1_000_000
    data = page_data(out.read_text(encoding="utf-8"))
    assert {"gpt-530b", "llama3-70b"} <= {layer["label"] for layer in data["closed-form"]["layers"]}


def test_a_page_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    out.write_text("mine", encoding="utf-8")
    assert run(["explore", "--out", str(out)]) == 2
    assert "--force" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == "mine"


def test_a_page_is_about_so_many_models_and_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for name in PRESETS if name != "gpt2"][:9]
    assert run(["explore", *names, "--out", str(tmp_path / "page.html")]) == 2
    assert "got 9 models; a page holds at most 8" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_what_several_processes_work_out_is_what_one_does() -> None:
    """Under the names of sets that take long stand short ones."""
    builders = {"front": fit_data, "time": segments_data, "step": step_data}
    assert list(one := built(builders, ["gpt2"])) == list(builders)
    assert built(builders, ["gpt2"], jobs=2) == one


def test_a_model_that_is_none_is_refused_before_anything_is_written(tmp_path: Path, capsys) -> None:
    assert run(["explore", "gpt-9000", "--out", str(tmp_path / "page.html")]) == 2
    assert "gpt-9000" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_every_position_of_the_controls_has_its_table() -> None:
    """All layers, choices, lengths, batches and ranks that the page offers: exactly one table holds for each."""
    data = closed_forms(page_models(["gemma2-9b", "gpt-22b"])[:2])
    missing = []
    for layer in data["layers"]:
        for key, tables in data["document"]["forms"][layer["form"]].items():
            if ("plain" not in key) and not layer["drops"]:
                continue
            for s in SEQUENCES[::3]:
                for b in (1, 2, 32):
                    for t in [t for t in layer["ranks"] if (t > 1) == (not key.endswith("one"))]:
                        read = Reader(data["document"], layer["sizes"] | {"s": s, "b": b, "t": t})
                        held = [i for i in tables if read.holds(data["document"]["tables"][i])]
                        if len(held) != 1:
                            missing.append((layer["label"], key, s, b, t, held))
    assert not missing


def test_ranks_are_those_over_which_a_model_divides() -> None:
    layers = {layer["label"]: layer["ranks"] for layer in closed_forms(page_models(["qwen2-7b"])[:1])["layers"]}
    assert layers == {"qwen2-7b": [1, 2, 4]}
    assert set(layers["qwen2-7b"]) < set(RANKS)


# in a browser ---------------------------------------------------------------------------------------------------------


def values(opened: OpenedPage) -> Mapping[str, Any]:
    """By panel, what its command line says and what its table shows."""
    script = """() => Object.fromEntries([...J.figures].map(([id, figure]) => {
      const details = figure.node.querySelector("details");
      const cells = (row) => [...row.children].map((cell) => cell.textContent);
      return [id, {command: figure.node.querySelector(".command code").textContent,
        caption: figure.node.querySelector(".caption").textContent,
        rows: [...details.querySelectorAll("tbody tr")].map(cells),
        columns: [...details.querySelectorAll("thead th")].map((cell) => cell.textContent)}];
    }))"""
    return opened.page.evaluate(script)


def show_numbers(opened: OpenedPage) -> None:
    opened.page.evaluate('() => document.querySelectorAll("details").forEach((d) => (d.open = true))')
    settle(opened)


def set_state(opened: OpenedPage, **state: object) -> None:
    texts = {key.replace("_", "-"): value for key, value in state.items()}
    opened.page.evaluate("(state) => { for (const [k, v] of Object.entries(state)) J.state.set(k, v); }", texts)
    settle(opened)


def ledger_bytes(command: str, capsys: pytest.CaptureFixture[str]) -> int:
    """What the command that a panel shows says of a layer in the middle."""
    program, *arguments = shlex.split(command)
    assert program == "jettison"
    capsys.readouterr()
    assert run([*arguments, "--format", "json"]) == 0
    layers = {row["layer"]: row["bytes"] for row in json.loads(capsys.readouterr().out)["layers"]}
    return int(layers["layers.1"])


def shown_bytes(panels: Mapping[str, Any], *, seq: int) -> dict[str, int]:
    """Of each panel the number that its command is there to reproduce."""

    def number(text: str) -> int:
        return int(text.replace(",", ""))

    def row(panel: str, *wanted: tuple[int, str]) -> list[str]:
        (found,) = [r for r in panels[panel]["rows"] if all(r[i] == text for i, text in wanted)]
        return found

    floor, ranks = panels["floor"]["rows"], panels["ranks"]["rows"]
    return {
        "budget": number(row("budget", (0, f"{seq:,}"))[1]),
        "floor": number(floor[-1][2]),
        "ranks": sum(number(r[3]) for r in ranks if r[2] != "sent by a rank"),
        "trade": number(row("trade", (0, f"{seq:,}"), (1, "selective"))[2]),
    }


STATES: list[dict[str, Any]] = [
    {},
    {"s": 32768, "b": 4, "t": 4, "sp": True},
    {"layer": 2, "s": 4096, "t": 16, "attention": "flash", "floor_mode": "selective"},
    {"layer": 0, "s": 128, "b": 2, "t": 8, "kernels": "pytorch", "precision": "fp32", "dropout": False},
    {"layer": 3, "s": 8192, "t": 8, "floor_mode": "full", "counting": "rerun", "precision": "fp8"},
]


def test_numbers_are_what_the_commands_say(open_page: Open, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = open_page(file)
    show_numbers(opened)
    for state in STATES:
        set_state(opened, **state)
        panels = values(opened)
        seq = opened.page.evaluate("Number(J.state.get('s', 2048))")
        for panel, expected in shown_bytes(panels, seq=seq).items():
            assert ledger_bytes(panels[panel]["command"], capsys) == expected, (state, panel, panels[panel]["command"])
        label = opened.page.evaluate("J.layers.data.layers[J.state.get('layer', 0)].label")
        (both,) = [r for r in panels["ladder"]["rows"] if r[0] == label and r[4] == "+ both"]
        assert ledger_bytes(panels["ladder"]["command"], capsys) == int(both[5].replace(",", ""))


def test_a_browser_reads_what_python_wrote(open_page: Open, tmp_path: Path) -> None:
    """The same points as node's test reads."""
    document, points, expected = golden()
    path = tmp_path / "ledger.html"
    data = {"golden": {"document": document, "points": points}}
    path.write_text(whole_page("Golden", intro="", scripts=["kit/ledger.js"], data=data), encoding="utf-8")
    opened = open_page(path)
    script = f"() => {{ const {{ document, points }} = J.data('golden'); {POINTS_OF_A_DOCUMENT} return figures; }}"
    assert opened.page.evaluate(script) == expected


def test_the_published_figures_are_there(open_page: Open, file: Path) -> None:
    """The explainer's numbers for GPT-3: a crossover near 870, 70 % attention, a floor of 10sbh, 18 % in all."""
    opened = open_page(file)
    show_numbers(opened)
    index = opened.page.evaluate("J.layers.data.layers.findIndex((l) => l.label === 'gpt-175b')")
    set_state(opened, layer=index, s=2048, b=1, t=1)
    panels = values(opened)
    assert "The two parts are equal at s = 871." in panels["budget"]["caption"]
    assert "70.2 %" in panels["budget"]["caption"]
    set_state(opened, t=8)
    panels = values(opened)
    floor = [r for r in panels["floor"]["rows"] if r[5] == "a copy on each rank"]
    total = sum(int(r[2].replace(",", "")) for r in floor)
    assert total == 10 * 2048 * 12288 + 16 * 2048  # and the norms' statistics
    (both,) = [r for r in panels["ladder"]["rows"] if r[0] == "gpt-175b" and r[4] == "+ both"]
    assert both[6] == "18.5 %"


def test_panels_by_keyboard_with_axe_at_two_widths_and_in_the_dark(open_page: Open, file: Path) -> None:
    opened = open_page(file)
    drawn = opened.page.evaluate(
        "() => [...document.querySelectorAll('.drawing')]"
        ".map((d) => [d.closest('section').id, d.querySelectorAll('svg').length])"
    )
    assert [name for name, _ in drawn] == list(CLOSED_FORM)
    assert all(count >= 1 for _, count in drawn)
    show_numbers(opened)
    assert axe_violations(opened) == avoided_words(opened) == []
    stops = walk_by_keyboard(opened)
    assert all(stop.name for stop in stops)
    hidden = [stop for stop in stops if not (stop.ring and stop.visible) and stop.tag not in ("g", "svg")]
    assert not hidden
    for width in (1440, 390):
        assert no_sideways_scroll(opened, width), too_wide(opened)
    set_dark(opened, True)
    assert axe_violations(opened) == []


def test_the_table_of_contents_leads_to_each_panel(open_page: Open, file: Path) -> None:
    opened = open_page(file.as_uri() + "#s=4096")
    opened.page.click("nav.toc a >> nth=2")
    assert opened.page.evaluate("document.activeElement.id") == "ranks-title"
    assert opened.page.evaluate("location.hash") == "#s=4096"
    titles = opened.page.evaluate("[...document.querySelectorAll('nav.toc a, main h2')].map((e) => e.textContent)")
    assert titles[: len(CLOSED_FORM)] == titles[len(CLOSED_FORM) :]


def test_a_slider_moves_by_keys_and_the_view_is_a_link(open_page: Open, file: Path, tmp_path: Path) -> None:
    opened = open_page(file)
    before = values(opened)["budget"]["command"]
    slider = opened.page.locator("#budget input[type=range]").first
    slider.focus()
    slider.press("ArrowRight")
    settle(opened)
    after = values(opened)["budget"]["command"]
    assert "--seq 2048" in before
    assert "--seq 4096" in after
    opened.page.wait_for_url(lambda url: "s=4096" in url)
    again = open_page(file.as_uri() + opened.page.evaluate("location.hash"))
    assert values(again)["budget"]["command"] == after
    assert print_pdf(opened, tmp_path / "page.pdf").stat().st_size > 10_000


def test_what_a_link_says_is_not_believed(open_page: Open, file: Path) -> None:
    """Whatever stands in the address, controls are where they can be, and nothing is thrown."""
    opened = open_page(file.as_uri() + "#layer=99&s=-3&b=1e99&t=7&attention=%3Cb%3E&kernels=x&floor-mode=y&counting=z")
    assert "undefined" not in opened.page.evaluate("document.querySelector('main').textContent")
    assert "--seq 128 " in values(opened)["budget"]["command"]
