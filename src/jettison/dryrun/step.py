"""Dry run: the planned step, run by the runtime that will run it, on fake tensors under an allocation counter.

Blocks are dry-run one option at a time and the root once an option, for the levels that the solver adds up (NOTE
[ The step's levels ] in solve/problem.py). The whole step is dry-run at the end: its peak is what a plan states.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils._pytree import tree_leaves

from jettison.capture.deep_copies import copied
from jettison.capture.fake_copies import fake_batch, is_sparse, roughly
from jettison.capture.model_trace import ModelTrace, call_model, loss_of
from jettison.capture.tracer import unseen_outputs
from jettison.core.errors import TraceError, UsageError
from jettison.core.objects import swapped
from jettison.dryrun.block_levels import hold_gradients, run_step, stand_in_for_opaque, with_memory_of_their_own
from jettison.dryrun.counter import AllocationCounter, AllocationEvent, Workspace, quiet_gc, static_tensors
from jettison.dryrun.op_costs import Pricing
from jettison.ledger.step_levels import StepLevels
from jettison.runtime.install import install
from jettison.runtime.planned_forward import PlannedForward
from jettison.runtime.witness import Check
from jettison.solve.checkpoint_policy import CheckpointPolicy
from jettison.solve.problem import RegionOption


@dataclass(frozen=True, kw_only=True)
class StepPeaks:
    """Bytes of a dry-run step: at its peak, in each phase, and what it starts from."""

    peak_bytes: int
    static_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    optimizer_peak_bytes: int  # 0 without an optimizer
    host_bytes: int = 0  # on the host at a time, before pinning rounds them up
    pinned_bytes: int = 0  # what is taken from the host for them
    levels: StepLevels | None = None  # over the step
    composed: bool = False  # of dry runs of its parts (dryrun/composed_peaks.py), and not run itself
    extra_bytes: int = 0  # of them, allocated by nothing of the step
    optimizer_levels: Sequence[int] = ()  # above the first

    @classmethod
    def of(
        cls, forward: int, backward: int, optimizer: int | None, *, static_bytes: int, extra_bytes: int, **more: Any
    ) -> StepPeaks:
        """From the peak of each phase, without ``extra_bytes``, which are allocated by nothing of the step."""
        return cls(
            peak_bytes=max(forward, backward, optimizer or 0) + extra_bytes,
            static_bytes=static_bytes + extra_bytes,
            forward_peak_bytes=forward + extra_bytes,
            backward_peak_bytes=backward + extra_bytes,
            optimizer_peak_bytes=0 if optimizer is None else optimizer + extra_bytes,
            extra_bytes=extra_bytes,
            **more,
        )

    @property
    def phase(self) -> str:
        """The phase that sets the peak."""
        return max(("forward", "backward", "optimizer"), key=lambda name: getattr(self, f"{name}_peak_bytes"))


class DryStep(Protocol):
    """A training step of a user's loop, on fake tensors of one mode; it may be run repeatedly.

    Args:
        modules: run under a plan, in the order of the parts.
        optimizer: over the modules' parameters. Its state is made in a first step that is not counted.
        last: optimizers of the loop that step after all passes.
    """

    @property
    def modules(self) -> Sequence[nn.Module]: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer | None: ...
    @property
    def last(self) -> Sequence[torch.optim.Optimizer]: ...

    def context(self, trace: ModelTrace) -> contextlib.AbstractContextManager[None]:
        """Context of all its runs and its optimizers' steps; ``trace``: of the first of its modules."""

    def alive(self) -> Iterable[Tensor]:
        """Return the tensors that exist before a step."""

    def leave_gradients(self, counter: AllocationCounter) -> None:
        """Give parameters the gradients that a step leaves them; nothing is counted on the way."""

    def passes(self, counter: AllocationCounter) -> tuple[int, int, Any]:
        """Run all forwards and backwards of a step; peak bytes of each, and what the loop holds while it optimizes."""


@dataclass(frozen=True, kw_only=True)
class ModulePolicy:
    """Policies of one module of a step, by block name; ``opaque``: levels of blocks that cannot run on fake tensors."""

    trace: ModelTrace
    policies: Mapping[str, CheckpointPolicy]
    root: CheckpointPolicy
    segments: Sequence[list[str]] = ()
    opaque: Mapping[str, RegionOption] = field(default_factory=dict)


def each_of(optimizer: torch.optim.Optimizer | None) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizers that one object steps."""
    if optimizer is None:
        return ()
    return getattr(optimizer, "optimizers", (optimizer,))


@dataclass(frozen=True, kw_only=True)
class OneBatch:
    """The plainest `DryStep`: one forward and one backward of a trace's fake copy."""

    trace: ModelTrace
    optimizer: torch.optim.Optimizer | None = None
    _left: dict[nn.Parameter, Tensor] = field(default_factory=dict, init=False)

    @property
    def modules(self) -> Sequence[nn.Module]:
        return (self.trace.fake_model,)

    @property
    def last(self) -> Sequence[torch.optim.Optimizer]:
        return each_of(self.optimizer)

    def context(self, trace: ModelTrace) -> contextlib.AbstractContextManager[None]:
        return trace.context()

    def alive(self) -> Iterable[Tensor]:
        model = self.trace.fake_model
        if self.trace.loop.gradients_preallocated and not self._left:
            model.zero_grad()
            with self.trace.context(), AllocationCounter(device=self.trace.device_type) as unmeasured:
                self.passes(unmeasured)
            seen = {p: p.grad for p in model.parameters() if p.grad is not None}
            self._left.update(with_memory_of_their_own(seen))
        hold_gradients(self.trace, model, self._left)
        return static_tensors(model, self.trace.batch, self.optimizer)

    def leave_gradients(self, counter: AllocationCounter) -> None:
        self.passes(counter)

    def passes(self, counter: AllocationCounter) -> tuple[int, int, Any]:
        return run_step(self.trace, self.trace.fake_model, counter)


def step_of(parts: Sequence[ModulePolicy], dry_step: DryStep, pricing: Pricing) -> StepPeaks:
    """A whole step, with what every kernel in it takes inside. Kernels that only it runs have a price before it."""
    pricing.known(lambda workspace: make_state(parts, dry_step, workspace=workspace))
    return pricing.known(lambda workspace: dry_run(parts, dry_step, workspace=workspace))


def dry_run_batch(
    trace: ModelTrace,
    policies: Mapping[str, CheckpointPolicy],
    root: CheckpointPolicy,
    segments: Sequence[list[str]] = (),
    *,
    opaque: Mapping[str, RegionOption] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    workspace: Workspace | None = None,
) -> StepPeaks:
    """The plainest step under a plan: one batch, and the optimizer (see `ModulePolicy`, `fake_optimizer`)."""
    part = ModulePolicy(trace=trace, policies=policies, root=root, segments=segments, opaque=opaque or {})
    return dry_run([part], OneBatch(trace=trace, optimizer=optimizer), workspace=workspace)


def dry_run(parts: Sequence[ModulePolicy], dry_step: DryStep, *, workspace: Workspace | None = None) -> StepPeaks:
    """The whole step under a plan: ``parts`` by module, traced in its fake mode."""
    make_state(parts, dry_step)
    trace = parts[0].trace
    with _ready(parts, dry_step) as installed:
        engines = [regions[-1].offload for regions in installed if regions[-1].offload is not None]
        with AllocationCounter(
            dry_step.alive(), workspace=workspace, device=trace.device_type, record_levels=True
        ) as counter:
            static = counter.live_bytes
            peaks, held = _passes_and_optimizer(dry_step, counter)
            del held
    optimizer = [level for name, levels in counter.phase_levels if name == "optimizer" for level in levels]
    return StepPeaks.of(
        *peaks,
        static_bytes=static,
        extra_bytes=trace.loop.elsewhere_bytes,
        host_bytes=sum(engine.pool.peak_bytes for engine in engines),
        pinned_bytes=sum(engine.pool.real_bytes for engine in engines),
        levels=StepLevels.of(counter.phase_levels, extra_bytes=trace.loop.elsewhere_bytes),
        optimizer_levels=[level - optimizer[0] for level in optimizer],
    )


def dry_run_events(part: ModulePolicy, dry_step: DryStep) -> tuple[AllocationEvent, ...]:
    """All allocations of the step under a plan, in order; those that kernels take inside of a call are left out."""
    make_state([part], dry_step)
    with _ready([part], dry_step):
        with AllocationCounter(dry_step.alive(), device=part.trace.device_type, record_events=True) as counter:
            _passes_and_optimizer(dry_step, counter)
        return counter.events


def _passes_and_optimizer(dry_step: DryStep, counter: AllocationCounter) -> tuple[tuple[int, int, int | None], Any]:
    """Peak bytes of forward, backward and the optimizer, if there is one, and what the loop still holds."""
    forward, backward, held = dry_step.passes(counter)
    counter.reset_peak()
    if not dry_step.last:
        return (forward, backward, None), held
    counter.phase("optimizer")
    with roughly(dry_step.modules[0]):  # torch.optim.Adafactor reads norms
        for optimizer in dry_step.last:
            optimizer.step()
    return (forward, backward, counter.peak_bytes), held


def make_state(parts: Sequence[ModulePolicy], dry_step: DryStep, *, workspace: Workspace | None = None) -> None:
    """Run a first step, which is not counted, if trained parameters have no state yet. The ``workspace`` is asked about
    its ops. Raise `UsageError` if the state has sparse tensors, to which every step adds its gradient's entries.
    """
    optimizer = dry_step.optimizer
    if optimizer is None or optimizer in _HAVE_STATE:
        return
    groups = [(one, group) for one in each_of(optimizer) for group in one.param_groups]
    trained = [(one, p) for one, group in groups for p in group["params"] if p.requires_grad]
    has_state = all(one.state for one in each_of(optimizer)) and all(p in one.state for one, p in trained)
    if not has_state:
        with _ready(parts, dry_step):
            _first_step(dry_step, optimizer, parts[0].trace, workspace)
            if any(is_sparse(value) for value in tree_leaves(list(optimizer.state.values()))):
                raise UsageError(
                    f"the state of {type(optimizer).__name__} has the sparse gradients of an Embedding(sparse=True) in "
                    "it (its momentum), and grows by their entries in every step: no budget holds. Train that table "
                    "with SparseAdam or with SGD(momentum=0)"
                )
    _HAVE_STATE.add(optimizer)


_HAVE_STATE: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers whose state was made, or was there: a step is enough for that."""


def _first_step(dry_step: DryStep, optimizer: Any, trace: ModelTrace, workspace: Workspace | None = None) -> None:
    with AllocationCounter(dry_step.alive(), workspace=workspace, device=trace.device_type) as counter:
        dry_step.leave_gradients(counter)
        with roughly(dry_step.modules[0]):
            optimizer.step()
    # factories have no fake argument, so that steps on the device are real: its memory is not the planner's
    for state in (state for one in each_of(optimizer) for state in one.state.values() if isinstance(state, dict)):
        real = {k: v for k, v in state.items() if isinstance(v, Tensor) and not isinstance(v, FakeTensor)}
        state.update({name: fake_batch(value, trace.mode) for name, value in real.items() if not value.is_cpu})
    optimizer.zero_grad(set_to_none=True)


@contextlib.contextmanager
def _ready(parts: Sequence[ModulePolicy], dry_step: DryStep) -> Iterator[list[list[PlannedForward]]]:
    """The step can be run in here, its modules under their policies; the regions of each, the root's last."""
    installed: list[list[PlannedForward]] = []
    with contextlib.ExitStack() as stack:
        for module, part in zip(dry_step.modules, parts, strict=True):
            stack.callback(module.zero_grad)
            how = Check(part.trace.loop.check)
            regions = install(module, part.trace, part.policies, part.root, part.segments, checked=True, how=how)
            for region in regions:  # taken off from the last to the first
                stack.callback(region.remove)
            stand_in_for_opaque(regions, part.trace, part.opaque)
            installed.append(regions)
        stack.enter_context(dry_step.context(parts[0].trace))
        stack.enter_context(quiet_gc())
        stack.enter_context(unseen_outputs({k: c for part in parts for k, c in part.trace.classes.items()}))
        yield installed


# a step under checkpointing that is not ours --------------------------------------------------------------------------
# Nothing of Jettison's runtime takes part: the caller's function changes the model, and its changes are undone.


@dataclass(frozen=True, kw_only=True)
class GivenStep:
    """Bytes of a step. ``held_bytes`` are born in forward and alive until backward: saved tensors, and outputs."""

    held_bytes: int
    peak_bytes: int


def dry_run_given(
    trace: ModelTrace,
    change: Callable[[nn.Module], object],
    *,
    optimizer: torch.optim.Optimizer | None,
    workspace: Workspace | None,
) -> GivenStep:
    """One step of a trace's fake copy after ``change`` was called with it. The state of the ``optimizer``, over the
    copy's parameters, is there from before the step that counts. Raises `TraceError` if what was changed needs values.
    """
    step, model, device = OneBatch(trace=trace, optimizer=optimizer), trace.fake_model, trace.device_type
    with _changed(model, change), trace.context(), quiet_gc():
        try:
            if optimizer is not None and not optimizer.state:
                _first_step(step, optimizer, trace)
            with AllocationCounter(step.alive(), workspace=workspace, device=device) as counter, torch.enable_grad():
                before = counter.live_bytes
                output = call_model(model, trace.batch)
                loss = loss_of(output, trace.loss_fn)
                output = output if trace.loop.keep_output else None
                held_bytes = counter.live_bytes - before
                del output, loss
            with AllocationCounter(step.alive(), workspace=workspace, device=device) as counter:
                peaks = _passes_and_optimizer(step, counter)[0]
        except (RuntimeError, NotImplementedError, LookupError, AttributeError) as error:
            text = (str(error).splitlines() or [""])[0]
            raise TraceError(
                f"a step of what was exported failed on fake tensors: {type(error).__name__}: {text}"
            ) from error
        finally:
            model.zero_grad(set_to_none=True)
    return GivenStep(held_bytes=held_bytes, peak_bytes=max(peak or 0 for peak in peaks) + trace.loop.elsewhere_bytes)


@contextlib.contextmanager
def _changed(model: nn.Module, change: Callable[[nn.Module], object]) -> Iterator[None]:
    """The model after a change; afterwards all its modules have the attributes and children that they had."""
    before = [(module, dict(vars(module)), dict(module._modules)) for module in model.modules()]
    try:
        change(model)
        yield
    finally:
        for module, attributes, children in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._modules.clear()
            module._modules.update(children)


# optimizers over fake parameters --------------------------------------------------------------------------------------


def fake_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, trace: ModelTrace) -> torch.optim.Optimizer:
    """The same optimizer over the fake copy's parameters, its state faked."""
    return optimizer_over(optimizer, [model], [trace.fake_model], trace.mode)


def optimizer_over(
    optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], copies: Sequence[nn.Module], mode: FakeTensorMode
) -> torch.optim.Optimizer:
    """The same optimizer over the parameters of fake copies; its state, and parameters of no model, faked."""
    memo: dict[int, Any] = {}
    for model, fake_model in zip(models, copies, strict=True):
        pairs = zip(model.parameters(), fake_model.parameters(), strict=True)
        memo.update((id(real), fake) for real, fake in pairs)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) not in memo:
            memo[id(parameter)] = fake_batch(parameter, mode)
    inside = [one for one in getattr(optimizer, "optimizers", ()) if isinstance(one, torch.optim.Optimizer)]
    own = [value for one in (optimizer, *inside) for value in _own_attributes(one).values()]
    for value in (*tree_leaves(list(optimizer.state.values())), *tree_leaves(own)):
        if isinstance(value, Tensor) and id(value) not in memo:
            memo[id(value)] = value.clone() if value.dim() == 0 and value.is_cpu else fake_batch(value, mode)
    states: Any = torch.optim.Optimizer.__getstate__  # torch's own leaves the attributes of its classes out
    with swapped(torch.optim.Optimizer, __getstate__=lambda self: {**_own_attributes(self), **states(self)}):
        made: torch.optim.Optimizer = copied(optimizer, memo)
    for ours, theirs in zip(made.param_groups, optimizer.param_groups, strict=True):
        if "foreach" in ours and ours["foreach"] is None and ours.get("fused") is None:
            # which implementation a step takes is decided by the types of parameters, and fake ones have another
            ours["fused"], ours["foreach"] = _default_to_fused_or_foreach(
                theirs["params"], bool(ours.get("differentiable", False)), use_fused=False
            )
    return made


def _own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Attributes besides groups, state, hooks and a ``step`` that a scheduler has wrapped: counts, buffers."""
    inherited = ("state", "param_groups", "defaults")
    own = {n: v for n, v in vars(optimizer).items() if n not in inherited and not n.startswith("_optimizer_")}
    return {name: value for name, value in own.items() if not callable(value)}
