"""An optimizer that steps within backward: the forecast beside steps of a real model, on real tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jettison.core.errors import UsageError
from jettison.dryrun.counter import AllocationCounter, static_tensors
from jettison.families.presets import preset
from jettison.predict.forecast import forecast
from jettison.request.options import RunRequest
from jettison.request.resolve import resolve
from jettison.spec.precision import Gradients
from jettison.spec.recompute import Recompute
from support.formula_cases import VOCABULARY, FormulaCase, model_of, run_of


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_peak_of_a_step_is_the_measured_one(family: str, recompute: str) -> None:
    """AdamW on each parameter as its gradient is there, which then goes; GPT-2 ties its embedding to its head."""
    case = FormulaCase(family=family, attention="sdpa", batch=2, sequence=16)
    model = model_of(case)
    if recompute == "full":
        model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    ids = torch.randint(1, VOCABULARY, (case.batch, case.sequence))
    optimizers = {p: torch.optim.AdamW([p], foreach=False) for p in model.parameters()}

    def applied(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(applied)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    step()
    state = [t for one in optimizers.values() for s in one.state.values() for t in s.values()]
    with AllocationCounter([*static_tensors(model, ids), *state]) as counter:
        step()
    run = run_of(case)
    run = replace(run, recompute=Recompute.parse(recompute, layers=run.model.depth))
    found = forecast(replace(run, gradients=Gradients.IN_BACKWARD))
    assert found.peak_bytes == pytest.approx(counter.peak_bytes, rel=0.01)


def test_of_8b_no_gradients_are_left() -> None:
    """In bf16 they are 2 bytes a parameter; the head's, as the largest of its region, is there while it is applied."""
    request = RunRequest(seq=2048, precision="bf16-pure", recompute="full")
    plain, within = (
        forecast(resolve(preset("llama3-8b"), replace(request, gradients=word)).run)
        for word in ("one-by-one", "in-backward")
    )
    assert plain.stages[0].load.gradient_bytes == 2 * 8_030_261_248
    assert within.stages[0].load.gradient_bytes == 0
    assert plain.peak_bytes - within.peak_bytes > 3 * plain.stages[0].load.gradient_bytes // 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"micro_batches": 2}, "each backward would be a separate optimizer step"),
        ({"dp": 2}, "--zero 0, which all-reduces buckets"),
        ({"pp": 2, "micro_batches": 1}, "--pp 2"),
        ({"optimizer": "adamw-foreach"}, "many parameters at once"),
        ({"accumulation": "fused"}, "another buffer"),
    ],
)
def test_where_it_cannot_be_it_is_refused(more: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(preset("llama3-8b"), RunRequest(gradients="in-backward", **more))  # type: ignore[arg-type]
