"""Evaluation: the loss on another text, the same on every layout, and nothing of it is left in training."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from test_train_building import ready
from torch import distributed as dist
from torch import nn

from jettison.cli.train import train
from jettison.core.errors import Infeasible, UsageError
from jettison.train.engine import WholeModel, evaluation_mode
from jettison.train.recipe import (
    BatchSection,
    CheckpointSection,
    DataSection,
    EvalSection,
    LayoutSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    PlanSection,
    TrainRecipe,
)
from support.ranks import run_ranks

TEXT = bytes(range(32, 127)) * 30
GPT = ModelSection(architecture="gpt", layers=4, hidden=64, heads=4, dropout=0.1)


def recipe(folder: Path, *, evaluates: bool = True, **more: Any) -> TrainRecipe:
    """Two steps, each followed by two batches of the other text."""
    folder.mkdir(exist_ok=True, parents=True)
    text = folder / "text"
    text.write_bytes(TEXT)
    data = DataSection(kind="bytes", files=(str(text),))
    values: dict[str, Any] = {
        "model": GPT,
        "batch": BatchSection(global_batch=8, micro_batch=2, seq=16),
        "steps": 3,
        "log": LogSection(folder=str(folder / "log"), memory_steps=1),
        "eval": EvalSection(data=data, every=1, batches=2) if evaluates else EvalSection(),
    }
    return TrainRecipe(**values | more)


def entries(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "log" / "log.jsonl").read_text("utf-8").splitlines())
    return [entry for entry in lines if entry["event"] == event]


def curve(folder: Path, event: str = "step") -> list[list[float]]:
    return [[entry["step"], entry["loss"], entry.get("grad_norm", 0)] for entry in entries(folder, event)]


def test_it_is_the_mean_loss_of_the_text(tmp_path: Path) -> None:
    result = train(recipe(tmp_path, steps=1))
    with ready(recipe(tmp_path / "again", steps=1)) as session:
        assert session.evaluation is not None and session.evaluation.count == 2
    (entry,) = entries(tmp_path, "eval")
    assert (entry["step"], entry["tokens"]) == (1, 2 * 8 * 16)
    assert entry["perplexity"] == math.exp(entry["loss"]) == result.eval_perplexity
    assert entry["loss"] == result.eval_loss and entry["peak_bytes"] == result.eval_peak_bytes > 0
    assert any(line.startswith(f"evaluation: loss {result.eval_loss:.6f}, perplexity ") for line in result.lines())
    assert entries(tmp_path, "start")[0]["eval_data"] != entries(tmp_path, "start")[0]["data"]


def test_it_is_what_a_loop_by_hand_gives(tmp_path: Path) -> None:
    """Of the weights as they are drawn: nothing is dropped, and every sequence is read once, in order."""
    made = recipe(tmp_path, optimizer=OptimizerSection(lr=0.0), steps=1)
    result = train(made)
    with ready(recipe(tmp_path / "again")) as session:
        model = session.engine.parts[0].eval()
        rows = torch.stack([torch.tensor(list(TEXT[16 * n : 16 * n + 17])) for n in range(16)])
        with torch.no_grad():
            by_hand = math.fsum(model(part[:, :-1], part[:, 1:]).item() for part in rows.split(2)) / 8
    assert result.eval_loss == by_hand


def test_training_is_the_same_without_it_and_a_resumed_run_evaluates_once(tmp_path: Path) -> None:
    train(recipe(tmp_path / "without", evaluates=False))
    checkpoint = CheckpointSection(folder=str(tmp_path / "ck"), every=1)
    train(
        recipe(
            tmp_path / "with",
            checkpoint=checkpoint,
            steps=2,
            optimizer=replace(recipe(tmp_path).optimizer, decay_steps=3),
        )
    )
    result = train(recipe(tmp_path / "with", checkpoint=checkpoint), must_resume=True)
    assert result.resumed_step == 2
    assert curve(tmp_path / "with") == curve(tmp_path / "without")
    assert [entry["step"] for entry in entries(tmp_path / "with", "eval")] == [1, 2, 3]
    train(recipe(tmp_path / "end", eval=replace(recipe(tmp_path / "end").eval, every=0)))
    assert [entry["step"] for entry in entries(tmp_path / "end", "eval")] == [3]
    assert curve(tmp_path / "end", "eval")[0] == curve(tmp_path / "with", "eval")[2]


class Stateful(nn.Module):
    """Counts its calls, and draws from every stream, whatever its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.frozen = nn.Dropout(0.5).eval()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.words(input_ids) * (1 + self.calls / 100) + torch.rand(())
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_state_of_the_model_stays(tmp_path: Path) -> None:
    model = ModelSection(factory="test_train_evaluation:Stateful")
    for name, evaluates in (("with", True), ("without", False)):
        train(recipe(tmp_path / name, evaluates=evaluates, model=model))
    assert curve(tmp_path / "with") == curve(tmp_path / "without")
    with ready(recipe(tmp_path / "modes", model=model)) as session:
        made = session.engine.parts[0].train()
        made.frozen.eval()
        with pytest.raises(KeyError), evaluation_mode(session.engine):
            assert not made.training and not torch.is_grad_enabled()
            raise KeyError
        assert made.training and not made.frozen.training and torch.is_grad_enabled()


def test_texts_that_do_not_do(tmp_path: Path) -> None:
    made = recipe(tmp_path)
    with pytest.raises(UsageError, match=r"eval.data: got 178 sequences of 16 tokens; expected at least .* = 23 x 8"):
        train(replace(made, eval=replace(made.eval, batches=23)))
    with pytest.raises(UsageError, match=r"expected a section \[eval.data\]"):
        EvalSection(every=3)
    with pytest.raises(UsageError, match="got batches 0"):
        EvalSection(data=made.eval.data, batches=0)
    low = tmp_path / "low"
    low.write_bytes(b"\x01" * 999)
    with pytest.raises(UsageError, match="got the token 126; the model has a vocabulary of 100"):
        train(replace(made, model=replace(GPT, vocab=100), data=DataSection(kind="bytes", files=(str(low),))))


@pytest.fixture
def much_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each evaluation takes 16 MiB more."""
    evaluate = WholeModel.evaluate
    taken: list[torch.Tensor] = []

    def hungry(self: WholeModel, batches: Any) -> torch.Tensor:
        taken[:] = [torch.empty(1 << 22)]
        try:
            return evaluate(self, batches)
        finally:
            taken.clear()

    monkeypatch.setattr(WholeModel, "evaluate", hungry)


@pytest.mark.slow
def test_an_evaluation_that_takes_less_than_a_step_changes_no_plan(tmp_path: Path) -> None:
    plans = [recipe(tmp_path / str(e), evaluates=e, plan=PlanSection(budget="16MiB")) for e in (True, False)]
    assert len({train(made).predicted_peak_bytes for made in plans}) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("much_is_taken")
def test_without_an_evaluation_the_budget_holds(tmp_path: Path) -> None:
    train(recipe(tmp_path, evaluates=False, plan=PlanSection(budget="8MiB")))


@pytest.mark.usefixtures("much_is_taken")
def test_a_budget_holds_it(tmp_path: Path) -> None:
    """Whatever an evaluation takes is in the dry run."""
    with pytest.raises(Infeasible) as error:
        train(recipe(tmp_path / "with", plan=PlanSection(budget="8MiB")))
    assert 16 << 20 < error.value.minimum_budget_bytes < 20 << 20


# on ranks -------------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "ddp": LayoutSection(),
    "zero2": LayoutSection(zero=2),
    "zero3": LayoutSection(zero=3),
    "tp": LayoutSection(tp=2),
    "tp under zero2": LayoutSection(tp=2, zero=2),
    "gpipe": LayoutSection(pp=2, schedule="gpipe"),
    "1f1b": LayoutSection(pp=2, tp=2),
    "interleaved": LayoutSection(pp=2, virtual_stages=2, zero=2),
    "zero-bubble": LayoutSection(pp=2, schedule="zero-bubble", zero=2),
}


def on_ranks(args: dict[str, str]) -> dict[str, Any]:
    """Groups stay: what torch keeps of DTensors names those of an equal mesh of an earlier run in the process."""
    dist.destroy_process_group = lambda *_: None
    out: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        made = MODES[args["mode"]](Path(args["folder"]) / name / args["mode"])
        result = train(replace(made, layout=layout))
        out[name] = [result.eval_loss, result.eval_peak_bytes, result.predicted_peak_bytes]
    return out


def unchanged(folder: Path) -> TrainRecipe:
    """The weights as they are drawn."""
    return recipe(folder, steps=1, optimizer=OptimizerSection(lr=0.0))


def apart(folder: Path) -> TrainRecipe:
    """A space ends a document."""
    return replace(unchanged(folder), data=DataSection(document_end=32))


MODES = {
    "documents": apart,
    "with": lambda folder: recipe(folder, plan=PlanSection(budget="16MiB")),
    "without": lambda folder: recipe(folder, evaluates=False),
    "unchanged": unchanged,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    for mode in MODES:
        (folder / f"{mode}.json").write_text(json.dumps(run_ranks(on_ranks, 4, {"folder": str(folder), "mode": mode})))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_evaluates_alike_under_its_budget(found: Path, name: str, tmp_path: Path) -> None:
    assert len(curve(found / name / "with")) == 3
    assert curve(found / name / "with") == curve(found / name / "without"), "training, to the bit"
    ranks = json.loads((found / "with.json").read_text())
    for loss, peak, predicted in (rank[name] for rank in ranks):
        assert loss == ranks[0][name][0]
        assert 0 < peak <= predicted
    for mode in ("unchanged", "documents"):
        train(replace(MODES[mode](tmp_path / mode), layout=LayoutSection()))
        (alone,) = (entry["loss"] for entry in entries(tmp_path / mode, "eval"))
        (shared,) = (entry["loss"] for entry in entries(found / name / mode, "eval"))
        assert shared == (pytest.approx(alone, rel=1e-6) if "tp" in name or LAYOUTS[name].tp > 1 else alone), mode
