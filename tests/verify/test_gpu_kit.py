"""The GPU kit's logic, on the CPU: what it needs, what it writes, and when it says that a check did not hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.gpu import gradients, kit
from benchmarks.gpu.cases import Column, Found, Log, Skip, Status, slug
from benchmarks.gpu.compare import Comparison
from benchmarks.gpu.families import FAMILIES, Size, Variant, batch_of, build
from benchmarks.gpu.glance import HEAD, Line
from benchmarks.gpu.gradients import Kind, Trained, differences, prove
from benchmarks.gpu.llama import layers_in
from benchmarks.gpu.parts import Experts
from benchmarks.gpu.setting import Setting, fingerprints
from benchmarks.rivals import Rival, Undo
from torch import Tensor, nn

from jettison.core.errors import Infeasible
from support.patience import PATIENCE

CPU = torch.device("cpu")
TINY = Setting(device=CPU, tiny=True, rounds=2, compiles=False)
SIZE = Size(layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=64, sequence=16, micro_batch=2, experts=4)
ROOT = Path(__file__).parents[2]
WITHOUT = """
import sys

sys.modules.update(dict.fromkeys({absent!r}))  # importing them fails, and nobody finds them
from benchmarks.gpu.kit import main
sys.exit(main(sys.argv[1:]))
"""
NOT_NEEDED = ("numpy", "pydantic", "pydantic_core", "cyclopts", "rich", "highspy", "transformers", "scipy")


def run_kit(out: Path, *flags: str) -> tuple[int, str]:
    """In a process where nothing but torch can be imported, with time for all of it."""
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT.format(absent=NOT_NEEDED), "--device", "cpu", "--tiny"]
    command += ["--seconds", str(PATIENCE), "--out", str(out), *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=PATIENCE)
    return done.returncode, done.stdout + done.stderr


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}


def log_in(folder: Path, *, seconds: float = 60.0) -> Log:
    head = {"device": "cpu", "torch": torch.__version__, "date": "2026-01-31", "tiny": True}
    until = time.monotonic() + seconds
    return Log(name="some", title="Some", stem=folder / "gpu-cpu-some", device=CPU, until=until, head=head)


def documents(out: Path) -> dict[str, Any]:
    found = {path.stem.removeprefix("gpu-cpu-"): json.loads(path.read_text()) for path in out.glob("gpu-cpu-*.json")}
    assert all((out / f"gpu-cpu-{name}.md").exists() for name in found)
    return found


def run_sections(out: Path, *sections: str) -> dict[str, Any]:
    """Text of the kit about each section, all of whose checks held."""
    code, said = run_kit(out, "--quick", "--no-compile", "--sections", *sections)
    assert code == 0, said
    found = documents(out)
    assert sorted(found) == sorted(sections)
    for name, document in found.items():
        assert {case["status"] for case in document["cases"]} == {"ok"}, (name, document)
        assert document["schema"] == "jettison.gpu/1"
    return found


def test_it_needs_nothing_but_torch(tmp_path: Path) -> None:
    found = run_sections(tmp_path, "host", "losses")
    for case in found["losses"]["cases"]:
        # a matmul in 16 bits may need more by itself than the loss, on some processors: its sums in 32 bits
        most = max(2 * case["logits_bytes"], case["matmul_bytes"])
        assert case["logits_bytes"] < case["chunked_bytes"] <= most <= case["torch_bytes"]
    page = (tmp_path / "gpu-cpu.md").read_text()
    assert "gpu-cpu-losses.md" in page and "tiny" in page
    top = [line for line in page.splitlines() if line.startswith("| ")]
    assert top[0] == HEAD[0]
    assert any(line.startswith("| llama, host time | plain | full |") for line in top)


@pytest.mark.slow
def test_gradients_graphs_and_offload(tmp_path: Path) -> None:
    found = run_sections(tmp_path, "gradients", "graphs", "offload")
    moving = {case["case"]: case for case in found["offload"]["cases"]}
    assert moving["races"]["races"] == 0 < moving["races that are there are found"]["races"]
    for name, case in moving.items():
        if "races" not in name:
            assert case["peak_bytes"] < case["plain_peak_bytes"] and case["copies"] > 0
    for case in found["gradients"]["cases"]:
        for word in ("smallest", "middle"):
            assert 0 < case[f"{word}_peak_bytes"] <= case[f"{word}_budget_bytes"]
        assert case["smallest_budget_bytes"] < case["plain_peak_bytes"]
        assert case["smallest_dropped"] > 0
    top = [line for line in (tmp_path / "gpu-cpu.md").read_text().splitlines() if line.startswith("| ")]
    assert any(line.startswith("| llama, whole-step graph | plain graph | full |") for line in top)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        ["gradients"],
        ["environment", "predictions", "llama_1b", "llama_8b", "layer_22b", "calibration"],
        ["compiled", "host", "link", "overhead"],
    ],
)
def test_all_of_it(tmp_path: Path, sections: list[str]) -> None:
    code, said = run_kit(tmp_path, "--sections", *sections)
    assert code == 0, said
    found = documents(tmp_path)
    assert sorted(found) == sorted(sections)
    statuses = [case["status"] for document in found.values() for case in document["cases"]]
    assert statuses.count("ok") > len(statuses) / 2
    assert set(statuses) <= {"ok", "skipped", "left out"}
    if "calibration" in sections:
        assert (tmp_path / "gpu-cpu.toml").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kit.main(["--out", str(tmp_path / "results")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


# what a log does with its cases --------------------------------------------------------------------------------------


def test_every_case_is_written_and_none_stops_the_others(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.columns = (Column(title="peak", key="peak_bytes"),)

    def skipped() -> Found:
        raise Skip("no such kernel")

    def broken() -> Found:
        raise RuntimeError("a|b\nc")

    log.case("good", lambda: Found(figures={"peak_bytes": 7}), expect=0.0)
    assert not log.has_failed
    log.case("skipped", skipped, expect=0.0)
    assert not log.has_failed
    log.case("broken", broken, expect=0.0)
    assert log.has_failed
    log.case("failed", lambda: Found(figures={"peak_bytes": 9}, problems=["2 bytes above the budget"]), expect=0.0)
    log.case("too long", lambda: Found(), expect=1e6)
    cases = documents(tmp_path)["some"]["cases"]
    assert [case["status"] for case in cases] == ["ok", "skipped", "error", "failed", "left out"]
    assert cases[2]["said"] == "RuntimeError: a|b"
    page = (tmp_path / "gpu-cpu-some.md").read_text()
    assert "| failed | 9 | **failed**: 2 bytes above the budget |" in page
    assert "- broken: error, RuntimeError: a/b" in page


def test_a_failed_check_alone_is_a_failure(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.case("over", lambda: Found(problems=["above"]), expect=0.0)
    assert log.has_failed


def test_a_lost_device_is_not_asked_again(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.is_lost = True
    case = log.case("next", lambda: pytest.fail("it was run"), expect=0.0)
    assert case.status is Status.LEFT_OUT
    assert log.has_failed


def test_a_section_that_breaks_between_cases_is_a_case(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.run_section(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert [(case.status, case.said) for case in log.cases] == [(Status.ERROR, "ZeroDivisionError: division by zero")]


@pytest.mark.parametrize(
    ("name", "part"),
    [("NVIDIA H200", "nvidia-h200"), ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"), ("cpu", "cpu")],
)
def test_names_of_devices_in_names_of_files(name: str, part: str) -> None:
    assert slug(name) == part


# the whole of it, with sections of the test's own --------------------------------------------------------------------


def sections(monkeypatch: pytest.MonkeyPatch, **runs: Any) -> None:
    made = [kit.Section(name=name, title=name.title(), seconds=10.0, run=run) for name, run in runs.items()]
    monkeypatch.setattr(kit, "SECTIONS", tuple(made))


def good(_setting: Setting, log: Log, *, quick: bool) -> None:
    log.case("a", lambda: Found(figures={"x": 1}), expect=0.0)


def bad(_setting: Setting, log: Log, *, quick: bool) -> None:
    log.case("b", lambda: Found(figures={"x": 1}, problems=["gradients differ"]), expect=0.0)


def test_exit_codes_and_resuming(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sections(monkeypatch, one=good, two=bad, three=good)
    flags = ["--device", "cpu", "--tiny", "--out", str(tmp_path)]
    assert kit.main([*flags, "--sections", "one"]) == 0
    assert sorted(documents(tmp_path)) == ["one"]
    assert kit.main([*flags, "--sections", "two", "three"]) == 1
    index = (tmp_path / "gpu-cpu.md").read_text().splitlines()
    assert [line.split(" | ")[1] for line in index if line.startswith("| [")] == ["1 ok", "1 failed", "1 ok"]


def test_what_there_is_no_time_for_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def long(_setting: Setting, log: Log, *, quick: bool) -> None:
        log.case("c", lambda: Found(), expect=100.0)

    sections(monkeypatch, one=good, two=long)
    assert kit.main(["--device", "cpu", "--out", str(tmp_path), "--seconds", "20"]) == 0
    assert "left out, two: c" in capsys.readouterr().out


# who is ahead ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "peer_ratio", "asked", "verdict"),
    [
        (1.1, 1.21, None, "ahead by 9.1%"),
        (1.21, 1.21, None, "ahead by 0.0%"),
        (1.331, 1.21, None, "**behind by 10.0%**"),
        (1.5, 2.0, 1.4, "ahead by 25.0%, above what is asked"),
        (1.3, 2.0, 1.4, "ahead by 35.0%"),
        (1.005, None, 1.01, "holds"),
        (1.111, None, 1.01, "**missed by 10.0%**"),
    ],
)
def test_who_is_ahead(ratio: float, peer_ratio: float | None, asked: float | None, verdict: str) -> None:
    line = Line(model="m", peer="p", ours="o", ratio=ratio, peer_ratio=peer_ratio, asked=asked)
    assert line.verdict == verdict
    assert line.is_ahead == (verdict == "holds" or (verdict.startswith("ahead") and "above" not in verdict))


def test_the_page_begins_with_peers_and_names_what_was_not_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = Line(model="Llama", peer="checkpoint", ours="at its peak", ratio=1.1, peer_ratio=1.2, peak_bytes=2**30)

    def compared(_setting: Setting, log: Log, *, quick: bool) -> None:
        log.case("ours", lambda: Found(figures={"line": line.document()}), expect=0.0)
        log.case("long", lambda: Found(), expect=1e6)

    sections(monkeypatch, one=good, two=compared)
    assert kit.main(["--device", "cpu", "--tiny", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "gpu-cpu.md").read_text()
    assert "**1 of 1**" in page and "| Llama | checkpoint | at its peak | 1.000 | 1.200 | 1.100 | ≤ 1.200 |" in page
    assert page.index("| Llama") < page.index("Not measured: two, long") < page.index("| section |")


def test_a_row_is_held_beside_its_peer_at_the_peers_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = comparison(tmp_path)
    monkeypatch.setattr("benchmarks.gpu.compare.at_peak", lambda name, _bytes, **_: replace(same, name=f"ours, {name}"))
    same = Rival(name="peer", apply=lambda _model, _batch: Undo())
    theirs = made.row(same)
    (ours,) = made.at_peaks_of([theirs], extra_bytes=256)
    line = ours.figures["line"]
    assert (line["peer"], line["peak_bytes"]) == ("peer", theirs.figures["peak_bytes"])
    assert (line["peer_ratio"], line["ratio"]) == (theirs.figures["ratio"], ours.figures["ratio"])
    assert ours.figures["budget_bytes"] == theirs.figures["peak_bytes"] + 256
    assert made.row(same, asked=1.01).figures["line"]["peer"] == "" and "line" not in theirs.figures


# checks that can fail ------------------------------------------------------------------------------------------------


def trained(value: float) -> Trained:
    gradient = torch.tensor([1.0, value])
    return Trained(losses=[torch.tensor(2.0)], state={"gradient of w": gradient}, streams=[b"s"], peaks=[1])


def test_one_bit_of_a_gradient_is_a_difference() -> None:
    assert differences(trained(0.0), trained(0.0)) == []
    assert differences(trained(0.0), trained(-0.0)) == ["differs: gradient of w"]


def test_a_peak_above_its_budget_is_a_problem(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    def more(*args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(peak_bytes=measured(*args, **kwargs).peak_bytes + (1 << 20))

    measured = gradients.measured_peak
    monkeypatch.setattr(gradients, "measured_peak", more)
    found = prove(Kind(family="resnet", dtype=torch.float32), TINY)
    assert any("smallest budget exceeded by" in problem for problem in found.problems)
    assert any("middle budget exceeded by" in problem for problem in found.problems)


class Doubled(Rival):
    """Says that it is Jettison's, and doubles what the model gives."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, apply=self._apply)

    @staticmethod
    def _apply(model: nn.Module, _batch: Any) -> Undo:
        hook = model.register_forward_hook(lambda _module, _inputs, output: 2 * output)
        return Undo(functions=(hook.remove,))


def comparison(folder: Path) -> Comparison:
    def made() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return nn.Linear(4, 4), torch.randn(2, 4)

    return Comparison(TINY, log_in(folder), made, lambda m, x: m(x).sum(), rounds=2)


def test_rows_of_jettison_are_held_to_their_gradients_and_budgets(tmp_path: Path) -> None:
    compared = comparison(tmp_path)
    same = Rival(name="jettison, nothing", apply=lambda _model, _batch: Undo())
    assert compared.row(same).status is Status.OK
    assert compared.row(same, budget_bytes=1).status is Status.FAILED
    wrong = compared.row(Doubled("jettison, wrong"))
    assert (wrong.status, wrong.said) == (Status.FAILED, "gradients differ")
    assert compared.row(Doubled("another")).status is Status.OK  # only shown


def test_a_budget_that_cannot_be_met_is_no_failure(tmp_path: Path) -> None:
    def apply(_model: nn.Module, _batch: Any) -> Undo:
        raise Infeasible(minimum_budget_bytes=10, budget_bytes=1)

    assert comparison(tmp_path).row(Rival(name="jettison at 1", apply=apply)).status is Status.SKIPPED


def test_fingerprints_see_bits_and_places() -> None:
    model = nn.Linear(3, 1, bias=False)

    def of(*values: float) -> dict[str, int]:
        model.weight.grad = torch.tensor([values], dtype=torch.float32)
        return fingerprints(model)

    assert of(1, 2, 3) == of(1, 2, 3)
    assert len({of(*values)["weight"] for values in [(1, 2, 3), (2, 1, 3), (1, 2, -3), (0, 2, 3), (-0.0, 2, 3)]}) == 5


def test_as_many_layers_as_fit() -> None:
    """One takes 10, three 16: 3 a layer."""
    assert [layers_in(room, 10, 16) for room in (9, 10, 12, 13, 30)] == [1, 1, 1, 2, 7]


# families ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_trains(family: str) -> None:
    size = Size(layers=2, hidden=64, heads=4, kv_heads=2, ffn=64, vocab=64, sequence=16, micro_batch=2, experts=4)
    dtype = torch.bfloat16 if family == "mixtral" else torch.float32
    (model, batch), (twin, _) = (build(family, size, CPU, dtype, Variant(dropout=0.1)) for _ in range(2))
    for of in (model, twin):
        torch.manual_seed(3)
        loss = of(**batch)
        loss.backward()
        assert loss.shape == () and loss.isfinite()
    assert fingerprints(model) == fingerprints(twin)
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    assert all(parameter.dtype is dtype for parameter in model.parameters())


def test_experts_are_those_of_a_loop() -> None:
    torch.manual_seed(0)
    experts = Experts(16, 16, 4, 2).to(torch.bfloat16)
    x = torch.randn(2, 5, 16).bfloat16()
    found = experts(x)
    flat = x.flatten(0, 1)
    weights, chosen = experts.router(flat).float().softmax(-1).topk(2, dim=-1)
    expected = torch.zeros_like(flat, dtype=torch.float32)
    for token in range(flat.shape[0]):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            gate, up = (flat[token] @ experts.up[expert]).chunk(2)
            expected[token] += weight * ((nn.functional.silu(gate) * up) @ experts.down[expert]).float()
    torch.testing.assert_close(found.flatten(0, 1).float(), expected, rtol=0.05, atol=0.01)


def test_batches_are_the_same_twice() -> None:
    first, second = (batch_of("bert", SIZE, CPU, torch.float32) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["is_word_bs"].sum(1).tolist() == [8, 16]
