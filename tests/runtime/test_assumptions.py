"""A loop that is not the one that was planned for is noticed: one warning, that says what, and what was assumed."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.capture.tracer import trace_model
from jettison.core.errors import Infeasible
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from jettison.planner import apply, plan

HIDDEN = 32


class Model(nn.Module):
    """Four blocks; the output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (
            nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
            for _ in range(4)
        )
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return (x if mask is None else x * mask).square().mean()


def planned(model: nn.Module, x: Tensor, *, gradients_preallocated: bool = False) -> Any:
    """Under its smallest budget."""
    try:
        plan(trace_model(model, (x,)), Bytes(1), measure=False, gradients_preallocated=gradients_preallocated)
    except Infeasible as refused:
        least = refused.minimum_budget_bytes
    found = plan(trace_model(model, (x,)), Bytes(least), measure=False, gradients_preallocated=gradients_preallocated)
    return apply(model, plan=found, batch=(x,))


def twice(model: nn.Module, x: Tensor) -> None:
    (model(x) / 2).backward()
    (model(x) / 2).backward()


def kept_at_zero(model: nn.Module, x: Tensor) -> None:
    model(x).backward()
    model.zero_grad(set_to_none=False)
    model(x).backward()


def longer(model: nn.Module, x: Tensor) -> None:
    model(torch.cat([x, x])).backward()


def masked(model: nn.Module, x: Tensor) -> None:
    model(x, mask=torch.ones(x.shape[0], 1)).backward()


def retained(model: nn.Module, x: Tensor) -> None:
    model(x).backward(retain_graph=True)


def partial(model: nn.Module, x: Tensor) -> None:
    model(x).backward(inputs=[next(model.layers[3].parameters())])


def in_autocast(model: nn.Module, x: Tensor) -> None:
    loss = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()


def two_at_once(model: nn.Module, x: Tensor) -> None:
    (model(x) + model(x)).backward()


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (twice, "gradients .* are there already when the forward begins"),
        (kept_at_zero, "gradients .* are there already when the forward begins"),
        (longer, r"the batch is larger .*: 32 x 32 \(0\), planned was 16 x 32 \(0\)"),
        (masked, r"16 x 1 \(mask\), planned was 16 x 32 \(0\);"),
        (retained, "backward keeps the graph"),
        (partial, "backward stops before all parameters"),
        (in_autocast, "backward runs inside autocast"),
        (two_at_once, "a forward begins while 1 earlier one still waits"),
    ],
)
def test_other_loops_are_noticed_once(loop: Callable[[nn.Module, Tensor], None], said: str):
    torch.manual_seed(0)
    model, x = Model(), torch.randn(16, HIDDEN)
    with planned(model, x), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            loop(model, x)
            model.zero_grad(set_to_none=True)
    about = [str(w.message) for w in found if "the plan for" in str(w.message)]
    assert len(about) == 1, about
    with pytest.warns(UserWarning, match=said):
        warnings.warn(about[0], stacklevel=1)
    assert "To have it held" in about[0]


@pytest.mark.filterwarnings("error")
def test_the_planned_loop_says_nothing_nor_does_a_shorter_batch():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(16, HIDDEN)
    with planned(model, x):
        for batch in (x, x, x[:8].clone()):  # warnings are errors
            model(batch).backward()
            model.zero_grad(set_to_none=True)
        with torch.no_grad():
            model(torch.cat([x, x]))


class Spare(Model):
    """Its first parameter is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(0, nn.Identity())
        self.layers[0].scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in list(self.layers)[1:]:
            x = x + layer(x)
        return x.square().mean()


def test_a_parameter_that_nobody_uses_makes_no_backward_partial():
    torch.manual_seed(0)
    model, x = Spare(), torch.randn(8, HIDDEN)
    with planned(model, x), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).backward()
    with planned(model, x), pytest.warns(UserWarning, match="backward stops before"):
        model(x).backward(inputs=[model.layers[3][1].weight])


def test_gradients_that_are_held_are_counted():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(16, HIDDEN)
    handle = planned(model, x, gradients_preallocated=True)
    for _ in range(3):
        peak = measured_peak(lambda: model(x).backward(), static_tensors=static_tensors(model, (x,)))
        assert peak.peak_bytes <= handle.plan.budget_bytes
    assert peak.peak_bytes == handle.plan.predicted.peak_bytes
    assert handle.plan.from_json(handle.plan.to_json()).gradients_preallocated


def test_gradients_that_are_there_while_planning_are_counted():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(16, HIDDEN)
    model(x).backward()
    with jettison.auto_checkpoint(model, (x,), "1GiB") as handle:
        assert handle.plan.gradients_preallocated
    model.zero_grad(set_to_none=True)
    with jettison.auto_checkpoint(model, (x,), "1GiB") as handle:
        assert not handle.plan.gradients_preallocated


class Headed(Model):
    """Returns logits, and a loss where there are targets."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, 16 * HIDDEN)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        loss = {} if targets is None else {"loss": nn.functional.cross_entropy(logits, targets)}
        return loss | {"logits": logits}


def headed(keep_output: bool, over_bytes: int) -> tuple[Any, dict[str, Tensor]]:
    """A budget that is so much above the smallest."""
    torch.manual_seed(0)
    model = Headed()
    batch = {"x": torch.randn(16, HIDDEN), "targets": torch.randint(0, HIDDEN, (16,))}
    options: dict[str, Any] = {"loss_fn": None, "keep_output": keep_output, "check": "off"}
    with pytest.raises(Infeasible) as refused:
        jettison.auto_checkpoint(model, batch, Bytes(1), **options)
    budget = Bytes(refused.value.minimum_budget_bytes + over_bytes)
    jettison.auto_checkpoint(model, batch, budget, **options)
    return model, batch


@pytest.mark.parametrize(("keep_output", "over_bytes", "said"), [(True, 0, 0), (False, 0, 1), (False, 1 << 20, 0)])
def test_outputs_that_the_loop_holds_are_noticed_where_they_do_not_fit(
    keep_output: bool, over_bytes: int, said: int
) -> None:
    model, batch = headed(keep_output, over_bytes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if not keep_output:
            model(**batch)["loss"].backward()  # as planned
    model.zero_grad(set_to_none=True)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            output = model(**batch)
            output["loss"].backward()
            model.zero_grad(set_to_none=True)
    texts = [str(w.message) for w in found]
    assert len(texts) == said, texts
    assert all("still holds what the model returned (32.00 KiB)" in text for text in texts)  # logits of 16 x 512


LOSSES: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    "scaled": lambda model, output, targets: torch.ones(2, requires_grad=True)[0] * output["loss"],
    "returned no loss": lambda model, output, targets: nn.functional.cross_entropy(output["logits"], targets),
    "more than the model's": lambda model, output, targets: output["loss"] + output["logits"].pow(2).mean(),
    "states, weights": lambda model, output, targets: output["loss"] + max(model.parameters(), key=len).sum(),
}


@pytest.mark.parametrize("said", LOSSES)
def test_a_loss_that_is_not_the_model_s_own_is_noticed(said: str) -> None:
    model, batch = headed(True, 1 << 20)
    given = {"x": batch["x"]} if said == "returned no loss" else batch
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            LOSSES[said](model, model(**given), batch["targets"]).backward()
            model.zero_grad(set_to_none=True)
    texts = [str(w.message) for w in found]
    assert len(texts) == (said != "scaled"), texts
    assert all(said in text and "loss_fn=..." in text for text in texts)


def test_parameters_that_are_trained_and_were_frozen_are_noticed_once() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(16, HIDDEN)
    model.layers[:2].requires_grad_(False)
    with planned(model, x), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for trained in (False, True, True):
            model.layers[1].requires_grad_(trained)
            model(x).backward()
            model.zero_grad(set_to_none=True)
    (text,) = [str(w.message) for w in found if "that were frozen" in str(w.message)]
    assert "6 parameters (32.88 KiB) are trained that were frozen" in text  # 2 * 32 + 2 * 32 * 128 + 128 + 32 in fp32


class Catching(Model):
    """Its first forward leaves a reference cycle: an error that a variable of the frame it came by holds."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if not hasattr(self, "caught"):
            self.caught = True
            try:
                raise LookupError
            except LookupError as error:
                kept = error  # noqa: F841
        return super().forward(x, mask)


def test_what_a_reference_cycle_keeps_waits_for_no_backward() -> None:
    x = torch.randn(16, HIDDEN)
    handle = planned(model := Catching(), x)
    model.__dict__.pop("caught", None)
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                model.zero_grad(set_to_none=True)
                model(x).backward()
    finally:
        gc.enable()
        handle.remove()
