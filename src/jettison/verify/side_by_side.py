"""Two models of the same weights, trained side by side from the same random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from jettison.capture.isolation import leaving_nothing
from jettison.capture.model_trace import LossFn, call_model, loss_of
from jettison.capture.pytrees import tree_leaves
from jettison.capture.randomness import Streams
from jettison.capture.state_kinds import TensorState
from jettison.capture.tensor_subclasses import memory_key, plain
from jettison.core.progress import Progress
from jettison.dryrun import counter
from jettison.ledger.step_levels import PhaseLevels, StepLevels
from jettison.memory.timeline import Label, MemoryTimeline, TimelineWriter
from jettison.report.proof import Proof
from jettison.runtime.planned_forward import PlannedForward
from jettison.verify.differences import buffer_digest, compare_gradients, parameter_digest, rng_digest, same_bits
from jettison.verify.timing import environment, interleaved

STEPS = 3  # the first one creates the optimizer's state, the second and third use it
ROUNDS = 8
MAX_DIFFERENCES = 20


@dataclass(kw_only=True)
class Side:
    """One of the two models, with its batch, loss and optimizer. ``own``: the user's forward and backward of a step, as
    ``own(model, batch)``; ``under`` and ``phase``: contexts for each step, and for each phase of it.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    batch: Any
    loss_fn: LossFn | None
    keep_output: bool
    own: Callable[[nn.Module, Any], object] | None = None
    under: Callable[[], AbstractContextManager[object]] = nullcontext
    phase: Callable[[str], AbstractContextManager[object]] = nullcontext

    def step(self) -> Tensor | None:
        """Run a training step, leave the gradients in place, and return its loss, if it has one."""
        with self.under():
            loss = self._passes()
        if self.optimizer is not None:
            with self.phase("optimizer"):
                self.optimizer.step()
        return loss.detach() if isinstance(loss, Tensor) else None

    def _passes(self) -> object:
        if self.own is not None:
            with self.phase("forward and backward"):
                return self.own(self.model, self.batch)
        with self.phase("forward"):
            output = call_model(self.model, self.batch)
            loss = loss_of(output, self.loss_fn)
            if not self.keep_output:
                output = None
        with self.phase("backward"), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            loss.backward()
        return loss

    def whole_step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.step()

    def memory(self, other: Side) -> counter.PeakReport:
        """Bytes that a step allocates; on CUDA, as in a budget, with all on the device except the ``other`` side."""
        self.model.zero_grad(set_to_none=True)
        static = counter.static_tensors(self.model, self.batch, self.optimizer)
        marks = counter.PhaseMarks()
        report = counter.measured_peak(replace(self, phase=marks.phase).step, static_tensors=static, marks=marks)
        self.model.zero_grad(set_to_none=True)
        others = counter.unique_bytes(static) - report.static_bytes
        if report.source == "cuda":
            others = -counter.AllocationCounter(
                counter.static_tensors(other.model, (), other.optimizer), device="cuda"
            ).live_bytes
        return replace(report, peak_bytes=report.peak_bytes + others, levels=_moved(report.levels, others))


def step_timeline(side: Side, title: str) -> MemoryTimeline:
    """Every allocation of one step of a side; gradients are dropped before and after."""
    side.model.zero_grad(set_to_none=True)
    with counter.AllocationCounter(
        counter.static_tensors(side.model, side.batch, side.optimizer), record_events=True
    ) as counted:

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            counted.phase(name)
            yield

        replace(side, phase=phase).step()
    side.model.zero_grad(set_to_none=True)
    return allocation_timeline(title, counted.events)


def _moved(levels: StepLevels | None, by_bytes: int) -> StepLevels | None:
    if levels is None or by_bytes == 0:
        return levels

    def moved(phase: PhaseLevels) -> PhaseLevels:
        low, high = (tuple(n + by_bytes for n in found) for found in (phase.low_bytes, phase.high_bytes))
        return replace(phase, low_bytes=low, high_bytes=high)

    return StepLevels(phases=tuple(map(moved, levels.phases)))


@dataclass(kw_only=True)
class StepComparison:
    """Fields of a `Proof` that compared steps say."""

    gradients_identical: bool = True
    losses_identical: bool = True
    random_state_identical: bool = True
    buffers_identical: bool = True
    gradients_compared: int = 0
    differences: tuple[str, ...] = ()


def compare_steps(plain: Side, planned: Side, steps: int) -> StepComparison:
    """Train both from equal states, each step from the same random numbers."""
    found, differences = StepComparison(), list[str]()
    for number in range(1, steps + 1):
        for side in (plain, planned):
            side.model.zero_grad(set_to_none=True)
        start = Streams.now()
        loss_plain = plain.step()
        streams = rng_digest()
        start.restore()
        loss_planned = planned.step()
        if loss_plain is not None and loss_planned is not None and not same_bits(loss_plain, loss_planned):
            found.losses_identical = False
            differences.append(f"step {number}: loss {loss_planned.tolist()!r}; plain: {loss_plain.tolist()!r}")
        if rng_digest() != streams:
            found.random_state_identical = False
            differences.append(f"step {number}: the random number streams are elsewhere than after a plain step")
        if buffer_digest(plain.model) != buffer_digest(planned.model):
            found.buffers_identical = False
            differences.append(f"step {number}: registered buffers differ")
        report = compare_gradients(plain.model, planned.model)
        found.gradients_identical &= report.identical
        found.gradients_compared = report.compared
        differences += [f"step {number}: gradient of {d.name}: {d.reason}" for d in report.differences]
    found.differences = tuple(differences[:MAX_DIFFERENCES])
    return found


def proof_of(
    plain: Side,
    other: Side,
    found: StepComparison,
    name: str,
    steps: int,
    rounds: int,
    progress: Progress,
    *,
    under: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Proof:
    """Measure both sides' peaks and step times, after compared steps. ``under``: a context for steps of both."""
    parameters = parameter_digest(plain.model) == parameter_digest(other.model)
    with under():
        progress("measuring peaks")
        baseline, measured = plain.memory(other), other.memory(plain)
        progress("timing steps")
        timing = interleaved(rounds, {"plain": plain.whole_step, name: other.whole_step}, warmup=1)
    return Proof(
        **vars(found),
        parameters_identical=parameters,
        steps=steps,
        budget_bytes=None,
        predicted_peak_bytes=None,
        measured_peak_bytes=measured.peak_bytes,
        baseline_peak_bytes=baseline.peak_bytes,
        step_time_ratio=timing[name].ratio,
        step_time_ratio_low=timing[name].ratio_low,
        step_time_ratio_high=timing[name].ratio_high,
        baseline_step_seconds=timing["plain"].median_seconds,
        rounds=rounds,
        layers=(),
        plan_hash=None,
        device=device_name(other.model),
        torch_version=torch.__version__,
        measured_levels=measured.levels,
        baseline_levels=baseline.levels,
        environment=environment(),
    )


def mirrored(
    optimizer: torch.optim.Optimizer | None, model: nn.Module, plain: nn.Module
) -> torch.optim.Optimizer | None:
    """The same optimizer over the copy's parameters, its state copied."""
    if optimizer is None:
        return None
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    memo: dict[int, Any] = {id(theirs): ours for theirs, ours in pairs}
    return copy.deepcopy(optimizer, memo)


@contextmanager
def leaving_untrained(side: Side, regions: Sequence[PlannedForward]) -> Iterator[None]:
    """Restore all state after steps of a side: parameters, buffers, the optimizer's state, gradients, random streams
    and Python's state that code reaches. Copies of tensors are kept on the CPU meanwhile. ``regions``: of a plan that
    stays on. Raise `UnsupportedModule` if a step changes, or would change, state that cannot be restored.
    """
    streams = Streams.now()
    values = [side.loss_fn, side.optimizer, side.own, *tree_leaves(side.batch)]
    with leaving_nothing([side.model], values) as state:
        found = (
            *counter.static_tensors(side.model, side.batch, side.optimizer),
            *(one.holder for one in state.of(TensorState)),
        )
        tensors = {id(t): t for t in map(plain, found) if memory_key(t) is not None}
        copies = [(t, t.detach(), t.detach().to("cpu", copy=True)) for t in tensors.values()]
        try:
            yield
        finally:
            for region in regions:
                region.unwatch()  # its module hooks came after the snapshot: restoring state removes them
            with torch.no_grad():
                for tensor, alias, copied in copies:
                    if tensor.data_ptr() != alias.data_ptr():
                        tensor.data = alias
                    if not same_bits(alias.cpu(), copied):
                        alias.copy_(copied)
            streams.restore()


def device_name(model: nn.Module) -> str:
    """``cpu``, or the GPU's name."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


# the step as a timeline -----------------------------------------------------------------------------------------------


STATIC = "static"
"""Operator name of storages that existed before the step."""


def allocation_timeline(title: str, events: Sequence[counter.AllocationEvent]) -> MemoryTimeline:
    """Lifetime of each storage. Its role is the operator that returned it, its place the module and phase. There is no
    clock: an event counts as a µs.

    A resized storage counts as freed and allocated anew.
    """
    writer = TimelineWriter(title)
    sizes: dict[int, int] = {}
    numbers: dict[int, int] = {}
    begun, phase = False, ""
    for event in events:
        if event.phase != phase:
            phase = event.phase
            writer.mark(phase)
        time_ns = 1000 * writer.events
        begun = begun or event.operator != STATIC
        before = sizes.get(event.storage, 0)
        sizes[event.storage] = after = before + event.delta_bytes
        if before:
            writer.free(numbers.pop(event.storage), time_ns)
        if after:
            label = Label(module=phase, role=event.operator)
            numbers[event.storage] = writer.allocate(after, label, time_ns) if begun else writer.already(after, label)
    return writer.timeline()
