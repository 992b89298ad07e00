"""Documents that share a row: each has the losses that it has alone, and the mask's bytes are in the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from jettison.cli.train import train
from jettison.core.errors import UsageError
from jettison.models.reference import Gpt, Llama, document_mask, document_numbers, positions_within
from jettison.train.build_model import build, keep_apart
from jettison.train.recipe import (
    BatchSection,
    DataSection,
    LayoutSection,
    LogSection,
    ModelSection,
    PlanSection,
    TrainRecipe,
)
from support.ranks import run_ranks

END, SEQ = 10, 64
RTOL = 1e-7
"""In fp64, but for angles and the softmax of eager attention, which are in fp32."""
GPT = ModelSection(architecture="gpt", layers=4, hidden=64, heads=4)
LLAMA = ModelSection(architecture="llama", layers=4, hidden=64, heads=4, kv_heads=2)
MODELS = {
    "gpt": GPT,
    "llama": LLAMA,
    "gpt2, eager": replace(GPT, code="huggingface", attention="eager"),
    "gpt2, sdpa": replace(GPT, code="huggingface", attention="sdpa"),
    "llama of transformers, eager": replace(LLAMA, code="huggingface", attention="eager"),
    "llama of transformers, sdpa": replace(LLAMA, code="huggingface", attention="sdpa"),
}
RANKS: dict[str, tuple[str, dict[str, Any], str]] = {
    "1f1b": ("gpt", {"pp": 2}, "fp32"),
    "zero-bubble": ("gpt", {"pp": 2, "schedule": "zero-bubble"}, "bf16-autocast"),
    "interleaved": ("llama", {"pp": 2, "virtual_stages": 2}, "fp32"),
    "tp": ("gpt", {"tp": 2}, "fp32"),
    "tp without sp": ("gpt2, eager", {"tp": 2, "sp": False}, "fp32"),
    "tp of transformers": ("llama of transformers, sdpa", {"tp": 2}, "fp32"),
    "zero 3": ("llama of transformers, sdpa", {"zero": 3}, "bf16"),
}


def test_numbers_positions_and_mask() -> None:
    ids = torch.tensor([[5, 9, 5, 5, 9, 9, 5], [5, 5, 5, 5, 5, 5, 5]])
    numbers = document_numbers(ids, 9)
    assert numbers.tolist() == [[0, 0, 1, 1, 1, 2, 3], [0] * 7]
    assert positions_within(numbers).tolist() == [[0, 1, 0, 1, 2, 0, 0], list(range(7))]
    mask = document_mask(numbers, torch.float32)
    assert mask.shape == (2, 1, 7, 7)
    seen = [[q == k or (k < q and numbers[0, q] == numbers[0, k]) for k in range(7)] for q in range(7)]
    assert (mask[0, 0] == 0).tolist() == seen
    assert (mask[1, 0] == 0).equal(torch.ones(7, 7).tril().bool())


def losses(model: nn.Module, call: Any) -> Tensor:
    """Of every token but the last, b × (s - 1), in the model's own positions."""
    if isinstance(model, Gpt | Llama):
        ids, _, *documents = call
        logits = model(ids, None, *documents)
        logits = logits.transpose(0, 1) if isinstance(model, Gpt) else logits
    else:
        ids = call["input_ids"]
        logits = model(**{name: value for name, value in call.items() if name != "labels"}).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(
        len(ids), -1
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_document_has_the_losses_that_it_has_alone(name: str) -> None:
    torch.manual_seed(0)
    plain = build(replace(MODELS[name], build="whole"), seq=SEQ, device=torch.device("cpu"))
    model = plain.model.double().eval()
    apart = keep_apart(plain, END, bf16=False)
    rows = torch.randint(11, 256, (2, SEQ + 1))
    bounds = (0, 20, 21, 50, SEQ)  # one of them a single token
    rows[0, [end - 1 for end in bounds[1:-1]]] = END
    with torch.no_grad():
        together, crossing = losses(model, apart.call(rows)), losses(model, plain.call(rows))
        for start, end in pairwise(bounds):
            alone = losses(model, plain.call(rows[:1, start : end + 1]))
            torch.testing.assert_close(together[:1, start : end - 1], alone, rtol=RTOL, atol=0)
        torch.testing.assert_close(together[1], crossing[1], rtol=RTOL, atol=0)  # one document
    assert (together[0, 21:] - crossing[0, 21:]).abs().max() > 1e-4, "attention crosses where it is not told"


def recipe(folder: Path, model: ModelSection, **more: Any) -> TrainRecipe:
    values: dict[str, Any] = {
        "batch": BatchSection(global_batch=8, micro_batch=2, seq=128),
        "data": DataSection(document_end=END),  # each line of the text is a document
    }
    return TrainRecipe(model=model, steps=2, log=LogSection(folder=str(folder / "log")), **values | more)


def curve(made: TrainRecipe) -> list[tuple[float, float]]:
    entries = map(json.loads, (Path(made.log.folder) / "log.jsonl").read_text("utf-8").splitlines())
    return [(e["loss"], e["grad_norm"]) for e in entries if e["event"] == "step"]


@pytest.mark.slow
def test_the_mask_is_in_the_plan(tmp_path: Path) -> None:
    """One process: what the mask takes is predicted; a plan keeps below its budget, and changes no bit."""
    model = replace(LLAMA, kv_heads=4)
    made = recipe(tmp_path, model, plan=PlanSection(budget="1GiB"))
    apart, crossing = train(made), train(replace(made, data=DataSection()))
    mask, numbers = 2 * 128 * 128 * 4, 2 * 128 * 8
    assert apart.predicted_peak_bytes is not None and crossing.predicted_peak_bytes is not None
    assert 0 <= apart.predicted_peak_bytes - crossing.predicted_peak_bytes - mask <= numbers
    first = train(made)
    expected, budget = curve(made), int(0.75 * first.second_step_peaks.peak_bytes)  # type: ignore[union-attr]
    planned = train(replace(made, plan=PlanSection(budget=f"{budget}B")))
    assert curve(made) == expected
    measured, predicted = planned.second_step_peaks.peak_bytes, planned.predicted_peak_bytes  # type: ignore[union-attr]
    assert predicted is not None and measured <= predicted <= budget
    assert measured >= 0.99 * predicted


def test_what_cannot_be_kept_apart_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    more = {"vocab_size": 256, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "mistral", "sliding_window": 32, **sizes, **more}))
    with pytest.raises(
        UsageError, match=r"masked to documents in a MistralForCausalLM: its attention has a sliding window"
    ):
        train(recipe(tmp_path, ModelSection(config=str(file))))
    with pytest.raises(UsageError, match=r"Tiny: its forward does not take position_ids"):
        train(recipe(tmp_path, ModelSection(factory="support.train_models:tiny")))
    with pytest.raises(UsageError, match=r"got 256, which is nowhere in the text"):
        train(recipe(tmp_path, GPT, data=DataSection(document_end=256)))
    with pytest.raises(UsageError, match=r"got document_end -1"):
        DataSection(document_end=-1)


def test_a_model_that_listens_across_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the mask, and does not go by it."""
    built = build(MODELS["llama of transformers, sdpa"], seq=SEQ, device=torch.device("cpu"))
    forward = type(built.model).forward

    def deaf(
        self: Any, input_ids: Any, labels: Any = None, position_ids: Any = None, attention_mask: Any = None
    ) -> Any:
        return forward(self, input_ids=input_ids, labels=labels, position_ids=position_ids)

    position = "transformers.masking_utils.find_packed_sequence_indices"
    monkeypatch.setattr(position, lambda _: None)  # else it sees from positions what it is not told
    monkeypatch.setattr(type(built.model), "forward", deaf)
    with pytest.raises(UsageError, match=r"its output for a document depends on the one before"):
        keep_apart(built, END, bf16=False)


def on_ranks(args: dict[str, Any]) -> dict[str, Any]:
    """On every rank: each layout without a plan, and under a share of the peak that it had."""
    out = {}
    for name in args["names"]:
        model, layout, precision = RANKS[name]
        folder = Path(args["folder"]) / name.replace(" ", "-")
        made = recipe(folder, MODELS[model], layout=LayoutSection(**layout), precision=precision)
        plain = train(made)
        first, budget = curve(made), int(0.93 * plain.second_step_peaks.peak_bytes)  # type: ignore[union-attr]
        planned = train(replace(made, plan=PlanSection(budget=f"{budget}B")))
        peaks = planned.second_step_peaks.peak_bytes, planned.predicted_peak_bytes, budget  # type: ignore[union-attr]
        out[name] = {"curves": [first, curve(made)], "peaks": peaks}
    return out


@pytest.mark.slow
def test_documents_on_two_ranks(tmp_path: Path) -> None:
    """Every stage and every rank is told where documents end: the curve of one process."""
    found = run_ranks(on_ranks, 2, {"folder": str(tmp_path), "names": list(RANKS)})[0]
    for name, (model, _, precision) in RANKS.items():
        alone = recipe(tmp_path / f"alone {name}", MODELS[model], precision=precision)
        train(alone)
        first, planned = found[name]["curves"]
        assert first == planned, name
        rounding = 1e-5 if precision == "fp32" else 2e-3
        for got, expected in zip(first, curve(alone), strict=True):
            assert got == pytest.approx(expected, rel=rounding), name
        measured, predicted, budget = found[name]["peaks"]
        assert measured <= predicted <= budget and measured >= 0.97 * predicted, (name, found[name])
