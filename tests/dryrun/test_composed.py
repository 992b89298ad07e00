"""Steps that are composed of dry runs of their parts: equal to a dry run of the whole step, level by level; where that
cannot be had, a reason, and the whole dry run's answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import jettison
from jettison.capture.tracer import trace_model
from jettison.core.errors import PlanMismatch
from jettison.dryrun.composed_peaks import why_whole
from jettison.dryrun.counter import AllocationCounter
from jettison.dryrun.step import ModulePolicy, step_of
from jettison.planner.planner import Planner, make_planner
from jettison.solve.problem import Choice
from support.families import Case, build
from support.toys import Headed

WIDTH, ROWS, LAYERS = 16, 128, 6


class Block(nn.Module):
    """Norm, a gate, dropout; what it is given beside its input all blocks are given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gate, self.down = (
            nn.LayerNorm(WIDTH),
            *(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)),
            nn.Linear(3 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        y = self.norm(x) * scale
        return x + nn.functional.dropout(self.down(self.up(y) * nn.functional.silu(self.gate(y) + bias[:, :1])), 0.1)


class Masked(nn.Module):
    """Blocks that share two tensors, of which one wants a gradient."""

    def __init__(self, layers: int = LAYERS, *, tied: bool = False) -> None:
        super().__init__()
        first = Block()
        blocks = [first if tied and n == layers - 1 else Block() for n in range(1, layers)]
        self.inner = Headed([first, *blocks], WIDTH, 2)
        self.bias = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, (x.detach() * 2).cos(), self.bias(x))


def planner_of(
    model: nn.Module, batch: Any, optimizer: type[torch.optim.Optimizer] | None = None, **how: Any
) -> Planner:
    traced = trace_model(model, batch, **how)
    stepped = None if optimizer is None else optimizer(traced.fake_model.parameters())
    return make_planner(traced, measure=False, composes=True, optimizer=stepped)


@cache
def masked() -> Planner:
    torch.manual_seed(0)
    return planner_of(Masked(), (torch.randn(ROWS, WIDTH),), torch.optim.AdamW)


def chosen(planner: Planner, root: str, keys: list[str]) -> ModulePolicy:
    return planner.part(Choice(root=root, regions=tuple(keys)))


def keys_of(planner: Planner) -> list[list[str]]:
    return [list(planner.options.points[call.class_key]) for call in planner.trace.calls]


def levels_of(planner: Planner) -> Iterator[ModulePolicy]:
    """Every option, in all blocks at once; every option of the root; some that are mixed."""
    offered, roots, draw = keys_of(planner), list(planner.options.root_points), random.Random(0)
    for n in range(max(map(len, offered))):
        yield chosen(planner, roots[n % len(roots)], [keys[min(n, len(keys) - 1)] for keys in offered])
    for _ in range(6):
        yield chosen(planner, draw.choice(roots), [draw.choice(keys) for keys in offered])


def assert_equal(planner: Planner, part: ModulePolicy) -> bool:
    """Whether the step was composed."""
    judge = planner.judge
    found = judge.step(part)
    assert judge.problem == ""
    whole = step_of([part], judge.dry_step, judge.pricing)
    assert replace(found, composed=False) == whole
    assert found.levels is not None, "levels of the whole step are compared with them"
    return found.composed


FAMILIES = [
    pytest.param(Case(family="gpt2", layers=4, dropout=True), marks=pytest.mark.slow),
    pytest.param(Case(family="mixtral", layers=4), marks=pytest.mark.slow),
    pytest.param(Case(family="llama", layers=4, cache=True), marks=pytest.mark.slow),
    pytest.param(Case(family="bert", layers=4, dropout=True), marks=pytest.mark.slow),
    pytest.param(Case(family="gemma2", layers=4, attention="eager"), marks=pytest.mark.slow),
    pytest.param(Case(family="vit", layers=4), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_every_level_is_that_of_a_whole_dry_run(case):
    built = build(case)
    with built.context():
        planner = planner_of(built.model, built.batch, torch.optim.AdamW, loss_fn=built.loss_fn)
        composed = [assert_equal(planner, part) for part in levels_of(planner)]
    assert not planner.judge.problem
    ways = {way for root in planner.judge.roots.values() for way in root.summed}
    shown = 1 if len(ways) == 1 else max(map(len, keys_of(planner)))
    assert sum(composed) >= len(composed) - shown, "but for steps that show each policy where gradients come alike"


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_choice_is_that_of_a_whole_dry_run(data):
    planner = masked()
    keys = [data.draw(st.sampled_from(keys)) for keys in keys_of(planner)]
    assert_equal(planner, chosen(planner, data.draw(st.sampled_from(list(planner.options.root_points))), keys))


class Branch(nn.Module):
    """Sum that a block adds to its input, and its gate before the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gate = nn.LayerNorm(WIDTH), *(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, returns_gate: bool) -> Tensor | tuple[Tensor, Tensor]:
        y = self.norm(x)
        gate = self.gate(y)
        added = self.down(self.up(y) * nn.functional.silu(gate))
        return (added, gate) if returns_gate else added


class Between(nn.Module):
    """Blocks between two linear layers. ``how``: what else has the tensors between blocks, and their gradients."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        self.layers, self.how = nn.ModuleList(Branch() for _ in range(4)), how

    def forward(self, x: Tensor) -> Tensor:
        x, seen, gates = self.embed(x), [], []
        for layer in self.layers:
            y = layer(x, returns_gate=self.how == "router logits")
            if self.how == "router logits":
                y, gate = y
                gates.append(gate)
            x = x + y if self.how == "skips" else y
            if self.how == "a skip over two blocks" and len(seen) == 3:
                x = x + seen[0]
            if self.how == "parallel blocks" and len(seen) % 2:
                x = x + seen[-1]
            seen.append(x)
        loss = self.head(self.norm(x)).square().mean()
        if self.how == "hidden states":
            loss = loss + sum(y.square().mean() for y in seen)
        if self.how == "router logits":
            loss = loss + torch.cat(gates).softmax(-1).square().mean()
        return loss


since_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="not composed with torch 2.11: dry-run whole")


@pytest.mark.parametrize(
    "how",
    [
        "skips",
        pytest.param("a skip over two blocks", marks=since_2_13),
        "parallel blocks",
        pytest.param("hidden states", marks=since_2_13),
        "router logits",
    ],
)
def test_gradients_that_others_hold_are_what_they_are_in_the_step(how: str) -> None:
    torch.manual_seed(0)
    planner = planner_of(Between(how), (torch.randn(ROWS, WIDTH),))
    composed = [assert_equal(planner, part) for part in levels_of(planner)]
    assert any(composed)


def test_blocks_that_hold_one_input_together_are_dry_run_whole():
    planner = masked()
    run = next(s for s in planner.options.problem.segments if (s.start, s.stop) == (1, 3))
    keys = ["none", run.key, run.key, *["none"] * (LAYERS - 3)]
    part = planner.part(Choice(root=list(planner.options.root_points)[-1], regions=tuple(keys), segments=((1, 3),)))
    assert not assert_equal(planner, part)


def test_a_tied_block_is_dry_run_whole_or_seen_by_itself():
    torch.manual_seed(0)
    planner = planner_of(Masked(tied=True), (torch.randn(ROWS, WIDTH),))
    part = next(levels_of(planner))
    assert planner.judge.problem == "a block is called twice"
    assert not planner.judge.step(part).composed


def test_references_that_nobody_watches_end_composition(monkeypatch):
    monkeypatch.setattr(AllocationCounter, "watch", lambda *_, **__: {})
    torch.manual_seed(0)
    planner = planner_of(Masked(), (torch.randn(ROWS, WIDTH),))
    assert planner.judge.problem == "a composed step is not what it is when it is run"
    for part in levels_of(planner):
        assert planner.judge.step(part) == step_of([part], planner.judge.dry_step, planner.judge.pricing)


def test_gradients_whose_sum_depends_on_other_blocks_end_composition():
    """The first gradient of a sum's argument is one number, expanded; added to another, it is a tensor."""

    class Summed(Block):
        def forward(self, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
            return x + self.down(self.up(self.norm(x) * scale) * bias.sum())

    torch.manual_seed(0)
    model = Masked()
    model.inner = Headed([Summed() for _ in range(LAYERS)], WIDTH, 2)
    planner = planner_of(model, (torch.randn(ROWS, WIDTH),))
    assert planner.judge.problem
    part = next(levels_of(planner))
    assert not planner.judge.step(part).composed


def test_a_step_that_comes_out_wrong_is_dry_run_whole_from_then_on():
    torch.manual_seed(0)
    planner = planner_of(Masked(), (torch.randn(ROWS, WIDTH),))
    judge, parts = planner.judge, list(levels_of(planner))
    compose = judge.compose

    def wrong(part):
        found = compose(part)
        return found and replace(found, static_bytes=found.static_bytes - 4)

    judge.compose = wrong
    for part in parts:
        assert judge.step(part) == step_of([part], judge.dry_step, judge.pricing)
    assert judge.problem == "a composed step is not what it is when it is run"


def test_what_is_never_composed_has_a_name():
    planner = masked()
    trace, step = planner.trace, planner.judge.dry_step
    assert why_whole(trace, step, offloads=False) == ""
    assert "host" in why_whole(trace, step, offloads=True)
    assert "custom" in why_whole(trace, object(), offloads=False)
    assert "no blocks" in why_whole(replace(trace, calls=[]), step, offloads=False)


def test_a_sweep_says_which_peaks_were_composed_and_one_plan_is_dry_run():
    torch.manual_seed(0)
    traced = trace_model(Masked(), (torch.randn(ROWS, WIDTH),))
    planner = make_planner(traced, measure=False)
    least, plain = planner.minimum_budget_bytes, planner.plain_budget_bytes
    budgets = [jettison.Bytes(least + (plain - least) * n // 11) for n in range(1, 11)]
    swept = jettison.plan.sweep(traced, budgets, measure=False)
    assert sum(plan.predicted.composed for plan in swept) >= 8
    for plan, budget in zip(swept, budgets, strict=True):
        part = jettison.planner.planner.module_policy(traced, plan)
        whole = step_of([part], planner.judge.dry_step, planner.judge.pricing)
        assert (plan.predicted.peak_bytes, plan.levels) == (whole.peak_bytes, whole.levels)
        assert whole.peak_bytes <= budget
    assert not jettison.plan(traced, budgets[0], measure=False).predicted.composed


def test_a_plan_whose_peak_was_composed_is_dry_run_before_it_is_applied():
    torch.manual_seed(0)
    model, batch = Masked(), (torch.randn(ROWS, WIDTH),)
    traced = trace_model(model, batch)
    planner = make_planner(traced, measure=False)
    least, part = planner.minimum_budget_bytes, planner.plain_budget_bytes // 64
    budgets = [jettison.Bytes(least + times * part) for times in (0, 2, 3, 4)]
    plan = next(p for p in jettison.plan.sweep(traced, budgets, measure=False) if p.predicted.composed)
    with jettison.apply(model, plan=plan, batch=batch):
        model(*batch).backward()
    too_little = replace(plan, predicted=replace(plan.predicted, peak_bytes=plan.predicted.peak_bytes - 1))
    with pytest.raises(PlanMismatch, match="a dry run of its own takes"):
        jettison.apply(model, plan=too_little, batch=batch)
