"""The explorer's panels about plans, schedules and prices in a browser: they draw, and show what Python worked out."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jettison.core.units import format_bytes, format_seconds
from jettison.report.explorer import PANELS as EVERY
from jettison.report.explorer_models import answered, run_of
from jettison.report.explorer_plans import fit_data, front_data, offload_data, segments_data
from jettison.report.explorer_steps import LAYOUTS, MODEL, StagePasses, step_data, time_data
from jettison.report.page import json_for_html, page
from jettison.report.step_slices import step_slices
from jettison.spec.hardware import hardware
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

BUILDERS = {
    "time": time_data,
    "step": step_data,
    "front": front_data,
    "segments": segments_data,
    "offload": offload_data,
    "fit": fit_data,
}
PANELS = tuple(BUILDERS)


@cache
def data() -> dict[str, Any]:
    return {name: build() for name, build in BUILDERS.items()}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = page("Plans", intro="", scripts=[panel.script for panel in EVERY if panel.name in PANELS], data=data())
    found = tmp_path_factory.mktemp("explorer") / "plans.html"
    found.write_text(text, encoding="utf-8")
    return found


def choose(opened: OpenedPage, key: str, value: object) -> None:
    opened.page.evaluate("([key, value]) => J.state.set(key, value)", [key, value])
    settle(opened)


def command(opened: OpenedPage, panel: str) -> str:
    return opened.page.inner_text(f"#{panel} .command code")


def test_the_data_are_small(file: Path) -> None:
    assert len(json_for_html(data()).encode()) < 200_000
    assert file.stat().st_size < 1_000_000


def test_every_panel_draws_whatever_is_chosen(file: Path, open_page: Open) -> None:
    """Errors of the console fail the test where the page is closed."""
    opened = open_page(file)
    options = "(id) => [...document.querySelectorAll(`#${id} select`)].map((s) => s.options.length)"
    for panel in PANELS:
        for number, count in enumerate(opened.page.evaluate(options, panel)):
            for choice in range(count):
                opened.page.evaluate(
                    """([id, number, choice]) => {
                        const select = document.querySelectorAll(`#${id} select`)[number];
                        select.selectedIndex = choice;
                        select.dispatchEvent(new Event("change"));
                    }""",
                    [panel, number, choice],
                )
                settle(opened)
                drawn = opened.page.evaluate("(id) => document.querySelectorAll(`#${id} .drawing svg *`).length", panel)
                assert drawn > 20, (panel, number, choice)
                assert command(opened, panel).startswith("jettison "), (panel, number, choice)
                text = opened.page.inner_text(f"#{panel}")
                assert "NaN" not in text and "undefined" not in text, (panel, number, choice)


@cache
def played(index: int) -> tuple[StagePasses, ...]:
    memory, time = answered(run_of(MODEL, **[*LAYOUTS.values()][index]), hardware("h100-80gb"))
    slices = step_slices(memory, time)
    return tuple(StagePasses(memory, stage, slices[stage.index]) for stage in memory.stages)


def test_the_steps_bytes_are_pythons_to_the_byte(file: Path, open_page: Open) -> None:
    layouts = open_page(file).page.evaluate(
        """() => J.data("step").layouts.map((layout) => layout.stages.map((stage) => [0, 1].map((step) =>
            J.stepPanel.instants(stage).map((i) => [i.start, i.end, ...J.stepPanel.partsOf(i, step)]))))"""
    )
    assert len(layouts) == len(LAYOUTS)
    pairs = [pair for i, found in enumerate(layouts) for pair in zip(played(i), found, strict=True)]
    for stage, (first, later) in pairs:
        assert len(later) == len(stage.instants)
        for mine, theirs, before in zip(stage.instants, later, first, strict=True):
            fixed, state = stage.load.fixed, stage.load.state
            assert theirs[2:] == [fixed, state, mine.gradients, mine.held, mine.transient]
            assert theirs[0] <= theirs[1]
            assert sum(before[2:]) == fixed + mine.nbytes + (state if mine.one is None else 0)


def test_the_breakdown_of_the_peak(file: Path, open_page: Open) -> None:
    opened = open_page(file)
    opened.page.click("#step details summary")
    worst = max(played(0), key=lambda stage: stage.peak.nbytes)
    text = opened.page.inner_text("#step table")
    total = worst.load.fixed + worst.load.state + worst.peak.nbytes
    for nbytes in (total, worst.load.fixed, worst.load.state, worst.peak.transient):
        assert f"({nbytes}B)" in text
    assert f", {format_bytes(total)}" in opened.page.inner_text("#step .drawing")


def test_a_budget_shows_its_plan(file: Path, open_page: Open) -> None:
    opened = open_page(file)
    sweep = data()["front"]["models"][0]["ways"][1]
    points = sweep["points"]
    slider = opened.page.locator("#front input[type=range]")
    slider.focus()
    for number in (12, 13):  # one step by keyboard after the other
        choose(opened, "front-budget", points[number - 1]["budget"])
        slider.press("ArrowRight")
        settle(opened)
        here, after = points[number], points[number + 1]
        said = opened.page.inner_text("#front-price")
        gib = (after["budget"] - here["budget"]) / 2**30
        assert f"At {format_bytes(here['budget'])} a step takes {format_seconds(here['seconds'])}" in said
        assert f"worth {format_seconds((here['seconds'] - after['seconds']) / gib)} a step" in said
        assert command(opened, "front") == f"{sweep['command']} --budget {here['budget']}B"
        shown = opened.page.evaluate(
            "() => [...document.querySelectorAll('#front [data-text]')].map((n) => n.dataset.text)"
        )
        first = sweep["patterns"][here["grid"][0][1]]
        words = {"k": "kept", "a": "recomputed", "h": "offloaded"}
        for tensor, letter in zip(sweep["tensors"], first, strict=True):
            assert any(t.startswith(f"{tensor['name']}, ") and f"\n{words[letter]} in layers.0" in t for t in shown)


def test_marks_are_read_by_keyboard(file: Path, open_page: Open) -> None:
    opened = open_page(file)
    first = opened.page.locator("#step .drawing [tabindex='0']").first
    first.focus()
    assert "stage 0, micro-batch 0: forward" in opened.page.inner_text(".tip")
    first.press("ArrowRight")
    assert "micro-batch 1: forward" in opened.page.inner_text(".tip")
    first.press("End")
    stops = walk_by_keyboard(opened)
    assert all(stop.name for stop in stops), [stop for stop in stops if not stop.name]
    assert all(stop.visible for stop in stops), [stop for stop in stops if not stop.visible]


def test_widths_contrast_and_names(file: Path, open_page: Open, tmp_path: Path) -> None:
    """Every width and both schemes are looked at, wide in the light and narrow in the dark."""
    opened = open_page(file)
    assert no_sideways_scroll(opened, 1440), too_wide(opened)
    assert axe_violations(opened) == avoided_words(opened) == []
    assert no_sideways_scroll(opened, 390), too_wide(opened)
    set_dark(opened, True)
    assert axe_violations(opened) == []
    assert print_pdf(opened, tmp_path / "plans.pdf").stat().st_size > 10_000


def test_a_view_is_a_link(file: Path, open_page: Open) -> None:
    wanted = data()["step"]["layouts"][3]["name"]
    opened = open_page(f"{file.resolve().as_uri()}#step-layout={wanted}&fit-mode=none&front-budget=none")
    assert opened.page.locator("#step select").first.input_value() == wanted
    assert "--schedule gpipe" in command(opened, "step")
    assert command(opened, "fit").endswith("--recompute none")
