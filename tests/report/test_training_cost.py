"""How sure a time is, and what a training costs."""

from __future__ import annotations

import pytest

from jettison.core.errors import UsageError
from jettison.families.config import parse_config
from jettison.families.presets import preset
from jettison.predict.ranges import Residual, kind_of, time_residual
from jettison.report.estimate import TrainingBudget, training_cost
from jettison.report.search import training_facts
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve

SURE = Residual(kind="a", runs=12, sources=5, low=0.5, expected=1.0, high=2.0)


def sure_of(model: str, gpu: str, **request: object) -> Residual:
    run = resolve(preset(model), RunRequest(**request)).run  # type: ignore[arg-type]
    return time_residual(run, gpu)


def test_whole_steps_days_hours_and_money() -> None:
    """A million tokens in steps of 3000 are 334; of 864 s each they take 3.34 days of 10 devices."""
    found = training_cost(
        TrainingBudget(tokens=1e6, price_per_gpu_hour=2.0), step_seconds=864.0, step_tokens=3000, gpus=10, sure=SURE
    )
    assert found is not None
    document = found.document()
    assert document["steps"] == 334
    assert document["days"] == pytest.approx(3.34)
    assert document["days_range"] == pytest.approx([1.67, 6.68])
    assert document["gpu_hours"] == pytest.approx(801.6)
    assert document["price"] == pytest.approx(1603.2)
    assert document["price_range"] == pytest.approx([801.6, 3206.4])
    assert found.amount == "1e06 tokens in 334 steps"
    assert found.duration == "3.3 days (1.7 to 6.7) on 10 GPUs"
    assert found.expense == "802 GPU hours for 1,603 (802 to 3,206)"


@pytest.mark.parametrize(
    ("seconds", "names"),
    [
        ((864.0, 400.0), ["training", "as asked", "cheapest and fastest"]),  # twice as many are more than twice as fast
        ((864.0, 500.0), ["training", "cheapest", "fastest"]),
        ((864.0, 900.0), ["training", "cheapest and fastest"]),
    ],
)
def test_a_search_says_what_the_devices_take_that_were_asked_for(
    seconds: tuple[float, float], names: list[str]
) -> None:
    wanted = TrainingBudget(tokens=1e6, price_per_gpu_hour=2.0)
    made = [
        training_cost(wanted, step_seconds=each, step_tokens=3000, gpus=gpus, sure=SURE)
        for each, gpus in zip(seconds, (10, 20), strict=True)
    ]
    facts = list(training_facts([one for one in made if one is not None]))
    assert [name for name, _ in facts] == names
    assert any("on 10 GPUs" in text for _, text in facts)


def test_without_a_price_there_are_hours_and_without_tokens_nothing() -> None:
    found = training_cost(TrainingBudget(tokens=3000), step_seconds=36.0, step_tokens=3000, gpus=100, sure=SURE)
    assert found is not None
    assert found.expense == "1 GPU hours" and found.document()["price"] is None
    assert training_cost(TrainingBudget(), step_seconds=1.0, step_tokens=1, gpus=1, sure=SURE) is None


@pytest.mark.parametrize(
    ("tokens", "price", "says"),
    [
        (None, 2.0, "got --price-per-gpu-hour without --tokens"),
        (0.0, None, "got --tokens 0; expected a number above 0"),
        (float("nan"), None, "got --tokens nan"),
        (1.0, -1.0, "got --price-per-gpu-hour -1"),
    ],
)
def test_what_makes_no_sense_is_refused(tokens: float | None, price: float | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        TrainingBudget(tokens=tokens, price_per_gpu_hour=price)


def test_classes_are_stacks_kinds_and_hardware() -> None:
    """Whoever names a vendor's stack runs its recipes; kernels alone are their framework's."""
    assert sure_of("llama3-8b", "h100-80gb", kernels="megatron").kind == "megatron, dense, h100-80gb"
    tuned = sure_of("llama3-8b", "h100-80gb", kernels="megatron", stack="nemo")
    assert (tuned.kind, tuned.own_class) == ("nemo, dense, h100-80gb", True)
    later = sure_of("qwen3-30b-a3b", "gb200-192gb", kernels="megatron", stack="nemo-26.06")
    assert later.kind == "nemo, experts, gb200-192gb"
    assert sure_of("llama3-8b", "h100-80gb", kernels="pytorch").kind == "torch, dense, h100-80gb"
    assert sure_of("llama3-8b", "a100-80gb", kernels="liger").kind == "transformers, dense, a100-80gb"


def test_a_class_without_runs_has_the_one_above() -> None:
    """No H20 was compared, under any stack; of verl with adapters nothing was."""
    near = sure_of("llama3-8b", "h20-96gb")
    assert (near.kind, near.own_class) == ("torch, dense", True)
    far = sure_of("llama3-8b", "h20-96gb", kernels="verl", lora="r=8")
    assert (far.kind, far.own_class) == ("dense, adapters", False)
    assert "no run of this class was compared" in far.words and "dense, adapters" in far.words


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}, "two stacks"),
        (
            {"model_type": "vit", "hidden_size": 64, "intermediate_size": 96, "image_size": 32, "patch_size": 8},
            "images",
        ),
        ({"model_type": "mamba", "hidden_size": 64, "state_size": 8}, "scans"),
    ],
)
def test_what_is_no_decoder_has_no_run_of_its_kind(config: dict[str, object], kind: str) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    model = parse_config({**sizes, **config}, name="small")
    run = resolve(model, RunRequest()).run
    found = time_residual(run, "h100-80gb")
    assert kind_of(run) == f"{kind}, dense"
    assert (found.kind, found.own_class) == ("torch", False)
    assert "no run of this class was compared" in found.words
