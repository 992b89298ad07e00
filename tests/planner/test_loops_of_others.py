"""What libraries and habits bring into a loop: teachers in inference mode, transforms, layers that are left out at
random, wrappers that hand attributes on, autocast inside of a forward. Each is planned, or refused in words.
"""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
from jettison.capture.fake_copies import fake_copy, fake_mode
from jettison.capture.tracer import trace_model
from jettison.core.errors import TraceError, UsageError
from jettison.core.units import Bytes
from jettison.dryrun.block_levels import dry_run_block
from jettison.dryrun.counter import measured_peak, static_tensors
from jettison.solve.checkpoint_policy import KeepAll
from support.structure import said
from support.toys import Mlp, Net

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROWS, LAYERS = 32, 64, 4
ENOUGH = Bytes(1 << 30)


def net(of: type[Net] = Net) -> Any:
    torch.manual_seed(0)
    return of(Mlp(WIDTH, 4 * WIDTH, 0.0) for _ in range(LAYERS))


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


class Scaled(Net):
    """Its step says how much each output counts."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = super().forward(x) * self.scale
        return found


def test_what_a_step_assigns_to_a_module_is_set_before_planning() -> None:
    """Planning runs the forward apart from the step as well, on copies whose assignments were undone."""

    def step(model: Any, x: Tensor) -> None:
        model.scale = 0.5
        model(x).square().backward()

    model, plain, x = net(Scaled), net(Scaled), batch()
    with pytest.raises(TraceError, match=r"no attribute 'scale'; .*: set it before planning"):
        jettison.auto_checkpoint(model, x, ENOUGH, step=step)
    model.scale = 1.0
    with jettison.auto_checkpoint(model, x, ENOUGH, step=step):
        step(model, x)
    step(plain, x)
    assert all(torch.equal(one.grad, two.grad) for one, two in zip(model.parameters(), plain.parameters(), strict=True))


class Watched(Net):
    """Registers hooks anew in each forward: they collect what layers return."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found: list[Tensor] = []
        hooks = [one.register_forward_hook(lambda _module, _args, result: found.append(result)) for one in self.layers]
        out: Tensor = super().forward(x)
        for hook in hooks:
            hook.remove()
        return out.square().mean() + sum(one.square().mean() for one in found)


def test_what_hooks_of_one_forward_collect_goes_with_it() -> None:
    """Each call of such a layer is recorded, on a copy that has the hooks as well and no cycle of references."""

    def step(model: Any, x: Tensor) -> None:
        model(x).backward()

    model, plain, x = net(Watched), net(Watched), batch()
    most = measured_peak(lambda: step(plain, x), static_tensors=static_tensors(plain, x)).peak_bytes
    with jettison.auto_checkpoint(model, x, Bytes(most * 3 // 4)) as handle:
        gc.collect()
        gc.disable()
        try:
            step(model, x)
            model.zero_grad()
            peak = measured_peak(lambda: step(model, x), static_tensors=static_tensors(model, x)).peak_bytes
        finally:
            gc.enable()
        assert peak <= handle.plan.predicted.peak_bytes
    assert all(torch.equal(one.grad, two.grad) for one, two in zip(model.parameters(), plain.parameters(), strict=True))


class Ranged(Net):
    """Makes a tensor of a number, which no op tells, and writes to it."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        scale = torch.tensor([2.0])
        scale.mul_(2.0)
        found: Tensor = super().forward(x) * scale.sum()
        return found


@pytest.mark.parametrize("how", [torch.inference_mode, nullcontext])
def test_a_frozen_teacher(how: Callable[[], AbstractContextManager[Any]]) -> None:
    def step(student: Any, teacher: Any, x: Tensor) -> None:
        with how():
            told = teacher(x)
        (student(x) - told.clone()).square().backward()

    student, teacher, x = net(), net(Ranged).requires_grad_(False), batch()
    handle = jettison.auto_checkpoint(student, x, ENOUGH, step=step, models=(student, teacher))
    step(student, teacher, x)
    got = [p.grad for p in student.parameters()]
    plain = net()
    step(plain, teacher, x)
    assert all(map(torch.equal, got, [p.grad for p in plain.parameters()]))
    handle.remove()


def test_a_frozen_judge_of_what_is_made_and_of_the_batch() -> None:
    """Its call with the batch saves nothing, and is not a forward that waits for its backward: no warning."""

    def step(maker: Any, judge: Any, x: Tensor) -> None:
        (judge(x * maker(x)) - judge(x)).square().backward()

    maker, judge, x = net(), net().requires_grad_(False), batch()
    with jettison.auto_checkpoint(maker, x, ENOUGH, step=step, models=(maker, judge)):
        step(maker, judge, x)
    plain = net()
    step(plain, judge, x)
    assert all(map(torch.equal, *([p.grad for p in one.parameters()] for one in (maker, plain))))


def test_a_step_of_nothing_but_transforms_is_refused_in_words() -> None:
    def step(model: Any, x: Tensor) -> None:
        values = {name: p.detach() for name, p in model.named_parameters()}
        torch.func.grad(lambda values: torch.func.functional_call(model, values, (x,)))(values)

    with pytest.raises(UsageError, match=r"only in torch\.func's transforms"):
        jettison.auto_checkpoint(net(), batch(), ENOUGH, step=step)


HOOKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t),
    "disable_saved_tensors_hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
    "allow_mutation_on_saved_tensors": torch.autograd.graph.allow_mutation_on_saved_tensors,
}


@pytest.mark.parametrize("hooks", HOOKS)
def test_planning_under_hooks_of_others_is_refused(hooks: str) -> None:
    """Models run without a plan there: a budget would say nothing."""

    def step(model: Any, x: Tensor) -> None:
        with HOOKS[hooks]():
            model(x).backward()

    with HOOKS[hooks](), pytest.raises(UsageError, match="would be planned under saved-tensor hooks"):
        jettison.auto_checkpoint(net(), batch(), ENOUGH)
    with HOOKS[hooks](), pytest.raises(UsageError, match="would be planned under saved-tensor hooks"):
        jettison.apply(net(), "full", batch=batch())
    with pytest.raises(UsageError, match="runs its model only under saved-tensor hooks"):
        jettison.auto_checkpoint(net(), batch(), ENOUGH, step=step)


class WritesOverSaved(nn.Module):
    """Trains inside of `allow_mutation_on_saved_tensors` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.up(x))
        kept = gate.exp()
        gate.mul_(2)
        return x + kept + gate


def test_a_forward_that_writes_over_what_it_saves_is_named() -> None:
    model, x = net(), batch()
    model.layers = nn.ModuleList(WritesOverSaved() for _ in range(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).backward()
    with pytest.raises(TraceError, match="writes in place to a tensor that autograd has saved"):
        jettison.auto_checkpoint(model, x, ENOUGH)


def test_a_transform_beside_a_backward_is_counted() -> None:
    def step(model: Any, x: Tensor) -> None:
        values = {name: p.detach() for name, p in model.named_parameters()}
        _, slope = torch.func.jvp(
            lambda x: torch.func.functional_call(model, values, (x,)), (x,), (torch.ones_like(x),)
        )
        (model(x) + slope).backward()

    model, x = net(), batch()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*runs without the plan in torch.func")
        handle = jettison.auto_checkpoint(model, x, ENOUGH, step=step)
        step(model, x)
        model.zero_grad()
        peak = measured_peak(lambda: step(model, x), static_tensors=static_tensors(model, x)).peak_bytes
    assert handle.plan is not None
    assert peak == pytest.approx(handle.plan.predicted.peak_bytes, rel=0.001)


class Dropping(Net):
    """LayerDrop (arXiv 1909.11556): every layer is left out at random."""

    rate = 0.5

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for layer in self.layers:
            if random.random() >= self.rate:
                x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("rate", [0.5, 0.0])
def test_layers_that_the_planned_forward_left_out_are_said(rate: float) -> None:
    model = net(Dropping)
    model.rate = rate
    state = random.getstate()
    random.seed(1)  # 0.13, 0.85, 0.76, 0.26
    try:
        (text,) = said(lambda: jettison.auto_checkpoint(model, (batch(),), ENOUGH))[1]
    finally:
        random.setstate(state)
    assert "draws from Python's random" in text
    assert ("2 of 4 blocks (layers.0, layers.3) did not run" in text) is (rate > 0)


class Routed(nn.Module):
    """Rows find their way by values, and a loss of their own waits in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up, self.extra = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, WIDTH), None

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        self.extra = scores.logsumexp(-1).square().mean()
        chosen = torch.where(scores[:, 0] > 0)[0]
        return x.index_add(0, chosen, self.up(x[chosen]) * scores[chosen, :1])


def test_what_blocks_leave_in_attributes_is_missed_in_words_where_they_cannot_be_recorded() -> None:
    def step(model: Any, x: Tensor) -> None:
        (model(x) + sum(layer.extra for layer in model.layers)).backward()

    torch.manual_seed(0)
    model = Net(Routed() for _ in range(LAYERS))
    with pytest.raises(TraceError, match=r"cannot be recorded .* failed without"):
        jettison.auto_checkpoint(model, batch(), ENOUGH, step=step)


class HandsOn(nn.Module):
    """As the wrapper of Lightning's Fabric: what is set on it is set on what it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "inner" and "inner" in vars(self).get("_modules", {}) and hasattr(self.inner, name):
            setattr(self.inner, name, value)
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found


def test_a_wrapper_that_hands_attributes_on_is_planned_itself() -> None:
    model, x = HandsOn(net()), batch()

    def whole() -> None:
        handle = jettison.auto_checkpoint(model, (x,), ENOUGH)
        model(x).backward()
        assert "forward" not in vars(model.inner)
        handle.remove()
        jettison.auto_checkpoint(model, (x,), ENOUGH).remove()  # no plan is left

    assert said(whole)[1] == []


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_keeps_a_budget(precision: str) -> None:
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cpu", precision=precision)

    def run(budget: int | None = None) -> tuple[list[Tensor], int, int]:
        inner = net()
        model, optimizer = fabric.setup(inner, torch.optim.AdamW(inner.parameters(), 1e-3))
        x = batch()
        predicted = 0
        if budget is not None:
            handle = jettison.auto_checkpoint(model, (x,), Bytes(budget), optimizer=optimizer)
            assert handle.plan is not None
            predicted = handle.plan.predicted.peak_bytes

        def step() -> None:
            fabric.backward(model(x))
            optimizer.step()

        step()
        optimizer.zero_grad()
        peak = measured_peak(step, static_tensors=static_tensors(model, x, optimizer.optimizer)).peak_bytes
        return [p.detach().clone() for p in inner.parameters()], peak, predicted

    plain, most, _ = run()
    same, peak, predicted = run(int(0.95 * most))
    assert all(map(torch.equal, plain, same))
    assert peak <= int(0.95 * most)
    assert peak == pytest.approx(predicted, rel=0.03)


class Inside(Net):
    """Switches autocast on by itself, as a forward does that Accelerate has prepared."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = super().forward(x)
        return found


def test_blocks_are_dry_run_under_the_autocast_that_they_were_called_under() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        around = trace_model(net(), batch())
    inside = trace_model(net(Inside), batch())
    found = []
    for trace in (around, inside):
        found.append([dry_run_block(trace, cls, KeepAll(), "none", 0.0) for cls in trace.classes.values()])
    assert found[0] == found[1]


class Statistics:
    """As PEFT's AdaLoRA keeps them: an object with tables of tensors."""

    def __init__(self) -> None:
        self.model: Any = None
        self.tables = {"large": torch.ones(64, 64), "small": torch.ones(3)}


def test_large_tensors_of_objects_are_not_copied_for_a_recording() -> None:
    model, kept = net(), Statistics()
    model.statistics = kept
    kept.model = model
    mode = fake_mode()
    copied = fake_copy(model, mode)
    tables = copied.statistics.tables
    assert type(tables["large"]).__name__ == "FakeTensor"
    assert type(tables["small"]) is Tensor  # a forward may read numbers out of it
    assert tables["small"] is not kept.tables["small"]
    assert copied.statistics.model is copied


class Switched(Mlp):
    """One of two programs, as under one adapter and another."""

    more = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y.exp().sin() * y.tanh() if self.more else y


class Both(Net):
    """As an X-LoRA: every block runs under both in one forward."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = []
        for more in (False, True):
            for layer in self.layers:
                layer.more = more
            found.append(super().forward(x))
        return found[0] + found[1]


def test_a_block_may_run_two_programs_in_one_forward() -> None:
    torch.manual_seed(0)
    model, x = Both(Switched(WIDTH, 4 * WIDTH, 0.0) for _ in range(LAYERS)), batch()
    model(x).backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*runs other ops than it was planned with")
        jettison.auto_checkpoint(model, x, ENOUGH, step=lambda model, x: model(x).backward())
        model(x).backward()
    assert all(map(torch.equal, plain, [p.grad for p in model.parameters()]))


class Listing(Mlp):
    """Leaves its output in a list as well, as experts do with router logits."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.found: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        self.found.append(y)
        return y


class Refining(Net):
    """Recurrent depth, as in HRM and TRM: passes without gradients over the blocks, then one that trains them."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = x
        with torch.no_grad():
            for _ in range(2):
                y = self.passed(y + x)
        for layer in self.layers:
            vars(layer).get("found", []).clear()
        y = self.passed(y + x)
        more = [layer.found.pop().square().mean() for layer in self.layers if isinstance(layer, Listing)]
        return torch.stack([y.square().mean(), *more]).sum()

    def passed(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("block", [Mlp, Listing])
def test_passes_over_the_blocks_without_gradients_inside_of_a_forward(block: type[nn.Module]) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return Refining(block(WIDTH, 4 * WIDTH, 0.0) for _ in range(LAYERS))

    plain, model, x = made(), made(), batch()
    with pytest.raises(jettison.Infeasible) as refused:
        jettison.auto_checkpoint(model, (x,), 1)
    handle = jettison.auto_checkpoint(model, (x,), refused.value.minimum_budget_bytes or 0)
    for one in (plain, model):
        one(x).backward()
    assert all(map(torch.equal, *([p.grad for p in one.parameters()] for one in (plain, model))))
    model.zero_grad()
    peak = measured_peak(lambda: model(x).backward(), static_tensors=static_tensors(model, x)).peak_bytes
    assert handle.plan is not None
    assert peak == pytest.approx(handle.plan.predicted.peak_bytes, abs=64)
