"""The explorer's panels about plans, schedules and prices: their data are what the commands beside them answer."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jettison.cli.main import run
from jettison.core.units import GIB
from jettison.predict.forecast import forecast
from jettison.report import explorer_steps
from jettison.report.explorer_models import answered, run_of, usual_layout
from jettison.report.explorer_plans import budgets, fit_data, front_data, offload_data, segments_data
from jettison.report.explorer_steps import ITERATIONS, LAYOUTS, MODEL, StagePasses, step_data, time_data
from jettison.report.step_slices import step_slices
from jettison.spec.device_allowance import FitVerdict
from jettison.spec.hardware import hardware
from support.patience import PATIENCE

FACTS = Path(__file__).resolve().parents[1] / "facts"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "explore_plans.md"
SMALL = "gpt2"


def said(command: str, capsys: pytest.CaptureFixture[str], *, code: int = 0) -> dict[str, Any]:
    """The document of a command that stands beside a figure."""
    words = command.split()
    assert words[0] == "jettison"
    capsys.readouterr()
    assert run([*words[1:], "--format", "json"]) == code
    return json.loads(capsys.readouterr().out)


@cache
def steps() -> list[dict[str, Any]]:
    return step_data()["layouts"]


@cache
def fronts() -> dict[str, Any]:
    return front_data(["gpt2-large"])["models"][0]


@cache
def segments() -> dict[str, Any]:
    return segments_data()["models"][0]


# iteration time -------------------------------------------------------------------------------------------------------


def test_published_iterations_are_the_papers() -> None:
    rows: dict[str, dict[str, str]] = {}
    for name in ("korthikanti2022_configs.csv", "korthikanti2022_table5.csv"):
        with (FACTS / name).open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                rows.setdefault(row["model"], {}).update(row)
    assert set(rows) - set(ITERATIONS) == {"530B-dp8-2240gpus"}, "Tables 3 and 5, and a line of the text"
    for name in ITERATIONS:
        row = rows[name]
        one, own = ITERATIONS[name], run_of(ITERATIONS[name].model, **ITERATIONS[name].asked)
        assert one.full_seconds == float(row["iteration_full_s"])
        assert one.selective_seconds == float(row["iteration_selective_sp_s"])
        assert one.mfu == pytest.approx(float(row["mfu_percent"]) / 100)
        assert one.hfu == pytest.approx(float(row["hfu_percent"]) / 100)
        layout = own.layout
        assert [layout.tp, layout.pp, layout.virtual_stages, own.micro_batch] == [
            int(row[key]) for key in ("tensor_parallel", "pipeline_parallel", "virtual_stages", "micro_batch")
        ]
        assert own.micro_batch * own.micro_batches == int(row["global_batch"])
        assert own.seq == int(row["sequence"])


def test_iteration_times_are_what_estimate_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explorer_steps, "ITERATIONS", {name: ITERATIONS[name] for name in ("22B", "175B")})
    found = time_data([SMALL])
    assert [model["name"] for model in found["models"]] == ["22B", "175B", SMALL]
    for model in found["models"]:
        for row in model["rows"]:
            document = said(row["command"], capsys)
            assert document["step_seconds"] == pytest.approx(row["seconds"], abs=1e-8)
            assert document["step_range_seconds"] == pytest.approx(row["range"], abs=1e-8)
            assert document["figures"]["step_seconds"]["expected"] == pytest.approx(row["expected"], abs=1e-8)
            assert document["peak_bytes"] == row["peak_bytes"]
            expected = row["expected"] / row["seconds"]  # the command prints both utilizations of the expected time
            utilizations = [document["mfu"] / expected, document["hfu"] / expected]
            assert utilizations == pytest.approx([row["mfu"], row["hfu"]], abs=1e-6)
            assert sum(row["parts"]) == pytest.approx(row["seconds"], rel=1e-6)
    full, selective, chosen = (row["seconds"] for row in found["models"][0]["rows"])
    assert chosen < selective < full


# the step -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(len(LAYOUTS)))
def test_a_step_is_what_estimate_answers(index: int, capsys: pytest.CaptureFixture[str]) -> None:
    layout = steps()[index]
    document = said(layout["command"], capsys)
    assert document["step_seconds"] == pytest.approx(layout["step_seconds"], abs=1e-8)
    assert document["peak_bytes"] == layout["peak_bytes"] == max(s["ledger_peak"] for s in layout["stages"])
    assert document["available_bytes"] == layout["available_bytes"]


@pytest.mark.parametrize("index", range(len(LAYOUTS)))
def test_what_is_held_at_the_peak_is_the_sum_of_its_roles(index: int) -> None:
    device = hardware("h100-80gb")
    memory, time = answered(run_of(MODEL, **[*LAYOUTS.values()][index]), device)
    slices = step_slices(memory, time)
    for stage, own in zip(memory.stages, steps()[index]["stages"], strict=True):
        peak = StagePasses(memory, stage, slices[stage.index]).peak
        assert sum(nbytes for _, nbytes in own["roles"]) == peak.held
        assert all(nbytes > 0 for _, nbytes in own["roles"])
        names = [name for name, _ in own["roles"]]
        assert "outputs sent on" not in names, "no bytes are left over for it"


# the front ------------------------------------------------------------------------------------------------------------


def test_budgets_are_whole_gib_after_the_smallest() -> None:
    assert budgets(3 * GIB, 5 * GIB, 9) == [3 * GIB, 4 * GIB, 5 * GIB]
    assert budgets(3 * GIB + 1, 5 * GIB - 1, 9) == [3 * GIB + 1, 4 * GIB, 5 * GIB]
    many = budgets(10 * GIB, 400 * GIB, 9)
    assert len(many) <= 11
    assert many[-1] >= 400 * GIB


@pytest.mark.parametrize("way", [0, 1])
def test_points_of_the_front_are_plans(way: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = fronts()["ways"][way]
    points = found["points"]
    assert points[0]["budget"] == found["minimum_bytes"]
    for point in (points[0], points[len(points) // 2], points[-1]):
        document = said(f"{found['command']} --budget {point['budget']}B", capsys)
        assert document["predicted"]["step_seconds"] == pytest.approx(point["seconds"], abs=1e-8)
        assert document["predicted"]["peak_bytes"] == point["peak"] <= point["budget"]
        assert document["predicted"]["host_bytes"] == point["host"]
        patterns = [found["patterns"][number] for count, number in point["grid"] for _ in range(count)]
        for layer, pattern in zip(document["layers"], patterns, strict=True):
            there = {
                place: sum(t["nbytes"] for t, letter in zip(found["tensors"], pattern, strict=True) if letter == place)
                for place in "kh"
            }
            assert (there["k"], there["h"]) == (layer["kept_bytes"], layer["offloaded_bytes"])
    assert all(a["seconds"] >= b["seconds"] for a, b in pairwise(points))
    assert points[-1]["again"] == points[-1]["stalled"] == 0


def test_no_plan_fits_below_the_smallest_budget(capsys: pytest.CaptureFixture[str]) -> None:
    found = fronts()["ways"][0]
    document = said(f"{found['command']} --budget {found['minimum_bytes'] - 1}B", capsys, code=3)
    assert document["minimum_budget_bytes"] == found["minimum_bytes"]


# segments -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "number"), [("every", 1), ("every", 4), ("every", 80), ("block", 40), ("interval", 2)]
)
def test_sweeps_are_what_ledger_explains(kind: str, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    _, held, _, peak, share = segments()["kinds"][kind][number - 1]
    document = said(segments()["commands"][kind].format(number=number), capsys)
    (own,) = (row for row in document["explain"]["recompute"] if row["current"])
    assert (own["peak_bytes"], document["peak_bytes"]) == (peak, peak)
    assert own["step_fraction"] == pytest.approx(share, abs=1e-6)
    assert held < own["activation_bytes"], "embedding and head hold something as well"


def test_the_knee_is_where_layers_and_not_inputs_put_it() -> None:
    """docs/contradictions.md: N = 2 is best, N = 4 needs as much as N = 1; a segment of 80 has 870.4 GB."""
    rows = segments()["kinds"]["every"]
    together = [held + opened for _, held, opened, _, _ in rows]
    assert rows[together.index(min(together))][0] == 2
    assert together[3] == pytest.approx(together[0], rel=0.02)
    assert rows[0][1] == 42_949_672_960
    assert rows[79][2] > 870.4e9
    assert [round(100 * rows[n - 1][4], 1) for n in (1, 4, 8, 80)] == [25.1, 30.9, 31.9, 32.8]


# links ----------------------------------------------------------------------------------------------------------------


def test_a_link_is_what_a_hardware_file_with_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jettison.report.explorer_plans.GIGABYTES", (16, 128))
    model = offload_data()["models"][0]
    for row in (*model["rows"], {"mix": model["again"]}):
        command = row["mix"]["command"].replace("python -c", f"{sys.executable} -c")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", f"{command} --format json"],
            cwd=tmp_path,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["predicted"]["step_seconds"] == pytest.approx(row["mix"]["planned_seconds"], abs=1e-8)
        assert document["predicted"]["host_bytes"] == row["mix"]["host"]
        assert document["predicted"]["peak_bytes"] == row["mix"]["peak"]
    slow, quick = (row["mix"]["seconds"] for row in model["rows"])
    assert model["none_seconds"] < quick < slow < model["again"]["seconds"]


# the page -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_has_the_panels_numbers() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    for one in time_data()["models"]:
        full, selective, auto = one["rows"]
        seconds = [f"{row['expected']:.2f} ({row['published_seconds']:.2f})" for row in (full, selective)]
        mfus = ", ".join(f"{100 * row['mfu']:.1f}" for row in (full, selective, auto))
        assert " | ".join([f"| {one['name']}", *seconds, f"{auto['expected']:.2f}", f"{mfus} % |"]) in text
    for layout in steps()[:4]:
        assert f"| {layout['step_seconds']:.2f} s | {layout['peak_bytes'] / GIB:.2f} GiB, stage" in text
    recomputed, offloaded = (sweep["points"] for sweep in front_data()["models"][0]["ways"])
    assert (
        f"the smallest budget is {recomputed[0]['budget'] / GIB:.2f} GiB and adds {_added(recomputed, 0):.0f} %" in text
    )
    assert f"With offload it is {offloaded[0]['budget'] / GIB:.2f} GiB and adds {_added(offloaded, 0):.0f} %" in text
    place = [point["budget"] for point in offloaded].index(39 * GIB)
    other = [point["budget"] for point in recomputed].index(39 * GIB)
    assert f"adds {_added(offloaded, place):.1f} % and recompute alone {_added(recomputed, other):.1f} %" in text
    links = offload_data()["models"][0]
    alone = f"{links['again']['seconds']:.2f} s |"
    for row in links["rows"][1:-1]:
        mix, everything = row["mix"], f"{row['all_seconds']:.2f} s"
        assert f"| {mix['seconds']:.2f} s | {mix['host'] / GIB:.2f} GiB | {everything} | {alone}" in text
    assert f"{links['none_seconds']:.2f} s and {links['none_peak'] / GIB:.2f} GiB" in text


def _added(points: list[dict[str, Any]], place: int) -> float:
    """Percent of a step that a plan adds."""
    return 100 * (points[place]["seconds"] / points[-1]["seconds"] - 1)


# will it fit ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "mode"), [(0, "full"), (3, "none"), (3, "selective-op")])
def test_verdicts_are_exit_codes(layout: int, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = fit_data()
    own = found["layouts"][layout]
    for number, (command, peak) in enumerate(zip(own["commands"], own["peaks"][mode], strict=True)):
        place = number % len(found["gpus"])
        gpu, available = found["gpus"][place]["name"], own["available"][place]
        if isinstance(peak, str):
            continue
        words = f"{command} --gpu {gpu} --recompute {mode} --format json".split()
        capsys.readouterr()
        code, document = run(words[1:]), json.loads(capsys.readouterr().out)
        assert code == (3 if document["verdict"] == "does not fit" else 0)
        assert document["verdict"] == list(FitVerdict)[peak[3][place]]
        assert (document["peak_bytes"], document["budget_bytes"]) == (peak[0], available)
        assert peak[1] <= peak[0]


def test_a_model_that_cannot_be_laid_out_so_says_why() -> None:
    found = fit_data(["gpt2"])  # twelve heads
    assert found["models"][0] == "gpt2"
    reason = found["layouts"][1]["peaks"]["none"][0]
    assert "--tp 8 does not divide the 12 attention heads" in reason
    assert forecast(run_of("gpt2", dp=8, zero=3)).peak_bytes == found["layouts"][0]["peaks"]["none"][0][0]


# models that were asked for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gpt2", {"tp": 4}),
        ("llama3-70b", {"tp": 8, "dp": 8, "zero": 3}),
        ("deepseek-v3", {"tp": 8, "dp": 64, "zero": 3}),
    ],
)
def test_a_model_without_a_layout_gets_the_smallest_that_fits(model: str, layout: dict[str, int]) -> None:
    assert usual_layout(model, hardware("h100-80gb")) == layout
