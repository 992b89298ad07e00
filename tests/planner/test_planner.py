"""The planner: budgets held when measured, monotone, infeasible with a number that works, deterministic, portable."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jettison
import jettison.dryrun.step as step_module
from jettison.capture.tracer import trace_model
from jettison.core.errors import Infeasible, PlanMismatch, UsageError
from jettison.core.units import Bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from jettison.dryrun.step import dry_run_batch, fake_optimizer
from jettison.planner.apply import apply, apply_candidate
from jettison.planner.planner import Planner, make_planner
from jettison.solve.checkpoint_policy import Full, KeepAll
from jettison.solve.plan import Plan
from jettison.verify.differences import compare_gradients, independent_copy, same_bits
from support.toys import Headed
from support.training import sgd

HIDDEN, ROWS = 32, 64


class Block(nn.Module):
    """Norm, wide inner layers, a gate, dropout: many ways to keep and to drop."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.gate = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down, self.dropout = nn.Linear(4 * HIDDEN, HIDDEN), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.dropout(self.down(self.up(y) * nn.functional.silu(self.gate(y))))


class Thin(nn.Module):
    """Its input is nearly all that it saves, so that only a segment can save much."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(HIDDEN, 1), nn.Linear(1, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x).tanh())


def stack(block: type[nn.Module] = Block, layers: int = 4) -> Headed:
    return Headed((block() for _ in range(layers)), HIDDEN, 2)


def make(block: type[nn.Module] = Block, layers: int = 4) -> tuple[Headed, Tensor]:
    torch.manual_seed(0)
    return stack(block, layers), torch.randn(ROWS, HIDDEN)


def planner_for(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer | None = None) -> Planner:
    traced = trace_model(model, (x,))
    twin = fake_optimizer(optimizer, model, traced) if optimizer is not None else None
    return make_planner(traced, measure=False, optimizer=twin)


@cache
def planner() -> Planner:
    return planner_for(*make())


def step(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
    torch.manual_seed(1)
    loss = model(x)
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    return loss.detach()


def peak(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer | None = None) -> int:
    model.zero_grad(set_to_none=True)
    step(model, x, optimizer)
    model.zero_grad(set_to_none=True)
    statics = static_tensors(model, (x,), optimizer)
    return measured_peak(lambda: step(model, x, optimizer), static_tensors=statics).peak_bytes


def assert_same_step(model: nn.Module, plain: nn.Module, x: Tensor) -> None:
    for m in (model, plain):
        m.zero_grad(set_to_none=True)
    assert same_bits(step(model, x), step(plain, x))
    report = compare_gradients(model, plain)
    assert report.identical, report.differences[:3]


def between(found: Planner, share: float) -> int:
    lowest = found.minimum_budget_bytes
    return lowest + round((found.plain_budget_bytes - lowest) * share)


# budgets --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_optimizer", [False, True], ids=["bare", "sgd"])
def test_no_plan_is_above_its_budget_when_measured(with_optimizer: bool) -> None:
    start, x = make()
    found = planner_for(start, x, sgd(start.parameters()) if with_optimizer else None)
    for share in (0.0, 0.5, 0.9):
        budget_bytes = between(found, share)
        model = independent_copy(start)
        optimizer = sgd(model.parameters()) if with_optimizer else None
        chosen = found.plan(budget_bytes)
        with apply_candidate(model, found, chosen, budget_bytes):
            got = peak(model, x, optimizer)
        assert got == chosen.step.peak_bytes <= budget_bytes


def test_more_budget_is_never_slower() -> None:
    found = planner()
    budgets = [between(found, share / 12) for share in range(13)]
    seconds = [found.plan(budget).solution.levels.seconds for budget in budgets]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 0.0 == seconds[-1]
    assert len(set(seconds)) > 5


def test_infeasible_says_what_would_do_and_that_does() -> None:
    model, x = make()
    plain = independent_copy(model)
    with pytest.raises(Infeasible) as caught:
        jettison.auto_checkpoint(model, (x,), "64KiB")
    minimum = caught.value.minimum_budget_bytes
    assert caught.value.budget_bytes == 64 * 1024 < minimum
    assert f'"{minimum}B"' in str(caught.value)
    assert not any("forward" in vars(m) for m in model.modules()), "a refused model is left as it was"
    with jettison.auto_checkpoint(model, (x,), f"{minimum}B"):
        assert_same_step(model, plain, x)
        assert peak(model, x) <= minimum < peak(plain, x)


@pytest.mark.parametrize("more", [0, 1, 10**9])
def test_nothing_to_do_is_an_empty_plan_and_not_an_error(more: int) -> None:
    found = planner()
    budget_bytes = found.plain_budget_bytes + more
    made = found.as_plan(found.plan(budget_bytes), budget_bytes)
    assert {entry.policy for entry in (*made.layers, made.root)} == {"none"}
    assert made.segments == () and made.predicted.overhead_fraction == 0.0
    assert made.predicted.peak_bytes == found.options.baseline.peak_bytes
    assert sum(entry.recompute_flops for entry in made.layers) == 0


def test_one_byte_less_than_plain_is_something_to_do() -> None:
    found = planner()
    chosen = found.plan(found.plain_budget_bytes - 1)
    assert chosen.step.peak_bytes < found.options.baseline.peak_bytes
    assert chosen.solution.levels.seconds > 0.0


# determinism ----------------------------------------------------------------------------------------------------------

HASH_SCRIPT = """
from test_planner import between, make, planner_for
found = planner_for(*make())
for share in (0.0, 0.5):
    budget = between(found, share)
    print(found.as_plan(found.plan(budget), budget).hash)
"""


def test_two_planners_in_two_processes_decide_alike() -> None:
    def run(seed: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", HASH_SCRIPT],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
            env={"PYTHONHASHSEED": seed, "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        )
        return done.stdout.split()

    found = planner_for(*make())
    budgets = [between(found, share) for share in (0.0, 0.5)]
    here = [found.as_plan(found.plan(budget), budget).hash for budget in budgets]
    assert run("1") == here and len(set(here)) == 2


# segments -------------------------------------------------------------------------------------------------------------


def test_many_thin_layers_need_segments() -> None:
    layers = 24
    model, x = make(Thin, layers)
    plain = independent_copy(model)
    found = planner_for(model, x)
    full = dry_run_batch(found.trace, {c.name: Full() for c in found.trace.calls}, KeepAll()).peak_bytes
    budget_bytes = full // 2
    chosen = found.plan(budget_bytes)
    made = found.as_plan(chosen, budget_bytes)
    assert made.segments and all(entry.policy == "full" for entry in made.layers if entry.option == "segment")
    with apply_candidate(model, found, chosen, budget_bytes) as handle:
        assert_same_step(model, plain, x)
        assert_same_step(model, plain, 2 * x)
        assert peak(model, x) == chosen.step.peak_bytes <= budget_bytes
        assert not any(report.recordings or report.fallback for report in handle.report())


# the document ---------------------------------------------------------------------------------------------------------


def planned(block: type[nn.Module], layers: int, share: float) -> tuple[Headed, Tensor, Planner, int]:
    model, x = make(block, layers)
    found = planner_for(model, x)
    return model, x, found, between(found, share)


@pytest.mark.parametrize(("block", "layers", "share"), [(Block, 4, 0.4), (Thin, 12, 0.0)])
def test_a_plan_read_back_does_the_same(block: type[nn.Module], layers: int, share: float) -> None:
    start, x, found, budget_bytes = planned(block, layers, share)
    made = found.as_plan(found.plan(budget_bytes), budget_bytes)
    again = Plan.from_json(made.to_json())
    assert again == made and again.hash == made.hash
    first, second, plain = (independent_copy(start) for _ in range(3))
    chosen = found.plan(budget_bytes)
    with apply_candidate(first, found, chosen, budget_bytes) as a, apply(second, plan=again, batch=(x,)) as b:
        for model in (first, second):
            assert_same_step(model, plain, x)
        assert peak(first, x) == peak(second, x) == made.predicted.peak_bytes
        for one, other in zip(a.regions, b.regions, strict=True):
            (mine,), (theirs,) = one.recordings.prepared.values(), other.recordings.prepared.values()
            assert mine.recipe is not None and theirs.recipe is not None
            assert mine.recipe.kept == theirs.recipe.kept and mine.recipe.links == theirs.recipe.links


def test_a_plan_for_something_else_is_refused() -> None:
    model, x, found, budget_bytes = planned(Block, 4, 0.5)
    made = found.as_plan(found.plan(budget_bytes), budget_bytes)
    with pytest.raises(PlanMismatch, match="has program"):
        apply(model, plan=made, batch=(x[:-1],))
    with pytest.raises(PlanMismatch, match=r"only in the model \['layers.4'\]"):
        apply(stack(layers=5), plan=made, batch=(x,))
    with pytest.raises(PlanMismatch, match="has program"):
        apply(stack(Thin), plan=made, batch=(x,))
    bare = copy.deepcopy(model)
    bare.extra = nn.Linear(2, 2)
    with pytest.raises(PlanMismatch, match="fingerprint"):
        apply(bare, plan=made, batch=(x,))
    assert not any("forward" in vars(m) for m in model.modules())


# policies -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("every:0", "whole number K of at least 1"),
        ("every:-2", "whole number K"),
        ("every:1.5", "whole number K"),
        ("every:", "whole number K"),
        ("everything", "unknown policy 'everything'; expected one of none, full"),
        ({"layers.9": "full"}, "'layers.9', which is not a block; the blocks are layers.0"),
        ({"layers.0": "every:2"}, "unknown policy 'every:2'"),
        (None, "either policy= or plan="),
    ],
)
def test_what_cannot_be_applied_is_a_usage_error(policy: Any, message: str) -> None:
    model, x = make()
    with pytest.raises(UsageError, match=message):
        apply(model, policy, batch=(x,))
    assert not any("forward" in vars(m) for m in model.modules())


def test_a_policy_without_a_batch_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="needs batch="):
        apply(make()[0], "full")


def test_a_mapping_treats_each_block_by_name() -> None:
    model, x = make()
    plain = independent_copy(model)
    with apply(model, {"layers.1": "full", "layers.2": "selective-op", "layers.3": Full()}, batch=(x,)) as handle:
        assert_same_step(model, plain, x)
        words = {report.name: report.word for report in handle.report()}
        dropped = [report.slots_dropped for report in handle.report()]
    assert words == {"layers.0": "none", "layers.1": "full", "layers.2": "selective-op", "layers.3": "full", "": "none"}
    assert dropped[0] == 0 < dropped[2] < dropped[1] == dropped[3] and dropped[4] == 0


def test_auto_checkpoint_leaves_the_optimizer_alone() -> None:
    model, x = make()
    optimizer = sgd(model.parameters())
    step(model, x, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    with jettison.auto_checkpoint(model, (x,), "1GiB", optimizer=optimizer):
        after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for key, state in before["state"].items():
        assert torch.equal(state["momentum_buffer"], after["state"][key]["momentum_buffer"])


class Routed(nn.Module):
    """Rows go to one of two experts by their values: how many go where is not known without them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 2)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        counts = torch.bincount(chosen, minlength=2).tolist()
        parts = x[chosen.argsort()].split(counts)
        return torch.cat([expert(part).tanh() for expert, part in zip(self.experts, parts, strict=True)])


@pytest.mark.filterwarnings("ignore:.*cannot be recorded", "ignore:.*cannot be planned")
def test_the_smallest_budget_of_blocks_that_are_observed_is_the_same_every_time_and_holds():
    model, x = make(Routed)
    found = []
    for number in range(3):
        torch.manual_seed(number)  # other random values would be routed otherwise
        with pytest.raises(Infeasible) as refused:
            jettison.auto_checkpoint(model, (x,), Bytes(1))
        found.append(refused.value.minimum_budget_bytes)
    assert len(set(found)) == 1
    with jettison.auto_checkpoint(model, (x,), Bytes(found[0])):
        assert peak(model, x) <= found[0]


@pytest.mark.filterwarnings("ignore:.*cannot be recorded", "ignore:.*cannot be planned")
def test_hooks_on_parameters_run_in_training_alone() -> None:
    """Planning goes backward through blocks that are observed, and a hook may step an optimizer."""
    model, x = make(Routed)
    called, nodes = [], []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: called.append(name))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
        nodes.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])
        nodes[-1].register_hook(lambda *_, name=name: called.append(name))
    with jettison.auto_checkpoint(model, (x,), "1GiB"):
        assert not called
        model(x).square().mean().backward()
        trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        assert sorted(called) == sorted(3 * trained)


def test_a_shorter_batch_is_planned_as_the_one_that_was_given() -> None:
    """The same buffers, so that it takes less; as large a share of them might be others, of a higher peak."""
    model, x = make()
    plain = independent_copy(model)
    found = planner_for(model, x)
    budget = (found.minimum_budget_bytes + found.plain_budget_bytes) // 2
    with jettison.auto_checkpoint(model, (x,), Bytes(budget)) as handle:
        assert_same_step(model, plain, x)
        dropped = [report.slots_dropped for report in handle.report()]
        for _ in range(3):  # the report is of the most used
            assert_same_step(model, plain, x[: ROWS // 2])
        assert [report.slots_dropped for report in handle.report()] == dropped
    assert sum(dropped) > 0


class Parts(nn.Module):
    """Returns two parts of one tensor, as blocks with two streams do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        both = self.linear(self.norm(torch.cat([x, y]))).tanh().exp().sigmoid()
        return both[: len(x)], both[len(x) :]


class TwoStreams(nn.Module):
    """Blocks that hand on parts of one tensor; the first gets two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Parts() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x, y = self.embed(x), self.embed(x[:5])
        for layer in self.layers:
            x, y = layer(x, y)
        return x.square().mean() + y.mean()


def test_blocks_that_hand_on_parts_of_one_tensor_are_recorded_once_and_rehearsed_to_the_byte() -> None:
    torch.manual_seed(0)
    model, x = TwoStreams(), torch.randn(ROWS, HIDDEN)
    plain = independent_copy(model)
    found = planner_for(model, x)
    assert found.options.baseline.peak_bytes == peak(independent_copy(model), x)
    budget = found.minimum_budget_bytes
    with jettison.auto_checkpoint(model, (x,), Bytes(budget)) as handle:
        assert_same_step(model, plain, x)
        assert peak(model, x) <= budget < found.plain_budget_bytes
        assert [report.recordings for report in handle.report()] == [0] * 5


class Storing(Routed):
    """Leaves something wide in a list that it is given, as attention does in a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(HIDDEN, 8 * HIDDEN)

    def forward(self, x: Tensor, store: list[Tensor]) -> Tensor:
        store.append(self.key(x))
        return super().forward(x) + store[-1].mean(-1, keepdim=True)


class WithStores(nn.Module):
    """Every block has a store of its own, and the caller gets them all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Storing() for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Any]:
        stores: list[list[Tensor]] = [[] for _ in self.layers]
        for layer, store in zip(self.layers, stores, strict=True):
            x = layer(x, store)
        return {"loss": x.square().mean(), "stores": stores}


@pytest.mark.filterwarnings("ignore:.*cannot be recorded", "ignore:.*cannot be planned")
def test_what_an_observed_block_leaves_in_a_cache_is_counted_until_the_step_is_over() -> None:
    torch.manual_seed(0)
    model, x = WithStores(), torch.randn(ROWS, HIDDEN)

    def step() -> None:
        output = model(x)
        output["loss"].backward()

    def measured() -> int:
        step()
        model.zero_grad(set_to_none=True)
        return measured_peak(step, static_tensors=static_tensors(model, (x,))).peak_bytes

    plain = measured()
    model.zero_grad(set_to_none=True)
    handle = jettison.auto_checkpoint(model, (x,), "1GiB")
    with handle:
        assert handle.plan is not None
        assert handle.plan.predicted.peak_bytes >= measured() == plain


class Pair(nn.Module):
    """Two wide halves with a narrow sum between them, as attention and MLP have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_the_smallest_budget_is_below_checkpointing_every_block():
    model, x = make(Pair)
    found = planner_for(model, x)
    with apply(model, "full", batch=(x,)):
        full = peak(model, x)
    assert found.minimum_budget_bytes < 0.95 * full
    assert any(option.key.startswith("lean") for region in found.options.problem.regions for option in region.options)


class Necked(nn.Module):
    """Small blocks, and two wide halves after them that are no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.neck = nn.ModuleList(Thin() for _ in range(3)), nn.Sequential(nn.Tanh(), Pair())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.neck(x).square().mean()


def test_a_part_around_the_blocks_that_is_wider_than_they_are_is_cut():
    torch.manual_seed(0)
    model, x = Necked(), torch.randn(ROWS, HIDDEN)
    found = planner_for(model, x)
    assert [call.name for call in found.trace.calls] == ["layers.0", "layers.1", "layers.2"]
    assert found.minimum_budget_bytes < 0.8 * peak(model, x)


def test_many_budgets_cost_little_more_than_one(monkeypatch):
    dry_runs, made = [], []
    dry_run, make = step_module.dry_run, make_planner
    monkeypatch.setattr(step_module, "dry_run", lambda *given, **more: dry_runs.append(1) or dry_run(*given, **more))
    entry = sys.modules["jettison.planner.auto_checkpoint"]  # the package has the function of this name
    monkeypatch.setattr(entry, "make_planner", lambda *a, **k: made.append(1) or make(*a, **k))
    x = torch.randn(ROWS, HIDDEN)
    traced = trace_model(stack(layers=3), (x,))
    plain = jettison.plan(traced, "1GiB", measure=False).predicted.peak_bytes
    least = jettison.plan(traced, "1GiB", measure=False).minimum_budget_bytes
    budgets = [least + (plain - least) * i // 9 for i in range(10)]
    alone = [jettison.plan(traced, Bytes(budget), measure=False) for budget in budgets]
    separately, made[:], dry_runs[:] = len(dry_runs), [], []
    together = jettison.plan.sweep(traced, [*map(Bytes, budgets), Bytes(1000)], measure=False)
    assert len(made) == 1
    # torch 2.11 frees a gradient of a block at another moment when it runs alone: no step is composed
    assert len(dry_runs) < separately / (2 if torch.__version__.startswith("2.11.") else 4)
    assert isinstance(together[-1], Infeasible)
    assert together[-1].minimum_budget_bytes == least
    for one, other in zip(alone, together[:-1], strict=True):
        assert other.predicted.peak_bytes <= other.budget_bytes
        assert other.predicted.step_seconds <= one.predicted.step_seconds, "it knows more choices"
    with pytest.raises(UsageError, match="no memory budgets"):
        jettison.plan.sweep(traced, [])


def test_a_plan_takes_few_dry_runs_of_the_whole_step(monkeypatch):
    whole = []
    dry_run = step_module.dry_run
    monkeypatch.setattr(step_module, "dry_run", lambda *given, **more: whole.append(1) or dry_run(*given, **more))
    traced = trace_model(stack(layers=32), (torch.randn(ROWS, HIDDEN),))
    plain = jettison.plan(traced, "1GiB", measure=False).predicted.peak_bytes
    assert len(whole) <= 4, "without a plan, as small as can be (with runs of blocks and without), with all kept"
    whole.clear()
    found = jettison.plan(traced, Bytes(int(0.7 * plain)), measure=False)
    assert found.predicted.peak_bytes <= 0.7 * plain
    assert len(whole) <= 6
