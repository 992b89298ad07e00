"""Steps that run out of memory, and steps that take more than was predicted: undone, said, planned again."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import jettison
from jettison.core.errors import UsageError
from jettison.core.units import Bytes
from jettison.planner.budget import Budget
from jettison.planner.handle import Applied
from jettison.planner.peak_watch import SLACK_BYTES
from planner.test_batch_plans import ROWS, net, once, peak_of, rows, share_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Counted(nn.Module):
    """Counts its forwards in a buffer; from the third on it can be made to fail once, in its backward."""

    runs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("runs", torch.zeros(()))
        self.error: Exception | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        y: Tensor = self.inner(x)
        return y


def failing(model: nn.Module, error: Exception) -> None:
    """The next backward fails half way."""

    def fails(_: Tensor) -> None:
        hook.remove()
        raise error

    hook = next(model.inner.layers[1].parameters()).register_hook(fails)


def guarded(handle: Applied, model: nn.Module, x: Tensor) -> int:
    """A step; how many attempts it took."""
    count = 0
    for attempt in handle.guard():
        with attempt:
            count += 1
            model(x).backward()
    return count


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_step_that_runs_out_of_memory_is_repeated_as_if_it_had_not_begun(error: Exception, held: bool) -> None:
    x = rows(ROWS)
    budget = share_of(x, 1.2)
    model, plain = Counted(), Counted()
    if held:
        for one in (model, plain):
            once(one, x)
    handle = jettison.auto_checkpoint(model, x, Bytes(budget), gradients_preallocated=held)
    assert handle.batches is not None and handle.batches.now is not None
    before = handle.batches.now.peak_bytes
    torch.manual_seed(5)
    random.seed(5)
    failing(model, error)
    assert guarded(handle, model, x) == 2
    drawn = torch.rand(2).tolist(), random.random()
    torch.manual_seed(5)
    random.seed(5)
    plain(x).backward()
    assert drawn == (torch.rand(2).tolist(), random.random())
    assert torch.equal(model.runs, plain.runs)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert handle.batches.now.peak_bytes <= 0.9 * before
    assert guarded(handle, model, x) == 1


def test_a_second_failure_is_the_users() -> None:
    model = Counted()
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(share_of(rows(ROWS), 1.2)))
    tried = 0
    with pytest.raises(torch.OutOfMemoryError) as caught:
        for attempt in handle.guard():
            with attempt:
                tried += 1
                raise torch.OutOfMemoryError("CUDA out of memory")
    assert tried == 2
    assert not hasattr(caught.value, "__notes__")


def test_other_errors_are_not_caught() -> None:
    model = Counted()
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(share_of(rows(ROWS), 1.2)))
    for attempt in handle.guard():
        with pytest.raises(RuntimeError, match="something else"), attempt:
            raise RuntimeError("something else")
        assert not attempt.failed


def test_a_step_that_an_optimizer_ended_is_not_repeated() -> None:
    model = Counted()
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(share_of(rows(ROWS), 1.2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        for attempt in handle.guard():
            with attempt:
                optimizer.step()
                raise torch.OutOfMemoryError("CUDA out of memory")
    assert "an optimizer had stepped already" in caught.value.__notes__[0]


def test_a_policy_that_was_not_planned_is_not_planned_again() -> None:
    model = Counted()
    handle = jettison.apply(model, "none", batch=(rows(ROWS),))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        for attempt in handle.guard():
            with attempt:
                raise torch.OutOfMemoryError("CUDA out of memory")
    assert "not repeated: no other plan can be made here" in caught.value.__notes__[0]


class Replacing(Counted):
    """Counts by another buffer each time."""

    def forward(self, x: Tensor) -> Tensor:
        self.runs = self.runs + 1
        y: Tensor = self.inner(x)
        return y


def test_a_buffer_that_a_forward_replaced_is_put_back() -> None:
    model = Replacing()
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(share_of(rows(ROWS), 1.2)))
    failing(model, torch.OutOfMemoryError("CUDA out of memory"))
    assert guarded(handle, model, rows(ROWS)) == 2
    assert model.runs.item() == 1


class Doubled(nn.Module):
    """Trained beside the model; its gradient is there before the model's backward fails."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))


def test_what_the_optimizer_trains_beside_the_model_is_undone() -> None:
    model, head = Counted(), Doubled()
    optimizer = torch.optim.SGD([*model.parameters(), head.factor], 0.1)
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(share_of(rows(ROWS), 1.3)), optimizer=optimizer)
    failing(model, torch.OutOfMemoryError("CUDA out of memory"))
    tried = 0
    for attempt in handle.guard():
        with attempt:
            tried += 1
            torch.manual_seed(5)
            (head.factor * model(rows(ROWS))).backward()
    assert tried == 2
    torch.manual_seed(5)
    assert torch.equal(head.factor.grad, model(rows(ROWS)).detach())


def test_gradients_that_would_be_added_twice_are_not() -> None:
    model, head = Counted(), Doubled()
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(share_of(rows(ROWS), 1.3)))
    failing(model, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        for attempt in handle.guard():
            with attempt:
                (head.factor * model(rows(ROWS))).backward()
    assert "1 tensors outside the planned models got gradients" in caught.value.__notes__[0]


def test_one_attempt_is_one_step() -> None:
    model = Counted()
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(share_of(rows(ROWS), 1.2)))
    for attempt in handle.guard():
        with attempt:
            model(rows(ROWS)).backward()
        with pytest.raises(UsageError, match="one attempt for two with blocks"), attempt:
            pass


def test_after_remove_nothing_is_repeated() -> None:
    model = Counted()
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(share_of(rows(ROWS), 1.2)))
    handle.remove()
    failing(model, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        guarded(handle, model, rows(ROWS))
    assert caught.value.__notes__ == ["not repeated: the plan has been removed"]


@pytest.mark.slow
def test_a_guard_in_a_guard_repeats_for_each() -> None:
    """Gradients are those of one step all the same."""
    model, plain = Counted(), Counted()
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(share_of(rows(ROWS), 1.2)))
    failures, tried = [torch.OutOfMemoryError("CUDA out of memory") for _ in range(2)], 0
    torch.manual_seed(5)
    for outer in handle.guard():
        with outer:
            for inner in handle.guard():
                with inner:
                    tried += 1
                    if failures:
                        failing(model, failures.pop())
                    model(rows(ROWS)).backward()
    torch.manual_seed(5)
    plain(rows(ROWS)).backward()
    assert tried == 3
    assert torch.equal(model.runs, plain.runs)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


# peaks of real steps --------------------------------------------------------------------------------------------------


class Numbers:
    """A device that takes what it is told to."""

    def __init__(self) -> None:
        self.peak, self.taken = 0, 0

    def begin(self) -> None:
        self.peak = self.taken = 0

    def allocated(self) -> int:
        return self.peak

    def reserved(self) -> int:
        return max(self.peak, self.taken)


@pytest.fixture
def watched() -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Applied, Numbers, int]]:
    budget = share_of(rows(ROWS), 1.0)
    before = set(_global_optimizer_post_hooks)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(budget))
    meter = Numbers()
    handle.look_at(meter, optimizer, 0, Budget(nbytes=budget, reserved_bytes=budget + 4 * SLACK_BYTES))
    yield model, optimizer, handle, meter, budget
    handle.remove()
    assert not _global_optimizer_pre_hooks
    assert set(_global_optimizer_post_hooks) <= before


def test_a_step_that_takes_what_was_predicted_says_nothing(watched: Any) -> None:
    model, optimizer, handle, meter, budget = watched
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            meter.peak = handle.batches.now.peak_bytes + SLACK_BYTES
            meter.taken = meter.peak + 100
            once(model, rows(ROWS))
            optimizer.step()
    report = handle.memory()
    assert report.fragmentation_bytes == 100
    assert report.allocated_peak_bytes == meter.peak
    assert report.predicted_bytes == handle.batches.now.peak_bytes
    assert report.budget_bytes == budget + 4 * SLACK_BYTES
    assert len(handle.batches.treatments) == 1


@pytest.mark.parametrize("phase", ["forward", "backward", "the optimizer's step"])
def test_more_than_was_predicted_is_said_at_once_and_planned_for(watched: Any, phase: str) -> None:
    model, optimizer, handle, meter, budget = watched
    over = budget // 10 + SLACK_BYTES
    more = handle.batches.now.peak_bytes + over

    def rise(*_: Any) -> None:
        meter.peak = more

    hooks = {
        "forward": lambda: model.layers[1].register_forward_hook(rise),
        "backward": lambda: next(model.layers[1].parameters()).register_hook(rise),
        "the optimizer's step": lambda: optimizer.register_step_pre_hook(rise),
    }
    with warnings.catch_warnings(action="error"):
        once(model, rows(ROWS))
        optimizer.step()
    hook = hooks[phase]()
    with pytest.warns(
        UserWarning,
        match=f"more than the plan predicted, in {phase}, and its budget is .* Later plans use a budget reduced",
    ):
        once(model, rows(ROWS))
        optimizer.step()
    hook.remove()
    assert handle.batches.budget_bytes == budget - over
    once(model, rows(ROWS))
    assert handle.batches.now.peak_bytes <= budget - over
    assert peak_of(model, rows(ROWS)) <= budget - over
    assert handle.memory().phase == phase


def test_what_planning_takes_is_none_of_a_step(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, handle, meter, budget = watched
    once(model, rows(ROWS))
    optimizer.step()
    meet = handle.batches.meet

    def trying_kernels(*given: Any) -> None:
        meter.peak = meter.taken = 10 * budget
        meet(*given)

    monkeypatch.setattr(handle.batches, "meet", trying_kernels)
    with warnings.catch_warnings(action="error"):
        once(model, rows(ROWS))
        optimizer.step()
    assert handle.batches.budget_bytes == budget


def test_an_optimizer_in_a_wrapper_is_the_same() -> None:
    """Accelerate's is an Optimizer, and has none of the hooks of one."""
    accelerate = pytest.importorskip("accelerate")
    model = net()
    prepared = accelerate.Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), 0.1))
    handle = jettison.auto_checkpoint(model, rows(ROWS), Bytes(share_of(rows(ROWS), 1.0)))
    meter = Numbers()
    handle.look_at(meter, prepared, 0, Budget(nbytes=1))
    once(model, rows(ROWS))
    meter.peak = 1 << 40
    with pytest.warns(UserWarning, match="more than the plan predicted, in backward"):
        prepared.step()
    handle.remove()


def test_what_follows_a_step_is_none_of_it(watched: Any) -> None:
    """An evaluation, say, which may take more than training does."""
    model, optimizer, handle, meter, budget = watched
    with warnings.catch_warnings(action="error"):
        once(model, rows(ROWS))
        optimizer.step()
        meter.peak = meter.taken = 10 * budget
        once(model, rows(ROWS))
        optimizer.step()
    assert handle.batches.budget_bytes == budget
    assert handle.memory().phase == "what follows the optimizer's step"


def test_without_an_optimizer_nobody_knows_what_follows_a_backward(watched: Any) -> None:
    model, _, handle, meter, budget = watched
    handle.watch.sees_steps = False
    with warnings.catch_warnings(action="error"):
        once(model, rows(ROWS))
        meter.peak = 10 * budget
        once(model, rows(ROWS))
    assert handle.batches.budget_bytes == budget


def test_reserved_memory_above_its_budget_is_planned_for(watched: Any) -> None:
    model, optimizer, handle, meter, budget = watched
    once(model, rows(ROWS))
    meter.taken = budget + 4 * SLACK_BYTES + 1000
    with pytest.warns(UserWarning, match="reserved memory rose to .* in backward, 1000 B above its budget"):
        optimizer.step()
    assert handle.batches.budget_bytes == budget - 1000


def test_nothing_is_reserved_on_a_cpu() -> None:
    with pytest.raises(UsageError, match="no CUDA device"):
        jettison.auto_checkpoint(net(), rows(ROWS), "1GiB", reserved=True)
    handle = jettison.auto_checkpoint(net(), rows(ROWS), "1GiB")
    assert handle.memory() is None


def test_copies_of_a_watched_optimizer_are_nobodys(watched: Any) -> None:
    model, optimizer, handle, meter, _ = watched
    once(model, rows(ROWS))
    other = copy.deepcopy(optimizer)
    meter.peak = 10 * handle.batches.now.peak_bytes
    with warnings.catch_warnings(action="error"):
        other.step()
