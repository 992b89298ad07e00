"""The explorer's first panel in a browser: its bar, its ranges and its verdict are the ledger's, to the byte."""

from __future__ import annotations

import json
import random
import shlex
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from jettison.cli.main import run
from jettison.report.explorer import PANELS, explorer_page
from jettison.report.explorer_fit import described, key_of
from jettison.report.explorer_models import answered, run_of
from jettison.report.explorer_steps import StagePasses
from jettison.report.step_slices import step_slices
from jettison.spec.hardware import hardware
from support.browser import (
    Open,
    OpenedPage,
    avoided_words,
    axe_violations,
    no_sideways_scroll,
    set_dark,
    settle,
    too_wide,
    walk_by_keyboard,
)
from support.closed_form import Reader
from support.pages import page_data

MODELS = ("gemma2-2b", "mixtral-8x7b")
"""Beside the published GPTs: layers of two kinds, experts, grouped queries."""
SETTINGS = 12
PARTS = ("parameters", "gradients", "optimizer", "activations", "transients")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explorer") / "fit.html"
    path.write_text(explorer_page(MODELS, panels=PANELS[:1]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def data(file: Path) -> dict[str, Any]:
    return page_data(file.read_text(encoding="utf-8"))["will-it-fit"]


def choose(opened: OpenedPage, **state: object) -> dict[str, Any]:
    """Set controls, and return what the page shows: bytes of the bar's parts, the table, the verdict, the command."""
    opened.page.evaluate(
        "(state) => { for (const [k, v] of Object.entries(state)) J.state.set(`run-${k}`, v); }", state
    )
    opened.page.evaluate("document.querySelector('#will-it-fit details').open = true")
    settle(opened)
    return opened.page.evaluate(
        """() => {
          const panel = document.querySelector("#will-it-fit");
          const cells = (row) => [...row.children].map((cell) => cell.textContent);
          const rows = [...panel.querySelectorAll("tbody tr")].map(cells);
          return {
            parts: [...panel.querySelectorAll("rect[data-bytes]")].map((bar) => Number(bar.dataset.bytes)),
            rows: Object.fromEntries(rows.map(([name, ...rest]) => [name, rest])),
            verdict: panel.querySelector(".verdict strong").textContent.slice(2),
            command: panel.querySelector(".command code").textContent,
          };
        }"""
    )


def ledger(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    program, *arguments = shlex.split(command)
    assert program == "jettison"
    capsys.readouterr()
    code = run([*arguments, "--format", "json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (3 if found["verdict"] == "does not fit" else 0)
    return found


def number(text: str) -> int:
    return int(text.replace(",", ""))


def random_settings(found: dict[str, Any], rng: random.Random) -> dict[str, object]:
    names = ["bf16", "bf16", "fp32", "fp8"]
    return {
        "model": rng.randrange(len(found["models"])),
        "gpu": rng.choice([name for name, _ in found["gpus"]]),
        "s": rng.choice(found["sequences"][:8]),
        "b": rng.choice(found["micro_batches"]),
        "tp": rng.choice([1, 1, 2, 8, 64]),
        "pp": rng.choice([1, 1, 2, 8, 16]),
        "split": rng.choice(["even", "even", "1 less in the last", "2 less in the last", "1 less at both ends"]),
        "dp": rng.choice(found["replicas"]),
        "cp": rng.choice([1, 1, 2, 8]),
        "ep": rng.choice([1, 2, 8, 64]),
        "n": rng.choice([0, 0, 1, 2, 16]),
        "optimizer": rng.choice(["adamw", *found["optimizers"]]),
        "zero": rng.randrange(4),
        "recompute": rng.choice(found["modes"]),
        "precision": rng.choice(names),
        "lora": rng.choice([0, 0, 8, 64]),
        "base": rng.choice(found["bases"]),
    }


def test_the_bar_is_the_ledgers_to_the_byte(
    file: Path, data: dict[str, Any], open_page: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that the panel shows prints its peak, ranges and verdict, until each verdict came by chance."""
    opened, rng, verdicts = open_page(file), random.Random(41), set()
    for count in range(10 * SETTINGS):
        if count >= SETTINGS and len(verdicts) == 3:
            break
        setting = random_settings(data, rng)
        shown = choose(opened, **setting)
        said = ledger(shown["command"], capsys)
        assert sum(shown["parts"]) == said["peak_bytes"], (setting, shown["command"])
        for name in ("allocated", "reserved", "device"):
            ends = [said["figures"][f"{name}_bytes"][end] for end in ("expected", "low", "high")]
            assert [number(text) for text in shown["rows"][name]] == ends, shown["command"]
        assert shown["verdict"] == said["verdict"], shown["command"]
        assert number(shown["rows"][f"usable, {setting['gpu']}"][0]) == said["usable_bytes"]
        verdicts.add(shown["verdict"])
    assert verdicts == {"fits", "too close to call", "does not fit"}


@pytest.mark.parametrize(
    ("setting", "flags"),
    [
        ({"pp": 4, "dp": 8, "zero": 1}, {"pp": 4, "dp": 8, "zero": 1}),
        ({"pp": 1, "dp": 8, "zero": 3, "recompute": "full", "s": 8192}, {"dp": 8, "zero": 3, "recompute": "full"}),
        ({"pp": 2, "dp": 1, "zero": 0, "recompute": "none", "lora": 8}, {"pp": 2, "lora": "8", "precision": "bf16"}),
    ],
)
def test_the_parts_are_those_of_the_highest_moment(
    file: Path, data: dict[str, Any], open_page: Open, setting: dict[str, object], flags: dict[str, Any]
) -> None:
    names = [model["label"] for model in data["models"]]
    shown = choose(open_page(file), model=names.index("mixtral-8x7b"), b=2, **{"s": 8192, "cp": 1} | setting)
    device = hardware("h100-80gb")
    memory, time = answered(run_of("mixtral-8x7b", seq=8192, micro_batch=2, **flags), device)
    stage, slices = memory.worst, step_slices(memory, time)
    peak = StagePasses(memory, stage, slices[stage.index]).peak
    wanted = (stage.load.fixed, peak.gradients, stage.load.state, peak.held, peak.transient)
    assert dict(zip(PARTS, shown["parts"], strict=True)) == dict(zip(PARTS, wanted, strict=True))


def test_every_position_of_the_controls_has_its_table(data: dict[str, Any]) -> None:
    found = data
    missing = []
    for model, precision, t, cp, ep, (rank, base), again in product(
        found["models"],
        found["precisions"],
        (1, 2, 64),
        found["contexts"],
        (1, 2, 8),
        product(found["adapters"], found["bases"]),
        (False, True),
    ):
        if t not in model["ranks"] or ep not in model["expert_ranks"]:
            continue
        if not described(precision, rank, base) or (rank and ep > 1) or (again and not rank):
            continue
        lengths = [s for s in found["sequences"][::4] if s <= model["longest"]]
        for s, b, kind in product(lengths, found["micro_batches"], model["kinds"]):
            layout = {"t": t, "cp": cp, "ep": ep, "R": rank or 1}
            read = Reader(found["document"], kind["sizes"] | {"s": s, "b": b} | layout)
            tables = found["document"]["forms"][kind["form"]][key_of(precision, t, cp, ep, rank, base, again)]
            held = [i for i in tables if read.holds(found["document"]["tables"][i])]
            if len(held) != 1:
                missing.append((model["label"], precision, s, b, t, cp, ep, rank, held))
    assert not missing


def test_what_a_model_does_not_divide_over_is_said(file: Path, open_page: Open) -> None:
    opened = open_page(
        f"{file.resolve().as_uri()}#run-model=0&run-tp=64&run-pp=2&run-lora=8&run-precision=fp8&run-zero=x"
    )
    caption = opened.page.inner_text("#will-it-fit .caption")
    assert "TP 8 (heads do not divide over 64 ranks), bf16 (under LoRA)." in caption
    assert "--tp 8 --pp 2 " in opened.page.inner_text("#will-it-fit .command code")


def test_widths_names_and_contrast(file: Path, open_page: Open) -> None:
    opened = open_page(file)
    for width, dark in ((1440, False), (390, True)):
        set_dark(opened, dark)
        assert no_sideways_scroll(opened, width), too_wide(opened)
        assert axe_violations(opened) == avoided_words(opened) == []
    stops = walk_by_keyboard(opened)
    assert all(stop.name and stop.visible for stop in stops), stops
