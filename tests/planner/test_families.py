"""Real architectures at five budgets, or three: bitwise the same training, under the budget, at the predicted peak."""

from __future__ import annotations

import pytest
import torch

import jettison
from jettison.capture.tracer import trace_model
from jettison.core.errors import Infeasible
from jettison.dryrun.step import fake_optimizer
from jettison.planner.apply import apply_candidate
from jettison.planner.planner import Planner, make_planner
from jettison.verify.differences import independent_copy
from support.families import NAMES, TIED_CHOICE, Built, Case, build
from support.training import Trained, adamw, assert_same, sgd, train

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # what Hugging Face says about tiny configurations; everything else, Jettison's fallbacks above all, is an error
    pytest.mark.filterwarnings("ignore::UserWarning:transformers.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*"),
]

BUDGETS = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the way from the smallest feasible peak to the unconstrained one
QUICK = BUDGETS[::2]
PREDICTION_TOLERANCE = 0.02


def rotation(family: str, n: int) -> list[Case]:
    """Three cases: each precision, both attentions, dropout on and off, embeddings tied and not; rotated by family."""
    tied = family in TIED_CHOICE
    fused, plain = ("eager", "eager") if family == "gemma2" else ("sdpa", "eager") if n % 2 else ("eager", "sdpa")
    return [
        Case(family=family, precision="fp32", attention=fused, dropout=True, tied=tied and n % 3 == 0),
        Case(family=family, precision="bf16", attention=plain, dropout=n % 3 == 1, tied=tied and n % 3 == 1),
        Case(family=family, precision="autocast", attention=fused, dropout=n % 2 == 0, tied=tied and n % 3 == 2),
    ]


def product() -> list[Case]:
    """Every combination that the rotation leaves out."""
    found = []
    for family in NAMES:
        for precision in ("fp32", "bf16", "autocast"):
            for attention in ("eager",) if family == "gemma2" else ("eager", "sdpa"):
                for dropout in (False, True):
                    for tied in (False, True) if family in TIED_CHOICE else (False,):
                        found.append(
                            Case(family=family, precision=precision, attention=attention, dropout=dropout, tied=tied)
                        )
    return [case for case in found if case not in ROTATION]


LONG = ("t5", "vit", "qwen3", "bert", "gemma2")  # which take longest, of what others show as well
ROTATION = [case for n, family in enumerate(NAMES) for case in rotation(family, n)]
SHORT = [family for family in NAMES if family not in LONG]
SHOWN = ("gpt2", "encoder")  # in a minute
DEFAULT = [rotation(family, NAMES.index(family))[n % 3] for n, family in enumerate(SHORT)]
MORE = [
    Case(family="gpt2", cache=True, dropout=True, attention="eager"),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            Case(family="llama", cache=True),
            Case(family="mixtral", router_loss=True),
            Case(family="t5", cache=True, precision="bf16"),
            Case(family="mixtral", router_loss=True, precision="bf16", attention="eager", dropout=True),
        )
    ),
]


def planner_for(built: Built, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Planner:
    """Call inside the case's context."""
    traced = trace_model(model, built.batch, loss_fn=built.loss_fn)
    assert not traced.warnings
    return make_planner(traced, optimizer=fake_optimizer(optimizer, model, traced))


def run(built: Built, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
    return train(model, built.batches, optimizer=optimizer, loss_fn=built.loss_fn, context=built.context, measure=True)


def prove(case: Case, shares: tuple[float, ...] = BUDGETS) -> None:
    """The whole claim for one case."""
    built = build(case)
    make = sgd if case.precision == "bf16" else adamw
    start = independent_copy(built.model)
    plain = run(built, built.model, make(built.model.parameters()))
    with built.context():
        planner = planner_for(built, make(start.parameters()), start)
        lowest, highest = planner.minimum_budget_bytes, planner.plain_budget_bytes
    assert plain.peak is not None
    assert abs(highest / plain.peak.peak_bytes - 1) <= PREDICTION_TOLERANCE
    problems, dropped = [], []
    for share in shares:
        budget_bytes = lowest + round((highest - lowest) * share)
        with built.context():
            found = planner.plan(budget_bytes)
        model = independent_copy(start)
        optimizer = make(model.parameters())
        with apply_candidate(model, planner, found, budget_bytes) as handle:
            trained = run(built, model, optimizer)
            reports = handle.report()
        assert_same(trained, plain)
        assert not any(report.fallback for report in reports), reports
        assert trained.peak is not None
        predicted, measured = found.step.peak_bytes, trained.peak.peak_bytes
        if measured > budget_bytes:
            problems.append(f"at {share}: measured {measured} is {measured - budget_bytes} above {budget_bytes}")
        if abs(predicted / measured - 1) > PREDICTION_TOLERANCE:
            problems.append(f"at {share}: predicted {predicted}, measured {measured}")
        dropped.append(sum(report.slots_dropped for report in reports))
    assert not problems, problems
    assert dropped[0] > 0, "nothing is recomputed at the smallest budget, so nothing was tested"
    assert dropped[0] >= dropped[-1] == 0


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case.family in SHOWN else pytest.mark.slow) for case in DEFAULT], ids=str
)
def test_same_training_under_three_budgets(case: Case) -> None:
    prove(case, QUICK)


@pytest.mark.parametrize("case", MORE, ids=str)
def test_side_lists_of_keys_values_and_router_logits(case: Case) -> None:
    prove(case, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("case", ROTATION, ids=str)
def test_same_training_under_five_budgets_rotated(case: Case) -> None:
    prove(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", product(), ids=str)
def test_same_training_under_five_budgets_every_combination(case: Case) -> None:
    prove(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(family="llama", dropout=True),
        pytest.param(Case(family="encoder", precision="autocast"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_auto_checkpoint_in_one_line(case: Case) -> None:
    built = build(case)
    model = independent_copy(built.model)
    plain = run(built, built.model, adamw(built.model.parameters()))
    assert plain.peak is not None
    optimizer = adamw(model.parameters())
    with built.context(), pytest.raises(Infeasible) as infeasible:
        jettison.auto_checkpoint(model, built.batch, "1KiB", optimizer=optimizer, loss_fn=built.loss_fn)
    budget_bytes = (infeasible.value.minimum_budget_bytes + plain.peak.peak_bytes) // 2
    with built.context():
        handle = jettison.auto_checkpoint(
            model, built.batch, f"{budget_bytes}B", optimizer=optimizer, loss_fn=built.loss_fn
        )
    with handle:
        trained = run(built, model, optimizer)
    assert_same(trained, plain)
    assert trained.peak is not None and handle.plan is not None
    assert trained.peak.peak_bytes <= budget_bytes < plain.peak.peak_bytes
    assert abs(handle.plan.predicted.peak_bytes / trained.peak.peak_bytes - 1) <= PREDICTION_TOLERANCE


def test_a_trace_made_under_autocast_can_be_planned_outside_of_it() -> None:
    """`jettison.trace` and `jettison.plan` are two calls; only the first needs the training context."""
    built = build(Case(family="llama", precision="autocast", layers=2))
    with built.context():
        traced = jettison.trace(built.model, built.batch)
        inside = jettison.plan(traced, "1GiB", measure=False).predicted.peak_bytes
        traced = jettison.trace(built.model, built.batch)
    assert jettison.plan(traced, "1GiB", measure=False).predicted.peak_bytes == inside


def test_the_rotation_shows_every_family_every_precision_attention_and_dropout() -> None:
    for family in NAMES:
        cases = [case for case in ROTATION if case.family == family]
        assert {case.precision for case in cases} == {"fp32", "bf16", "autocast"}
        assert {case.attention for case in cases} == ({"eager"} if family == "gemma2" else {"eager", "sdpa"})
        assert any(case.dropout for case in cases)
    assert {case.tied for case in ROTATION} == {False, True}
    assert {case.precision for case in DEFAULT} == {"fp32", "bf16", "autocast"}
    assert {case.attention for case in DEFAULT} == {"eager", "sdpa"}
    assert {case.dropout for case in DEFAULT} == {False, True}
