"""The dry-run step on fake tensors against the allocator on real ones; the solver's levels against the dry run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from jettison.capture.block_stand_ins import stub_outputs
from jettison.capture.model_trace import Loop, ModelTrace
from jettison.capture.tracer import trace_model
from jettison.dryrun.block_levels import dry_run_root
from jettison.dryrun.counter import measured_peak, static_tensors
from jettison.dryrun.op_costs import MeasuredWorkspace, measure_ops
from jettison.dryrun.step import StepPeaks, dry_run_batch, fake_optimizer
from jettison.planner.apply import policies_of
from jettison.planner.planner import Planner, make_planner
from jettison.runtime.install import install
from jettison.runtime.recompute_code import RecomputeCode
from jettison.solve.checkpoint_policy import KeepAll
from jettison.solve.problem import Choice, LevelPhase, RootOption, evaluate
from jettison.solve.shortest_path import least_of, walks
from jettison.solve.solver import choose
from jettison.verify.differences import independent_copy
from support.families import Built, Case, build
from support.stacks import Block, compare, rows, stack
from support.toys import Headed
from support.training import adamw

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning:transformers.*")]

POLICIES = ("none", "selective-op", "selective", "full", "every:2", "every:3", "offload", "full-offload")
LAYERS = 4
RELATIVE = 0.002  # where kernels take workspace, which is measured
SUM_RELATIVE = 0.01


@cache
def built(family: str = "llama", precision: str = "fp32") -> Built:
    attention = "eager" if family == "gpt2" else "sdpa"
    return build(Case(family=family, precision=precision, attention=attention, dropout=True, layers=LAYERS), steps=1)


@cache
def traced_in(family: str, precision: str, keep_output: bool) -> ModelTrace:
    """Dry runs leave a trace as it was: many can share it."""
    case = built(family, precision)
    return trace_model(case.model, case.batch, loop=Loop(keep_output=keep_output))


def rehearsed(
    case: Built, traced: ModelTrace, policy: str, *, optimizer: Any, with_workspace: bool = False
) -> StepPeaks:
    twin = fake_optimizer(optimizer, case.model, traced) if optimizer is not None else None
    policies, segments = policies_of(policy, [call.name for call in traced.calls])
    unmeasured = MeasuredWorkspace({})
    dry_run_batch(traced, policies, KeepAll(), segments, optimizer=twin, workspace=unmeasured)
    workspace = MeasuredWorkspace(measure_ops(unmeasured.unknown.values()) if with_workspace else {})
    return dry_run_batch(traced, policies, KeepAll(), segments, optimizer=twin, workspace=workspace)


def measured(case: Built, policy: str, *, keep_output: bool, optimizer_of: Any) -> int:
    """The second step of the matching loop, on the allocator's own events."""
    model = independent_copy(case.model)
    optimizer = optimizer_of(model.parameters()) if optimizer_of is not None else None
    traced = trace_model(model, case.batch)
    policies, segments = policies_of(policy, [call.name for call in traced.calls])
    regions = install(model, traced, policies, KeepAll(), segments)
    del traced

    def step() -> None:
        if keep_output:
            output = model(**case.batch)
            output.loss.backward()
        else:
            model(**case.batch).loss.backward()
        if optimizer is not None:
            optimizer.step()

    step()
    model.zero_grad(set_to_none=True)
    report = measured_peak(step, static_tensors=static_tensors(model, case.batch, optimizer))
    for region in reversed(regions):
        region.remove()
    return report.peak_bytes


def check(which: tuple[str, str], policy: str, *, keep_output: bool, optimizer_of: Any, tolerance: float = 0.0) -> None:
    case, traced = built(*which), traced_in(*which, keep_output)
    optimizer = optimizer_of(case.model.parameters()) if optimizer_of is not None else None
    expected = rehearsed(case, traced, policy, optimizer=optimizer, with_workspace=tolerance > 0.0)
    got = measured(case, policy, keep_output=keep_output, optimizer_of=optimizer_of)
    difference = abs(expected.peak_bytes - got)
    assert difference <= got * tolerance, f"{policy}: dry-run {expected}, measured {got}, {difference} apart"


LOOPS = [
    *((None, True, policy) for policy in POLICIES),
    *((adamw, False, policy) for policy in ("none", "selective", "every:2")),
    (None, False, "full"),
    (adamw, True, "full"),
    (torch.optim.Adafactor, False, "full"),  # reads values
    *(
        pytest.param(*loop, marks=pytest.mark.slow)
        for loop in (
            *((adamw, False, policy) for policy in ("selective-op", "full", "every:3")),
            (None, False, "none"),
            (adamw, True, "none"),
        )
    ),
]


@pytest.mark.parametrize(("optimizer_of", "keep_output", "policy"), LOOPS)
def test_the_rehearsed_peak_is_the_measured_one(policy: str, optimizer_of: Any, keep_output: bool) -> None:
    check(("llama", "fp32"), policy, keep_output=keep_output, optimizer_of=optimizer_of)


@pytest.mark.parametrize(
    "policy", ["selective", "full", "offload", *(pytest.param(p, marks=pytest.mark.slow) for p in ("none", "every:3"))]
)
def test_the_rehearsed_peak_in_bfloat16_with_eager_attention(policy: str) -> None:
    check(("gpt2", "bf16"), policy, keep_output=True, optimizer_of=adamw, tolerance=RELATIVE)


def test_a_rehearsal_leaves_the_model_and_the_twin_alone() -> None:
    case = built()
    gradients = [p.grad for p in case.model.parameters()]
    traced = trace_model(case.model, case.batch)
    policies, segments = policies_of("every:2", [call.name for call in traced.calls])
    state = torch.get_rng_state()
    first = dry_run_batch(traced, policies, KeepAll(), segments)
    assert dry_run_batch(traced, policies, KeepAll(), segments) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert [p.grad for p in case.model.parameters()] == gradients
    assert all(p.grad is None and "forward" not in vars(traced.fake_model) for p in traced.fake_model.parameters())
    assert first.phase == "backward" and first.peak_bytes == first.backward_peak_bytes > first.static_bytes


# the solver's own sums ------------------------------------------------------------------------------------------------


class Spare(torch.nn.Module):
    """Half of its parameters are used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).square().mean()


def test_an_optimizer_has_no_state_for_what_no_gradient_reaches() -> None:
    model, x = Spare(), torch.randn(4, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    traced = trace_model(model, (x,))
    found = dry_run_batch(traced, {}, KeepAll(), optimizer=fake_optimizer(optimizer, model, traced))
    parameters = sum(p.nbytes for p in model.parameters())
    state = 2 * sum(p.nbytes for p in model.used.parameters()) + 2 * torch.zeros(()).nbytes  # and the step's number
    assert found.static_bytes == parameters + x.nbytes + state


@cache
def planner_of(family: str = "llama") -> Planner:
    case = built(family)
    return make_planner(trace_model(case.model, case.batch), measure=False)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_levels_agree_with_the_rehearsal(family: str) -> None:
    """The solver adds up blocks that were dry-run alone; the whole step's dry run knows better, but not by much."""
    planner = planner_of(family)
    problem = planner.options.problem
    lowest, highest = least_of(walks(problem)), planner.options.baseline.peak_bytes
    for share in (0.0, 0.5, 1.0):
        solution = choose(problem, lowest + round((highest - lowest) * share))
        levels = evaluate(problem, solution.choice)
        assert levels.peak_bytes == pytest.approx(planner.candidate(solution).step.peak_bytes, rel=SUM_RELATIVE)
        assert levels.peak_bytes <= lowest + round((highest - lowest) * share)
        assert levels.levels[-1].phase is LevelPhase.OPTIMIZER


@pytest.mark.parametrize("segments", [((1, 4),), ((0, 2), (2, 4))])
def test_levels_of_segments_agree_with_the_rehearsal(segments: tuple[tuple[int, int], ...]) -> None:
    planner = planner_of()
    smallest = planner.options.problem.regions[0].options[0].key
    inside = {r for start, stop in segments for r in range(start, stop)}
    choice = Choice(
        root=planner.options.problem.root[-1].key,
        regions=tuple("segment" if r in inside else smallest for r in range(LAYERS)),
        segments=segments,
    )
    levels = evaluate(planner.options.problem, choice)
    step = planner.candidate(replace(planner.smallest.solution, choice=choice)).step
    assert levels.peak_bytes == pytest.approx(step.peak_bytes, rel=SUM_RELATIVE), (levels.peak, step)


class Turn(torch.nn.Module):
    """Returns a view of its argument, every time; what it holds is a number for later."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.transpose(0, 1), self.scale * 2


class Turned(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.turn = torch.nn.Linear(8, 8), Turn()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, scale = self.turn(torch.tanh(self.mix(x)))
        return (x * scale).sum()


def test_a_block_that_returns_a_view_of_its_argument_is_stubbed_by_that_view() -> None:
    traced = trace_model(Turned(), (torch.randn(6, 8),), regions=["turn"])
    region = traced.classes[traced.calls[0].class_key].trace
    with traced.context():
        x = torch.empty(6, 8).requires_grad_()
        view, number = stub_outputs(region, [x])
    assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert (tuple(view.shape), tuple(view.stride())) == ((8, 6), (1, 8))
    assert number.untyped_storage()._cdata != x.untyped_storage()._cdata


class Scaled(torch.nn.Module):
    """A block that may be skipped; all share their second argument."""

    def __init__(self, skipped: bool) -> None:
        super().__init__()
        self.mix, self.skipped = torch.nn.Linear(16, 16), skipped

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x if self.skipped else x + torch.tanh(self.mix(x) * scale)


class Conditioned(Headed):
    """Most bytes are those of the first layer's backward."""

    def __init__(self, blocks: Iterable[torch.nn.Module]) -> None:
        super().__init__(blocks, 16, 2)
        self.embed = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, x.detach().cos())


class Branched(Conditioned):
    """The last two blocks get one tensor, which costs no block of their class a byte."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.detach().cos()
        x = self.layers[0](self.embed(x), scale)
        return self.head(self.layers[1](x, scale) + self.layers[2](x, scale)).square().mean()


SKIPPED, OTHERS = [(True, False, False, False), (False, True, False, False)], (False, False, False)


@pytest.mark.parametrize("model, skipped", [*((Conditioned, one) for one in SKIPPED), (Branched, OTHERS)])
def test_blocks_hold_what_their_class_shares_and_none_that_returns_it(
    model: type[Conditioned], skipped: tuple[bool, ...]
) -> None:
    def around(model: type[Conditioned], blocks: tuple[bool, ...]) -> RootOption:
        names = [f"layers.{n}" for n in range(len(blocks))]
        traced = trace_model(model(map(Scaled, blocks)), (torch.randn(64, 16),), regions=names)
        return dry_run_root(traced, KeepAll().kept(traced.root.program), "", 0.0)[0]

    own, found = around(Conditioned, OTHERS), around(model, skipped)
    assert found.tail_peak_bytes == own.tail_peak_bytes
    held = [n for n, is_skipped in zip(found.held_backward_bytes, skipped, strict=True) if not is_skipped]
    more = [0, 0, 0] if model is Conditioned else [1, 3, 2]  # the first argument; both, and a gradient; both
    assert held == [n + k * 64 * 16 * 4 for k, n in zip(more, own.held_backward_bytes, strict=True)]


def test_empty_memory_that_is_asked_for_by_its_shape_is_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run that follows values makes what has no tensor among its arguments for real."""

    class Sorted(Block):
        def inner(self, h: Tensor) -> Tensor:
            order = h.sum(-1).argsort()
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order))
            return h[order].sin()[back]

    written: list[Any] = []

    def through(op: Any, calls: Any) -> Any:
        def seen(*args: Any, **kwargs: Any) -> Any:
            out = calls(*args, **kwargs)
            written.append(out)
            return out

        return seen if op is torch.ops.aten.index_put_.default else calls

    monkeypatch.setattr(RecomputeCode, "through", staticmethod(through))
    make_planner(trace_model(stack(Sorted), rows()))
    assert written and all(isinstance(tensor, FakeTensor) for tensor in written)


def test_a_number_that_is_divided_by_a_number_keeps_nothing() -> None:
    """Neither operand is a tensor; Longformer divides a length so."""

    class Divided(Block):
        def inner(self, h: Tensor) -> Tensor:
            return h.sin() * torch.div(h.size(0), 2, rounding_mode="trunc")  # type: ignore[call-overload]

    compare(stack(Divided), [rows(1), rows(2)], "smallest")
