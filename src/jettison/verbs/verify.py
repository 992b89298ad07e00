"""`verify`: a planned model beside an independent copy that trains plainly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from jettison.capture.entries import OUTSIDE_LAYER, ROOT_LAYER, ledger_of
from jettison.capture.model_trace import LossFn, call_model, loss_of
from jettison.capture.stub import forwards
from jettison.capture.tracer import trace_model
from jettison.errors import UsageError
from jettison.ledger.program import Program
from jettison.measure.gradients import (
    buffer_digest,
    compare_gradients,
    independent_copy,
    parameter_digest,
    rng_digest,
    same_bits,
)
from jettison.measure.memory import static_tensors, unique_bytes
from jettison.measure.peak import measured_peak
from jettison.measure.saved import OUTSIDE, observed_saved_bytes
from jettison.measure.timing import interleaved
from jettison.planner import Applied, apply, auto_checkpoint
from jettison.progress import Progress, silent
from jettison.report.proof import LayerProof, Proof
from jettison.runtime.compiled import CompiledRegion
from jettison.solve.plan import Plan, policy_word

STEPS = 3  # the first one makes the optimizer's state, the second and third use it
ROUNDS = 8
MAX_DIFFERENCES = 20


def verify(
    model: nn.Module,
    batch: Any,
    *,
    budget: str | int | None = None,
    plan: Plan | None = None,
    handle: Applied | None = None,
    compile: str | None = None,
    loss_fn: LossFn | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    holds_output: bool = True,
    steps: int = STEPS,
    rounds: int = ROUNDS,
    progress: Progress = silent,
) -> Proof:
    """Train ``model`` as planned beside an independent copy that trains plainly, and say what came out.

    Both start from the same parameters, optimizer state and random numbers. Compared bit by bit in each of ``steps``
    steps: losses, every gradient by parameter name, random number streams, buffers, and parameters at the end. Then,
    each on a step of its own: peak bytes of both, bytes held between forward and backward by each layer, and step times
    in ``rounds`` interleaved rounds. All these steps train ``model``, without gradients from before and leaving none:
    give a copy where that matters.

    Args:
        batch: ``model(**batch)`` for a mapping, ``model(*batch)`` for a tuple.
        budget: plan for this first, and take the plan off again at the end.
        plan: apply this first, and take it off again at the end.
        handle: what `auto_checkpoint` or `apply` gave; it stays on.
        compile: as for `auto_checkpoint`. Where blocks run compiled, so do those of the copy: what compilation itself
            changes is not held against the plan, and what layers hold is not observed.
        optimizer: over the model's parameters.
        holds_output: as for `auto_checkpoint`: whether the loop holds the model's output to the end of the step.

    Raises:
        UsageError: not exactly one of budget, plan and handle is given.
        Infeasible: no plan fits the budget.
        PlanMismatch: the plan was made for another model or another batch.
    """
    if sum(given is not None for given in (budget, plan, handle)) != 1:
        raise UsageError("verify() needs exactly one of budget=, plan= and handle=")
    progress("copying the model")
    plain = independent_copy(model)
    plain_optimizer = _mirrored(optimizer, model, plain)
    applied = handle
    if budget is not None:
        applied = auto_checkpoint(
            model,
            batch,
            budget,
            optimizer=optimizer,
            loss_fn=loss_fn,
            holds_output=holds_output,
            gradients_held=False,
            compile=compile,
            progress=progress,
        )
    elif plan is not None:
        progress("applying the plan")
        applied = apply(model, plan=plan, batch=batch, loss_fn=loss_fn, compile=compile)
    assert applied is not None
    try:
        plain_side = _Side(
            model=plain, optimizer=plain_optimizer, batch=batch, loss_fn=loss_fn, holds_output=holds_output
        )
        planned_side = replace(plain_side, model=model, optimizer=optimizer)
        return _prove(plain_side, planned_side, applied, steps, rounds, progress)
    finally:
        model.zero_grad(set_to_none=True)
        if handle is None:
            applied.remove()


@dataclass(kw_only=True)
class _Side:
    """One of the two models, and what it trains with."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    batch: Any
    loss_fn: LossFn | None
    holds_output: bool

    def step(self) -> Tensor:
        """One training step, gradients left in place."""
        output = call_model(self.model, self.batch)
        loss = loss_of(output, self.loss_fn)
        if not self.holds_output:
            output = None
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss.detach()

    def whole_step(self) -> None:
        """The same, gradients dropped first."""
        self.model.zero_grad(set_to_none=True)
        self.step()

    def peak_bytes(self) -> int:
        """Peak of allocated bytes in a step, everything else in the process left out."""
        self.model.zero_grad(set_to_none=True)
        static = static_tensors(self.model, self.batch, self.optimizer)
        report = measured_peak(self.step, static_tensors=static)
        self.model.zero_grad(set_to_none=True)
        return report.step_bytes + unique_bytes(static)


@dataclass(kw_only=True)
class _Comparison:
    """What the steps side by side have shown."""

    gradients: bool = True
    losses: bool = True
    random: bool = True
    buffers: bool = True
    compared: int = 0
    differences: list[str]


def _compare(plain: _Side, planned: _Side, steps: int) -> _Comparison:
    found = _Comparison(differences=[])
    for number in range(1, steps + 1):
        for side in (plain, planned):
            side.model.zero_grad(set_to_none=True)
        start = _random_state()
        loss_plain = plain.step()
        streams = rng_digest()
        _set_random_state(start)
        loss_planned = planned.step()
        if not same_bits(loss_plain, loss_planned):
            found.losses = False
            found.differences.append(f"step {number}: loss {loss_planned.item()!r}; plain has {loss_plain.item()!r}")
        if rng_digest() != streams:
            found.random = False
            found.differences.append(f"step {number}: the random number streams are elsewhere than after a plain step")
        if buffer_digest(plain.model) != buffer_digest(planned.model):
            found.buffers = False
            found.differences.append(f"step {number}: registered buffers differ")
        report = compare_gradients(plain.model, planned.model)
        found.gradients &= report.identical
        found.compared = report.compared
        found.differences += [f"step {number}: gradient of {d.name}: {d.reason}" for d in report.differences]
    del found.differences[MAX_DIFFERENCES:]
    return found


def _prove(
    plain: _Side, planned: _Side, applied: Applied, steps: int, rounds: int, progress: Callable[[str], None]
) -> Proof:
    with torch.enable_grad():
        progress("training side by side")
        with _compiled_alike(plain.model, applied):
            found = _compare(plain, planned, steps)
            parameters = parameter_digest(plain.model) == parameter_digest(planned.model)
            progress("measuring peaks")
            baseline_peak, peak = plain.peak_bytes(), planned.peak_bytes()
        progress("counting what layers hold")
        layers = _layers(plain, planned, applied)
        progress("timing steps")
        with _compiled_alike(plain.model, applied):
            timing = interleaved(rounds, {"plain": plain.whole_step, "planned": planned.whole_step}, warmup=1)
    plan, ratio = applied.plan, timing["planned"]
    return Proof(
        gradients_identical=found.gradients,
        losses_identical=found.losses,
        random_state_identical=found.random,
        buffers_identical=found.buffers,
        parameters_identical=parameters,
        gradients_compared=found.compared,
        differences=tuple(found.differences),
        steps=steps,
        budget_bytes=plan.budget_bytes if plan else None,
        predicted_peak_bytes=plan.predicted.peak_bytes if plan else None,
        measured_peak_bytes=peak,
        baseline_peak_bytes=baseline_peak,
        step_time_ratio=ratio.ratio,
        step_time_ratio_low=ratio.ratio_low,
        step_time_ratio_high=ratio.ratio_high,
        baseline_step_seconds=timing["plain"].median_seconds,
        rounds=rounds,
        layers=layers,
        plan_hash=plan.hash if plan else None,
        device=_device(planned.model),
        torch_version=torch.__version__,
    )


def _compiled_alike(model: nn.Module, applied: Applied) -> AbstractContextManager[None]:
    """The plain side's blocks run compiled where the planned side's do, each as without a plan."""
    return forwards(
        {
            model.get_submodule(region.name): region.plainly_compiled(model.get_submodule(region.name))
            for region in applied.regions
            if isinstance(region, CompiledRegion)
        }
    )


def _layers(plain: _Side, planned: _Side, applied: Applied) -> tuple[LayerProof, ...]:
    """Bytes by layer: of plain autograd and of the plan by the ledger, and as held on the real tensors."""
    # the plain copy is traced: modules under a plan run stand-ins
    traced = trace_model(plain.model, plain.batch, loss_fn=plain.loss_fn, regions=_names(applied))
    regions = {region.name: region for region in applied.regions}
    inputs = {c.name: traced.classes[c.class_key].trace.inputs for c in traced.calls}

    def kept(name: str, program: Program) -> frozenset[int]:
        again = {position for position, _ in regions[name].way.link.inputs}
        chosen = regions[name].way.policy.kept(program)
        return chosen - {b for b, position in inputs.get(name, {}).items() if position in again}

    programs = {call.name: traced.program(call) for call in traced.calls}
    words = {n: str(policy_word(p, regions[n].way.policy.kept(p))) for n, p in programs.items()}
    words |= {ROOT_LAYER: str(policy_word(traced.root.program, kept("", traced.root.program)))}
    before, after = ledger_of(traced).by_layer(), ledger_of(traced, kept).by_layer()
    observed = observed_saved_bytes(planned.model, planned.batch, loss_fn=planned.loss_fn)
    planned.model.zero_grad(set_to_none=True)
    names = {ROOT_LAYER: "", OUTSIDE_LAYER: OUTSIDE}
    opaque = {call.name for call in traced.calls if call.problem}
    opaque |= {name for name, region in regions.items() if isinstance(region, CompiledRegion)}
    return tuple(
        LayerProof(
            layer=layer,
            policy=words.get(layer, "none"),
            plain_bytes=before[layer],
            predicted_bytes=after.get(layer, 0),
            observed_bytes=observed.get(names.get(layer, layer), 0),
            counted=layer not in opaque,
        )
        for layer in before
    )


def _names(applied: Applied) -> tuple[str, ...]:
    return tuple(region.name for region in applied.regions if region.name)


def _mirrored(
    optimizer: torch.optim.Optimizer | None, model: nn.Module, plain: nn.Module
) -> torch.optim.Optimizer | None:
    """The same optimizer over the copy's parameters, its state copied."""
    if optimizer is None:
        return None
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    memo: dict[int, Any] = {id(theirs): ours for theirs, ours in pairs}
    return copy.deepcopy(optimizer, memo)


def _random_state() -> tuple[Tensor, list[Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def _set_random_state(state: tuple[Tensor, list[Tensor]]) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


def _device(model: nn.Module) -> str:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
