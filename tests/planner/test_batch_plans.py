"""Batches of other shapes than the first: each runs under a plan that it fits, made when it comes."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import random
import warnings
import weakref
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import jettison
from jettison.core.errors import Infeasible
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from jettison.planner import batch_plans
from jettison.runtime.callers import argument_of
from jettison.runtime.loop_assumptions import BatchShape, map_tensors
from jettison.verify.differences import compare_gradients
from support.toys import Headed, Mlp

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, ROWS, BLOCKS = 64, 64, 4


def net(rate: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return Headed([Mlp(WIDTH, 4 * WIDTH, rate) for _ in range(BLOCKS)], WIDTH, 4)


def rows(count: int, length: int = 4) -> Tensor:
    return torch.randn(count, length, WIDTH, generator=torch.Generator().manual_seed(count))


def once(model: Any, x: Tensor) -> None:
    torch.manual_seed(1)
    model.zero_grad()
    model(x).backward()


def peak_of(model: nn.Module, x: Tensor) -> int:
    """Of a step from no gradients, once what there is to plan is planned."""
    once(model, x)
    model.zero_grad(set_to_none=True)
    return measured_peak(lambda: once(model, x), static_tensors=static_tensors(model, (x,))).peak_bytes


def share_of(x: Tensor, share: float, rate: float = 0.1) -> int:
    """A budget between what plain autograd needs for this batch, and its parameters."""
    return int(share * peak_of(net(rate), x))


def test_a_larger_batch_is_planned_for_when_it_comes() -> None:
    budget = share_of(rows(ROWS), 0.9)
    model, plain = net(), net()
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(budget), keep_output=False)
    for count, length in ((ROWS, 4), (80, 4), (16, 4), (20, 12), (ROWS, 4), (80, 4)):
        x = rows(count, length)
        assert peak_of(model, x) <= budget, (count, length)
        before = torch.get_rng_state()
        plain.zero_grad()
        once(plain, x)
        assert torch.equal(before, torch.get_rng_state())
        model.zero_grad()
        once(model, x)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert {one.shape for one in handle.shapes()} == {
        f"{count} x {length} x {WIDTH} (0)" for count, length in ((ROWS, 4), (80, 4), (16, 4), (20, 12))
    }
    assert all(one.peak_bytes <= budget for one in handle.shapes())
    by_shape = {one.shape: one for one in handle.shapes()}
    assert by_shape[f"80 x 4 x {WIDTH} (0)"].planned_for == f"80 x 4 x {WIDTH} (0)"
    assert by_shape[f"16 x 4 x {WIDTH} (0)"].planned_for == f"{ROWS} x 4 x {WIDTH} (0)"
    assert by_shape[f"80 x 4 x {WIDTH} (0)"].steps == 6
    handle.remove()
    assert not any("forward" in vars(module) for module in model.modules())


def test_planning_in_the_middle_of_training_moves_no_random_stream() -> None:
    model, plain = net(), net()
    jettison.auto_checkpoint(model, rows(ROWS), Bytes(share_of(rows(ROWS), 0.9)))
    drawn = []
    for one in (model, plain):
        torch.manual_seed(3)
        random.seed(3)
        for count in (ROWS, 96, ROWS):
            one.zero_grad()
            one(rows(count)).backward()
        drawn.append((torch.rand(3).tolist(), random.random()))
    assert drawn[0] == drawn[1]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_what_is_nowhere_longer_needs_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(share_of(rows(ROWS), 0.9)))
    assert handle.batches is not None
    monkeypatch.setattr(handle.batches, "describe", None)  # not to be called
    for count in (ROWS, 8, 16, 24):
        once(model, rows(count))
    assert [one.planned_for for one in handle.shapes()] == [f"{ROWS} x 4 x {WIDTH} (0)"] * 4


def test_a_small_batch_that_comes_often_gets_a_plan_of_its_own() -> None:
    budget = share_of(rows(ROWS), 0.8)
    model = net()
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(budget))
    plans = handle.batches
    assert plans is not None and plans.now is not None and plans.now.treatment.added_seconds > 0
    plans.planning_seconds = 2.5 * plans.now.treatment.added_seconds * (16 / ROWS)
    for step in range(4):
        assert len(plans.treatments) == (1 if step < 3 else 2)
        once(model, rows(16))
    own = plans.treatments[1]
    assert own.added_seconds == 0.0, "it fits without computing anything again"
    once(model, rows(ROWS))
    assert plans.now.treatment is plans.treatments[0]
    assert peak_of(model, rows(ROWS)) <= budget


def test_what_fits_under_a_plan_that_is_there_runs_under_it() -> None:
    model = net()
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(share_of(rows(ROWS), 0.9)))
    plans = handle.batches
    assert plans is not None
    once(model, rows(8, 16))  # half the tokens, in longer rows
    assert len(plans.treatments) == 1
    assert len(plans.covers) == 2
    assert plans.covers[1].peak_bytes == peak_of(model, rows(8, 16)), "what this batch takes: the plan is for another"


def test_what_fits_under_no_plan_is_said() -> None:
    model = net()
    jettison.auto_checkpoint(model, rows(ROWS), Bytes(share_of(rows(ROWS), 0.8)))
    said = r"a batch of 512 x 4 x 64 .* does not fit into .* the smallest plan for it"
    with pytest.warns(UserWarning, match=said) as found:
        once(model, rows(512))
    lines, first = inspect.getsourcelines(once)
    (line,) = (first + number for number, text in enumerate(lines) if "backward" in text)
    assert [(one.filename, one.lineno) for one in found] == [(__file__, line)], "the user's, not ours or torch's"
    with warnings.catch_warnings(action="error"):
        once(model, rows(512))


def test_a_batch_that_cannot_be_recorded_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = net(), net()
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(share_of(rows(ROWS), 0.8)))
    assert handle.batches is not None

    def fails(*_: Any) -> Any:
        raise jettison.core.errors.TraceError("no")

    monkeypatch.setattr(handle.batches, "describe", fails)
    larger = pytest.warns(UserWarning, match="the batch is larger than the one that was planned for")
    with pytest.warns(UserWarning, match=r"cannot be planned for \(no\)"), larger:
        once(model, rows(96))
    once(plain, rows(96))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_evaluation_is_nobodys_batch() -> None:
    model = net()
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(share_of(rows(ROWS), 0.9)))
    with torch.no_grad():
        model(rows(512))
    assert handle.shapes() == []


def twice(model: Any, x: Tensor) -> None:
    torch.manual_seed(1)
    (model(x) + model(x * 0.5)).backward()


def test_a_step_of_ones_own_says_what_comes() -> None:
    budget = int(0.9 * measured(net(), twice, rows(ROWS)))
    model, plain = net(), net()
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(budget), step=twice)
    for count in (ROWS, 80, 16, 80):
        x = rows(count)
        model.zero_grad()
        plain.zero_grad()
        handle.expect(x)
        twice(model, x)
        twice(plain, x)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        assert measured(model, twice, x) <= budget
    assert next((one.shape, one.steps) for one in handle.shapes()) == (f"80 x 4 x {WIDTH} (0)", 2)


def measured(model: nn.Module, step: Any, x: Tensor) -> int:
    step(model, x)
    model.zero_grad(set_to_none=True)
    return measured_peak(lambda: step(model, x), static_tensors=static_tensors(model, (x,))).peak_bytes


def test_shapes_that_came_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_plans, "MOST_SHAPES", 3)
    model = net()
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(share_of(rows(ROWS), 0.9)))
    for count in range(1, 8):
        once(model, rows(count))
    assert [one.shape for one in handle.shapes()] == [f"{count} x 4 x {WIDTH} (0)" for count in (5, 6, 7)]


class Masked(nn.Module):
    """A model that leaves a mask of ones out, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and not mask[:, None].to(torch.bool).all():
            x = (x * mask[:, :, None]).sin().exp()
        return self.inner(x)  # type: ignore[no-any-return]


BARE = {"x": rows(ROWS)}
FULL = {**BARE, "mask": torch.ones(ROWS, 4, dtype=torch.long)}
SOME = {**BARE, "mask": torch.ones(ROWS, 4, dtype=torch.long).tril(1)}


def accumulated(model: nn.Module, batch: Any) -> None:
    """A step that moves its masks, as to a device."""
    for one in batch if isinstance(batch, list) else [batch]:
        model(**{name: one[name].clone() if name == "mask" else one[name] for name in one}).backward()


def peak_of_all(model: nn.Module, batch: Any) -> int:
    model.zero_grad(set_to_none=True)
    run = lambda: accumulated(model, batch)  # noqa: E731
    return measured_peak(run, static_tensors=static_tensors(model, tree_leaves(batch))).peak_bytes


@pytest.mark.parametrize("by_itself", [True, False])
def test_a_padded_batch_does_not_follow_the_plan_of_one_without_padding(by_itself: bool) -> None:
    budget = peak_of_all(Masked(), FULL) + 100
    assert peak_of_all(Masked(), SOME) > budget
    model = Masked()
    own = {} if by_itself else {"step": accumulated}
    handle = jettison.auto_checkpoint(model, FULL, Bytes(budget), keep_output=False, **own)  # type: ignore[arg-type]
    for batch in (FULL, SOME, FULL, SOME):
        if not by_itself:
            handle.expect(batch)
        assert peak_of_all(model, batch) <= budget
    shape, words = f"{ROWS} x 4 x {WIDTH} (x), {ROWS} x 4{{}} (mask)", (" of one value", "")
    assert [(one.shape, one.steps) for one in handle.shapes()] == [(shape.format(each), 2) for each in words]
    assert handle.batches is not None and len(handle.batches.treatments) == 2


@pytest.mark.parametrize(
    ("come", "plans"),
    [
        pytest.param([BARE, FULL, SOME, FULL, BARE], 3, id="the mask comes later"),
        pytest.param([SOME, BARE, FULL, SOME], 2, id="the mask is left out later"),
        pytest.param([[FULL, FULL], [FULL, SOME], [SOME, FULL], [FULL], [SOME, SOME]], 2, id="in some micro-batches"),
    ],
)
def test_a_plan_covers_no_batch_that_runs_other_ops(come: list[Any], plans: int) -> None:
    model, plain = Masked(), Masked()
    budget = max(map(functools.partial(peak_of_all, plain), (come[0], [FULL]))) + 100
    handle = jettison.auto_checkpoint(model, come[0], Bytes(budget), keep_output=False, step=accumulated)
    for number, batch in enumerate(come):
        handle.expect(batch)
        assert peak_of_all(model, batch) <= budget
        for one in (plain, model):
            torch.manual_seed(number)
            one.zero_grad()
            accumulated(one, batch)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert handle.batches is not None and len(handle.batches.treatments) == plans


def test_outputs_that_nobody_planned_are_warned_of() -> None:
    class Showing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor, show: bool = False) -> Any:
            return self.inner(x), [x.detach() * k for k in range(8)] if show else ()

    model = Showing()
    jettison.auto_checkpoint(model, BARE, Bytes(1 << 30), loss_fn=lambda found: found[0])
    with pytest.warns(UserWarning, match="the model runs other ops than it was planned with"):
        model(**BARE, show=True)[0].backward()


def test_one_shape_covers_another_that_is_nowhere_longer() -> None:
    whole = BatchShape.of((), {"ids": torch.zeros(4, 8), "mask": torch.zeros(4, 8, dtype=torch.bool)})
    assert whole.covers(BatchShape.of((), {"ids": torch.zeros(4, 8)}))
    assert whole.covers(BatchShape.of((), {"ids": torch.zeros(3, 8), "mask": torch.zeros(3, 1, dtype=torch.bool)}))
    for other in (torch.zeros(1, 9), torch.zeros(4, 8, dtype=torch.double), torch.zeros(32), torch.zeros(4, 8, 1)):
        assert not whole.covers(BatchShape.of((), {"ids": other}))
    assert not whole.covers(BatchShape.of((), {"labels": torch.zeros(1)}))
    assert str(whole) == "4 x 8 (ids, mask)"


@dataclass
class Rows:
    x: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        (torch.zeros(4, 96), "4 x 96 (0)"),
        ({"ids": torch.zeros(4, 96), "mask": torch.zeros(4, 96)}, "4 x 96 (ids, mask)"),
        ([{"ids": torch.zeros(4, 96), "mask": torch.zeros(4, 96)}], "4 x 96 (ids, mask)"),  # a Trainer's
        ([{"ids": torch.zeros(4, 96)}, {"ids": torch.zeros(4, 64)}], "4 x 96 (0.ids), 4 x 64 (1.ids)"),
        (UserDict(ids=torch.zeros(4, 96)), "4 x 96 (ids)"),  # a tokenizer's BatchEncoding is one
        (Rows(torch.zeros(4, 96)), "4 x 96 (x)"),
        ((torch.zeros(4, 96), 3), "4 x 96 (0)"),
        (3, "no tensors"),
    ],
)
def test_a_batch_is_named_by_what_it_holds(batch: Any, named: str) -> None:
    shape = BatchShape.of((batch,))
    assert str(shape) == named
    longer = map_tensors(lambda _, tensor: torch.zeros(4, 2 * tensor.shape[1]), batch)
    assert BatchShape.of((longer,)).covers(shape)
    assert shape.covers(BatchShape.of((longer,))) is (named == "no tensors")
    assert pickle.loads(pickle.dumps(shape)) == shape  # as ranks exchange it


def test_a_larger_batch_in_a_loop_of_ones_own_is_cured_as_the_warning_says() -> None:
    def step(model: nn.Module, batch: Any) -> None:
        model(batch["x"]).square().mean().backward()

    model = net()
    handle = jettison.auto_checkpoint(model, {"x": rows(ROWS)}, Bytes(1 << 30), step=lambda *args: step(*args))
    with pytest.warns(
        UserWarning, match=r"80 x 4 x 64 \(0\), planned was .*To have it held: call handle\.expect\(batch\)"
    ):
        step(model, {"x": rows(80)})
    model.zero_grad()
    with warnings.catch_warnings(action="error"):
        handle.expect({"x": rows(96)})
        step(model, {"x": rows(96)})


def test_a_copy_of_a_planned_model_meets_no_batches() -> None:
    model = net()
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(share_of(rows(ROWS), 0.9)))
    with pytest.warns(UserWarning, match="a deep copy of the model trains without the plan"):
        once(copy.deepcopy(model), rows(512))
    assert handle.shapes() == []


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0, 0].item(),
    "tolist": lambda x: x.detach().mean(0).tolist()[0],
    "numpy": lambda x: float(x.detach().numpy().mean()),
    "numpy of what is computed": lambda x: float((x.detach() * torch.ones(32)).numpy().mean()),
    "array": lambda x: torch.from_numpy(np.asarray(x.detach()) * 2),
    "truth": lambda x: 2.0 if (x > 0).any() else 1.0,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.filterwarnings("ignore")
def test_a_first_block_may_read_values_of_the_batch(read: Callable[[Tensor], Any]) -> None:
    """It is recorded on the batch itself, and cannot run where the batch has no values."""

    class Block(nn.Module):
        def __init__(self, reads: bool) -> None:
            super().__init__()
            self.reads, self.up, self.down = reads, nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = x * read(x) if self.reads else x
            return x + self.down(torch.tanh(self.up(x)))

    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(i == 0) for i in range(3))), torch.randn(16, 32)
    plain = copy.deepcopy(model)
    with pytest.raises(Infeasible) as refused:
        jettison.auto_checkpoint(model, (x,), 1, loss_fn=torch.mean)
    with jettison.auto_checkpoint(model, (x,), refused.value.minimum_budget_bytes, loss_fn=torch.mean):
        for step in range(2):
            for each in (model, plain):
                each.zero_grad(set_to_none=True)
                each(x + step).mean().backward()
            assert compare_gradients(model, plain).identical


class Routed(nn.Module):
    """An MLP whose shapes depend on values: it is observed on real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        chosen = (x.detach().sum(-1) > 0).nonzero()[:, 0]
        hidden = hidden.index_add(0, chosen, hidden[chosen] * 0.5)
        return x + self.down(hidden)


@pytest.mark.filterwarnings("ignore:.*cannot be (recorded|planned)", "ignore:.*does not fit into")
def test_planning_for_a_larger_batch_observes_blocks_without_the_plan_that_is_on() -> None:
    """Levels and warnings are those of a model that has no plan yet."""
    torch.manual_seed(0)
    model, large = nn.Sequential(*(Routed() for _ in range(3))), torch.randn(64, 32)
    fresh = jettison.auto_checkpoint(copy.deepcopy(model), (large,), "1GiB", loss_fn=torch.mean)
    with pytest.raises(Infeasible) as refused:
        jettison.auto_checkpoint(model, (large[:16],), 1, loss_fn=torch.mean)
    handle = jettison.auto_checkpoint(model, (large[:16],), refused.value.minimum_budget_bytes, loss_fn=torch.mean)
    assert handle.batches is not None and fresh.plan is not None
    handle.batches.restrict(1 << 30)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs without the plan")
        handle.expect((large,))
    assert [shape.peak_bytes for shape in handle.batches.report()] == [fresh.plan.predicted.peak_bytes]


class Counted:
    """A batch whose attributes the forward changes."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.calls, self.left = x, 0, [0, 1, 2]


class Again(nn.Module):
    """Calls blocks until they have counted far enough in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting() for _ in range(3))

    def forward(self, batch: Counted) -> Tensor:
        x = batch.x
        while batch.calls < 5:
            x = self.layers[batch.calls % 3](x, batch)
        return x.square().mean()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor, batch: Counted) -> Tensor:
        batch.calls += 1
        batch.left = batch.left[1:]
        return x + self.down(torch.tanh(self.up(x))) * (1 + 0.1 * batch.calls)


@pytest.mark.filterwarnings("ignore")
def test_a_forward_may_go_by_what_its_blocks_leave_in_the_batch() -> None:
    torch.manual_seed(0)
    model, batch = Again(), Counted(torch.randn(16, 32))
    plain = copy.deepcopy(model)
    with pytest.raises(Infeasible) as refused:
        jettison.auto_checkpoint(model, (batch,), 1)
    assert (batch.calls, batch.left) == (0, [0, 1, 2])
    with jettison.auto_checkpoint(model, (batch,), refused.value.minimum_budget_bytes):
        for each in (model, plain, model):
            each.zero_grad(set_to_none=True)
            each(Counted(batch.x)).backward()
        assert compare_gradients(model, plain).identical


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
def test_ops_that_nobody_planned_are_warned_of_at_their_first_step(dtype: torch.dtype) -> None:
    model, ones = Masked(), torch.ones(ROWS, 4, dtype=torch.long)
    batch = {**BARE, "mask": ones}
    budget = peak_of_all(Masked(), batch) + 100
    jettison.auto_checkpoint(model, batch, Bytes(budget), keep_output=False, step=accumulated)

    def run(batch: dict[str, Tensor]) -> None:  # of a loop that is not the planned function
        model.zero_grad()
        model(**batch).backward()

    with warnings.catch_warnings(action="error"):
        run(batch)
        run({"x": BARE["x"][:8]})
        run({**BARE, "mask": ones.to(dtype)})
    with pytest.warns(UserWarning, match="the model runs other ops than it was planned with"):
        run({**BARE, "mask": ones.tril(1).to(dtype)})


def masked_by_values(model: nn.Module, batch: Any, *, ratio: float = 1.0) -> None:
    """A step that computes its masks, as people do from the ids of padding."""
    for x in batch["micro"]:
        (ratio * model(x=x, mask=(x[:, :, 0] != 0).long())).backward()


def padded(x: Tensor) -> Tensor:
    x = x.clone()
    x[1:, 2:] = 0
    return x


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.filterwarnings("error")
def test_what_a_step_computes_for_its_model_is_planned_for(announced: bool) -> None:
    plain, model = Masked(), Masked()
    come = [{"micro": list(map(each, [rows(ROWS), rows(ROWS) + 1]))} for each in (Tensor.clone, padded)]
    come.append({"micro": [rows(ROWS), padded(rows(96))]})

    def run(model: nn.Module, batch: Any) -> None:
        model.zero_grad(set_to_none=True)
        masked_by_values(model, batch)

    def peak(model: nn.Module, batch: Any) -> int:
        return measured_peak(lambda: run(model, batch), static_tensors=static_tensors(model, batch["micro"])).peak_bytes

    run(plain, come[0])
    budget = peak(plain, come[0]) + 100
    assert peak(plain, come[1]) > budget
    step = masked_by_values if not announced else lambda *args: masked_by_values(*args)
    handle = jettison.auto_checkpoint(model, come[0], Bytes(budget), keep_output=False, step=step)
    for number in (0, 1, 2, 1, 0):
        if announced:
            handle.expect(come[number])
        assert peak(model, come[number]) <= budget, number
        torch.manual_seed(number)
        run(plain, come[number])
        torch.manual_seed(number)
        if announced:
            handle.expect(come[number])
        run(model, come[number])
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.filterwarnings("error")
def test_gradients_that_stay_allocated_are_planned_for(own: bool) -> None:
    def step(model: Any, x: Tensor) -> None:
        model(x).backward()

    def peak(model: nn.Module) -> int:
        return measured_peak(lambda: step(model, x), static_tensors=static_tensors(model, (x,))).peak_bytes

    model, x = net(), rows(ROWS)
    budget = peak(model)
    assert peak(model) > budget, "gradients were not there the first time"
    model.zero_grad(set_to_none=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    jettison.auto_checkpoint(model, x, Bytes(budget), step=step if own else None)
    for _ in range(3):
        assert peak(model) <= budget
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


class Runs:
    def step(self, model: Any, batch: Any) -> Any:
        return model(), batch

    __call__ = step


def with_locals(model: Any, batch: Any) -> Any:
    known = locals()
    return model(), known["batch"]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda model, batch: (model(), batch), id="function"),
        pytest.param(Runs().step, id="method"),
        pytest.param(Runs(), id="object"),
    ],
)
def test_the_batch_of_a_running_step_is_found(function: Callable[..., Any]) -> None:
    batch = rows(1)
    assert function(lambda: argument_of(function, 1), batch)[0] is batch
    assert function(lambda: argument_of(function, 2), batch)[0] is None
    assert argument_of(function, 1) is None
    assert with_locals(lambda: argument_of(with_locals, 1), batch) == (None, batch)


def test_looking_for_a_batch_keeps_no_other_local_alive() -> None:
    def step(_: Any, batch: Any) -> Any:  # without an assert: pytest's reads its frame's locals
        made = batch * 2
        known, found = weakref.ref(made), argument_of(step, 1)
        del made
        return known(), found

    batch = rows(1)
    made, found = step(None, batch)
    assert made is None and found is batch
