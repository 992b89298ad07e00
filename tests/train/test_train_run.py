"""`jettison train` in one process: it learns, resumes to the bit, keeps to a budget, and counts its work."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jettison.cli.report import report
from jettison.cli.train import train
from jettison.core.errors import Infeasible, PlanMismatch, UsageError
from jettison.families.presets import preset
from jettison.solve.plan import Plan
from jettison.train.optim import clip, ensure_state, make_optimizer, squared_norm
from jettison.train.phase_memory import MemoryMeter
from jettison.train.recipe import (
    BatchSection,
    CheckpointSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    PlanSection,
)
from jettison.train.setup import StepWork, peak_flops_per_second, spec_flops
from support.prices import every_op_takes
from support.train_runs import curve, gpt, lines, tensors_of, tiny

MIB = 1 << 20


# learning and resuming ------------------------------------------------------------------------------------------------


def test_it_learns_from_the_standard_library(tmp_path: Path) -> None:
    recipe = tiny(
        tmp_path, steps=60, batch=BatchSection(global_batch=8, micro_batch=8, seq=64), checkpoint=CheckpointSection()
    )
    result = train(recipe)
    losses = [loss for _, loss, _ in curve(tmp_path)]
    assert len(losses) == 60
    assert losses[0] == pytest.approx(math.log(256), rel=0.1)  # it knows nothing yet
    assert losses[-1] < 3.4  # what single characters alone would give is 3.5
    assert (result.steps, result.first_loss, result.last_loss) == (60, losses[0], losses[-1])


def test_a_resumed_run_is_the_same_run_to_the_bit(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(tiny(whole))
    said: list[str] = []
    decays = OptimizerSection(lr=3e-3, warmup_steps=2, decay_steps=8)  # as a run of 8 steps has it
    first = tiny(
        cut, steps=4, optimizer=decays, checkpoint=CheckpointSection(folder=str(cut / "ck"), asynchronous=False)
    )
    train(first)
    result = train(tiny(cut), progress=said.append, must_resume=True)
    assert result.resumed_step == 4 and any("resuming from" in text for text in said)
    assert [step for step, _, _ in curve(cut)] == list(range(1, 9))
    assert curve(cut) == curve(whole)
    assert tensors_of(cut / "ck" / "step-00000008") == tensors_of(whole / "ck" / "step-00000008")


def test_a_resumed_run_follows_the_plan_that_it_made(
    tmp_path: Path, smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    more = {
        "plan": PlanSection(budget=f"{smallest + smallest // 20}B"),
        "checkpoint": CheckpointSection(folder=str(tmp_path / "ck"), asynchronous=False),
    }
    train(gpt(tmp_path, **more), progress=said.append)
    assert "planning" in said and (tmp_path / "ck" / "kept-plan-rank0.json").exists()

    def planned(*_: Any, **__: Any) -> Any:
        raise AssertionError("it is planned again")

    monkeypatch.setattr("jettison.train.rank_plan.planner_of", planned)
    rate = OptimizerSection(lr=1e-3, warmup_steps=2)
    assert train(gpt(tmp_path, **more, steps=4, optimizer=rate), progress=said.append).resumed_step == 2
    assert any(text.startswith("reusing the plan in") for text in said)
    (made,), (followed,) = (line["plans"] for line in lines(tmp_path, "start"))
    assert made == followed
    with pytest.raises(AssertionError, match="planned again"):
        train(gpt(tmp_path, **more | {"plan": PlanSection(budget="1GiB")}, steps=6), progress=said.append)
    assert any("is not reused: budget was" in text for text in said)


def test_nothing_is_carried_over_but_what_is_saved(tmp_path: Path) -> None:
    """The same seed gives the same run; another seed, or no dropout, gives another."""
    for name in ("a", "b", "c"):
        train(tiny(tmp_path / name, steps=3, seed=int(name == "c"), checkpoint=CheckpointSection()))
        torch.rand(7)  # whoever else draws numbers
    assert curve(tmp_path / "a") == curve(tmp_path / "b")
    assert curve(tmp_path / "a")[0] != curve(tmp_path / "c")[0]


def test_lines_of_steps_that_are_done_again_are_dropped(tmp_path: Path) -> None:
    recipe = tiny(tmp_path, steps=7, checkpoint=CheckpointSection(folder=str(tmp_path / "ck"), every=3, keep=9))
    train(recipe)
    for step in (6, 7):
        shutil.rmtree(tmp_path / "ck" / f"step-{step:08d}")
    before = curve(tmp_path)
    with (tmp_path / "log" / "log.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 8, "lo')  # torn off
    assert train(recipe).resumed_step == 3
    assert curve(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 1}, "was made with seed 0, the recipe has 1"),
        ({"batch": BatchSection(global_batch=2, micro_batch=2, seq=32)}, "was made with global_batch 4"),
        ({"steps": 1}, "is of step 2; the recipe has 1 steps"),
        (
            {"model": ModelSection(factory="support.train_models:tiny64")},
            "with model.factory support.train_models:tiny, the",
        ),
        ({"optimizer": OptimizerSection(name="sgd")}, "made with .*optimizer.name adamw, the recipe has sgd"),
        ({"optimizer": OptimizerSection(betas=(0.9, 0.9))}, r"made with optimizer.betas \[0.9, 0.95\], the recipe has"),
    ],
)
def test_a_checkpoint_of_another_run(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    train(tiny(tmp_path, steps=2))
    with pytest.raises(UsageError, match=says):
        train(tiny(tmp_path, **{"steps": 4} | change))


def test_resume_that_finds_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--resume: there is no checkpoint in .*ck"):
        train(tiny(tmp_path), must_resume=True)
    with pytest.raises(UsageError, match=r"the recipe has no checkpoint.folder"):
        train(tiny(tmp_path, checkpoint=CheckpointSection()), must_resume=True)


# memory ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The least that the GPT can be trained in."""
    with pytest.raises(Infeasible) as error:
        train(gpt(tmp_path_factory.mktemp("none"), plan=PlanSection(budget="1kB")))
    return error.value.minimum_budget_bytes


def test_a_budget_holds_and_changes_no_bit(tmp_path: Path, smallest: int) -> None:
    plain = train(gpt(tmp_path / "plain", log=LogSection(folder=str(tmp_path / "plain" / "log"), report=False)))
    assert plain.second_step_peaks is not None
    assert plain.report is None
    assert not (tmp_path / "plain" / "log" / "report.html").exists()
    middle = (smallest + plain.second_step_peaks.peak_bytes) // 2
    assert smallest < middle < plain.second_step_peaks.peak_bytes
    result = train(gpt(tmp_path / "planned", plan=PlanSection(budget=f"{middle}B")))
    assert curve(tmp_path / "planned") == curve(tmp_path / "plain")
    peaks, predicted = result.second_step_peaks, result.predicted_peak_bytes
    assert peaks is not None and predicted is not None
    assert peaks.peak_bytes <= middle
    assert peaks.peak_bytes == pytest.approx(predicted, rel=0.02)
    assert result.first_step_peaks is not None
    assert result.first_step_peaks.peak_bytes < peaks.peak_bytes  # the optimizer has no state yet
    assert result.levels is not None
    assert {phase.phase: phase.peak_bytes for phase in result.levels.phases} == peaks.phases
    assert result.report == str(tmp_path / "planned" / "log" / "report.html")
    assert Path(result.report).read_text(encoding="utf-8").startswith("<!doctype html>")
    (subject,) = report([tmp_path / "planned" / "log"]).subjects
    assert subject.holds is True
    assert {phase.phase: phase.measured_bytes for phase in subject.phases} == peaks.phases
    assert subject.levels["predicted"].peak_bytes == predicted
    assert subject.grids


def test_a_plan_is_left_beside_the_log_and_can_be_given_again(tmp_path: Path, smallest: int) -> None:
    first = train(gpt(tmp_path / "first", plan=PlanSection(budget=f"{smallest}B")))
    file = tmp_path / "first" / "log" / "plan.json"
    again = train(gpt(tmp_path / "again", plan=PlanSection(file=str(file))))
    assert curve(tmp_path / "again") == curve(tmp_path / "first")
    assert again.predicted_peak_bytes == first.predicted_peak_bytes
    other = ModelSection(architecture="gpt", layers=2, hidden=64, heads=4, code="huggingface")
    for wrong in (other, ModelSection(factory="support.train_models:tiny")):
        with pytest.raises(PlanMismatch):
            train(gpt(tmp_path / "wrong", model=wrong, plan=PlanSection(file=str(file))))
    with pytest.raises(UsageError, match=r"plan.file: .* cannot be read"):
        train(gpt(tmp_path / "wrong", plan=PlanSection(file=str(tmp_path / "no.json"))))


@pytest.mark.slow
def test_gradients_that_are_added_up_are_in_the_budget(tmp_path: Path) -> None:
    """From the second micro-batch on they live through the forward."""
    batch = BatchSection(global_batch=12, micro_batch=4, seq=64)
    with pytest.raises(Infeasible) as error:
        train(gpt(tmp_path / "none", batch=batch, plan=PlanSection(budget="1kB")))
    budget = error.value.minimum_budget_bytes
    result = train(gpt(tmp_path / "some", batch=batch, plan=PlanSection(budget=f"{budget}B")))
    assert result.second_step_peaks is not None and result.second_step_peaks.peak_bytes <= budget
    assert result.second_step_peaks.peak_bytes == pytest.approx(result.predicted_peak_bytes, rel=0.02)


def test_under_a_budget_tensors_may_wait_on_the_host(
    tmp_path: Path, smallest: int, slow_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_op_takes(0.1, monkeypatch)
    plain = train(gpt(tmp_path / "plain"))
    assert plain.second_step_peaks is not None
    middle = (9 * smallest + plain.second_step_peaks.peak_bytes) // 10
    section = PlanSection(budget=f"{middle}B", offload=True, host_budget="2MiB", gpu=str(slow_memory))
    result = train(gpt(tmp_path / "sent", plan=section))
    assert curve(tmp_path / "sent") == curve(tmp_path / "plain")
    made = Plan.from_json((tmp_path / "sent" / "log" / "plan.json").read_text())
    assert any(entry.offloaded for entry in made.layers)
    assert 0 < made.predicted.host_bytes <= 2 * MIB
    assert result.second_step_peaks is not None and result.second_step_peaks.peak_bytes <= middle
    assert result.second_step_peaks.peak_bytes == pytest.approx(made.predicted.peak_bytes, rel=0.02)


def test_a_policy_is_applied_and_counted(tmp_path: Path) -> None:
    logs = {name: LogSection(folder=str(tmp_path / name / "log"), peak_tflops=1.0) for name in ("plain", "full")}
    plain = train(gpt(tmp_path / "plain", log=logs["plain"]))
    full = train(gpt(tmp_path / "full", log=logs["full"], plan=PlanSection(policy="full")))
    assert curve(tmp_path / "plain") == curve(tmp_path / "full")
    assert full.second_step_peaks.peak_bytes < plain.second_step_peaks.peak_bytes  # type: ignore[union-attr]
    for folder, share in (("plain", 1.0), ("full", 4 / 3)):
        step = lines(tmp_path / folder)[-1]
        assert step["hfu"] / step["mfu"] == pytest.approx(
            share, rel=0.12
        )  # the head and each layer's last product stay


def test_the_meter_sees_each_phase() -> None:
    kept = torch.zeros(MIB, dtype=torch.uint8)
    meter = MemoryMeter(torch.device("cpu"), 1, lambda: [kept, kept])
    with meter.step() as measured:
        with meter.phase("forward"):
            held = torch.empty(3 * MIB, dtype=torch.uint8)
        with meter.phase("backward"):
            del held
            more = torch.empty(MIB, dtype=torch.uint8)
        with meter.phase("forward"):
            most = torch.empty(4 * MIB, dtype=torch.uint8)
            del most
    peaks = measured()
    assert peaks is not None and more is not None
    assert peaks.phases == pytest.approx({"forward": 6 * MIB, "backward": 4 * MIB}, abs=4096)
    assert peaks.peak_bytes == max(peaks.phases.values())
    with meter.step() as measured, meter.phase("forward"):
        pass
    assert measured() is None  # one step was asked for


# arithmetic -----------------------------------------------------------------------------------------------------------


def test_the_norm_and_the_clipping_are_those_of_torch() -> None:
    torch.manual_seed(0)
    one, other = (nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)) for _ in range(2))
    other.load_state_dict(one.state_dict())
    for model in (one, other):
        (model(torch.arange(14.0).reshape(2, 7)) ** 2).sum().backward()
    norm = squared_norm(one.parameters()).sqrt()
    clip(one.parameters(), norm, 0.25)
    expected = nn.utils.clip_grad_norm_(other.parameters(), 0.25)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_making_the_state_changes_no_weight(name: str) -> None:
    model = nn.Linear(4, 4)
    before = [p.detach().clone() for p in model.parameters()]
    section = OptimizerSection(name=name, momentum=0.9 if name == "sgd" else 0.0)
    optimizer = make_optimizer(section, model.parameters())
    ensure_state(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert len(optimizer.state) == 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [3e-4, 3e-4]


def test_work_is_counted_as_the_papers_do() -> None:
    """arXiv 2205.05198 Appendix A, equation 7: 72 B L s h² (1 + s / 6h + V / 12hL) FLOPs a step without recompute."""
    spec, batch, seq = preset("gpt-22b"), 4, 2048
    hidden, layers, vocab = 6144, 48, 51200
    expected = 72 * batch * layers * seq * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * hidden * layers))
    assert spec_flops(spec, sequences=batch, seq=seq) == pytest.approx(expected, rel=1e-9)


def test_utilisation() -> None:
    work = StepWork(model_flops=600, recomputed_flops=150, peak_flops_per_second=1000.0)
    assert (work.mfu(1.0), work.hfu(1.0), work.mfu(2.0)) == (0.6, 0.75, 0.3)
    assert StepWork(model_flops=600).mfu(1.0) is None
    assert peak_flops_per_second(LogSection(gpu="h100-80gb"), "bf16-autocast") == pytest.approx(989e12, rel=0.01)
    assert peak_flops_per_second(LogSection(peak_tflops=2.5), "fp32") == 2.5e12
    assert peak_flops_per_second(LogSection(), "fp32") is None


def test_a_traced_model_has_its_work_counted(tmp_path: Path) -> None:
    log = LogSection(folder=str(tmp_path / "log"), peak_tflops=1.0, memory_steps=0)
    train(tiny(tmp_path, steps=1, log=log, checkpoint=CheckpointSection()))
    step = lines(tmp_path)[0]
    per_token = 2 * (2 * (64 * 128 + 128 * 32) + 32 * 256)  # products of both blocks and of the head
    assert step["mfu"] * step["step_seconds"] * 1e12 == pytest.approx(3 * per_token * 4 * 32, rel=1e-9)
