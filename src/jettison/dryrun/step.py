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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils._pytree import tree_leaves

from jettison.capture.copies import copied
from jettison.capture.fakes import fake_batch
from jettison.capture.model_trace import BlockClass, ModelTrace, context_of
from jettison.capture.recording import RegionTrace
from jettison.capture.signature import as_signed
from jettison.capture.sparse_fakes import is_sparse
from jettison.capture.tracer import unseen_outputs
from jettison.core.errors import TraceError, UsageError
from jettison.dryrun.block import block_levels, hold_gradients, run_step, with_memory_of_their_own
from jettison.dryrun.counter import AllocationCounter, AllocationEvent, Workspace, quiet_gc, static_tensors
from jettison.dryrun.inner_optimizers import each_of
from jettison.dryrun.observed import stand_in_for_opaque
from jettison.dryrun.tape import Tape
from jettison.ledger.levels import StepLevels
from jettison.runtime.graph_fingerprint import next_sequence_number
from jettison.runtime.install import install
from jettison.runtime.offload import Transfer
from jettison.runtime.planned import PlannedForward
from jettison.runtime.witness import Check
from jettison.solve.policy import CheckpointPolicy
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
    transfers: tuple[Transfer, ...] = ()  # to the host and back, in order
    levels: StepLevels | None = None  # over the step
    composed: bool = False  # of stretches of other steps (dryrun/composed.py), and not run itself

    @property
    def phase(self) -> str:
        """The phase that sets the peak."""
        peaks = {
            "forward": self.forward_peak_bytes,
            "backward": self.backward_peak_bytes,
            "optimizer": self.optimizer_peak_bytes,
        }
        return max(peaks, key=lambda name: peaks[name])


class DryStep(Protocol):
    """A training step as somebody's loop has it, on fake tensors of one mode; it may be run again and again."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """What runs under a plan, in the order of the parts."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Over the modules' parameters. Its state is made in a first step that is not counted."""
        ...

    @property
    def last(self) -> Sequence[torch.optim.Optimizer]:
        """Optimizers of the loop that step after all passes."""
        ...

    def around(self, trace: ModelTrace) -> contextlib.AbstractContextManager[None]:
        """Everything that is run of it, an optimizer's step included, runs in here.

        Args:
            trace: of the first of its modules.
        """
        ...

    def alive(self) -> Iterable[Tensor]:
        """What is there before a step."""
        ...

    def leave_gradients(self, counter: AllocationCounter) -> None:
        """Parameters have the gradients that a step leaves them, on the way to which nothing is counted."""
        ...

    def passes(self, counter: AllocationCounter) -> tuple[int, int, Any]:
        """All forwards and backwards of a step, gradients left at the parameters; peak bytes of each, and what the
        loop still holds while its optimizer steps.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ModulePolicy:
    """How one module of a step is treated.

    Args:
        policies: by block name.
        opaque: levels of the blocks that cannot run on fake tensors; they are stood in for.
    """

    trace: ModelTrace
    policies: Mapping[str, CheckpointPolicy]
    root: CheckpointPolicy
    segments: Sequence[list[str]] = ()
    opaque: Mapping[str, RegionOption] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OneBatch:
    """The plainest step: one forward and one backward of a trace's fake copy."""

    trace: ModelTrace
    optimizer: torch.optim.Optimizer | None = None
    _left: dict[nn.Parameter, Tensor] = field(default_factory=dict, init=False)

    @property
    def modules(self) -> Sequence[nn.Module]:
        """See `DryStep`."""
        return (self.trace.fake_model,)

    @property
    def last(self) -> Sequence[torch.optim.Optimizer]:
        """See `DryStep`."""
        return each_of(self.optimizer)

    def around(self, trace: ModelTrace) -> contextlib.AbstractContextManager[None]:
        """See `DryStep`."""
        return trace.context()

    def alive(self) -> Iterable[Tensor]:
        """See `DryStep`."""
        if self.trace.loop.gradients_held and not self._left:
            self._left.update(self._seen_to_leave())
        hold_gradients(self.trace, self.trace.fake_model, self._left)
        return static_tensors(self.trace.fake_model, self.trace.batch, self.optimizer)

    def _seen_to_leave(self) -> dict[nn.Parameter, Tensor]:
        model = self.trace.fake_model
        model.zero_grad()
        with AllocationCounter(device=self.trace.device_type) as unmeasured:
            self.passes(unmeasured)
        return with_memory_of_their_own({p: p.grad for p in model.parameters() if p.grad is not None})

    def leave_gradients(self, counter: AllocationCounter) -> None:
        """See `DryStep`."""
        self.passes(counter)

    def passes(self, counter: AllocationCounter) -> tuple[int, int, Any]:
        """See `DryStep`."""
        return run_step(self.trace, self.trace.fake_model, counter)


@contextlib.contextmanager
def planned(
    module: nn.Module, name: str, policy: CheckpointPolicy, trace: RegionTrace, signature: Any, how: Check
) -> Iterator[None]:
    """The module runs under a policy, with a program that is known already."""
    region = PlannedForward(module, name, policy, how=how)
    region.recordings.adopt(signature, trace, checked=True)
    region.in_dry_run = True
    try:
        yield
    finally:
        region.remove()


def dry_run_block(
    trace: ModelTrace,
    cls: BlockClass,
    policy: CheckpointPolicy,
    key: str,
    seconds: float,
    workspace: Workspace | None = None,
) -> RegionOption:
    """Levels of one block under one decision."""
    module = trace.fake_model.get_submodule(cls.example)
    shared = {cls.trace.inputs[b.index] for b in cls.trace.program.buffers if b.index in cls.trace.inputs and b.free}
    how = Check(trace.loop.check)
    switches = as_signed(cls.signature[1])  # the model may switch autocast on around its blocks (Accelerate, Fabric)
    region = planned(module, cls.example, policy, cls.trace, cls.signature, how)
    with context_of(trace, module), switches, quiet_gc(), region:
        hold_gradients(trace, module)
        try:
            levels = block_levels(module, (cls.args, cls.kwargs), shared, workspace, trace.device_type)
        except (LookupError, AttributeError) as error:  # of code that knows a fake tensor from a real one
            raise TraceError(
                f"blocks like {cls.example} ran on the batch itself, and cannot run on tensors without values "
                f"({type(error).__name__}: {error}); leave them out with regions=[...]"
            ) from error
    return RegionOption(key=key, seconds=seconds, **levels._asdict())


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


def make_state(parts: Sequence[ModulePolicy], dry_step: DryStep, *, workspace: Workspace | None = None) -> None:
    """A first step, which is not counted, where trained parameters have no state yet. What no gradient reaches gets
    none.

    Args:
        workspace: is asked about every op of it.
    """
    optimizer = dry_step.optimizer
    if optimizer is None or optimizer in _HAVE_STATE:
        return
    if all(map(_has_state, each_of(optimizer))):
        _HAVE_STATE.add(optimizer)
        return
    with _ready(parts, dry_step):
        with AllocationCounter(dry_step.alive(), workspace=workspace, device=parts[0].trace.device_type) as counter:
            dry_step.leave_gradients(counter)
            optimizer.step()
            refuse_growing_state(optimizer)
        optimizer.zero_grad(set_to_none=True)
    _HAVE_STATE.add(optimizer)


_HAVE_STATE: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers whose state was made, or was there: a step is enough for that."""


def _has_state(optimizer: torch.optim.Optimizer) -> bool:
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return bool(optimizer.state) and all(p in optimizer.state for p in trained)


def refuse_growing_state(optimizer: torch.optim.Optimizer) -> None:
    """Whether the state has a size.

    Raises:
        UsageError: it has sparse tensors, to which every step adds its gradient's entries.
    """
    if any(is_sparse(value) for value in tree_leaves(list(optimizer.state.values()))):
        raise UsageError(
            f"the state of {type(optimizer).__name__} has the sparse gradients of an Embedding(sparse=True) in it (its "
            "momentum), and grows by their entries in every step: no budget holds. Train that table with SparseAdam or "
            "with SGD(momentum=0)"
        )


def dry_run(
    parts: Sequence[ModulePolicy],
    dry_step: DryStep,
    *,
    workspace: Workspace | None = None,
    told: Callable[[Tape, int], None] | None = None,
) -> StepPeaks:
    """The whole step under a plan.

    Args:
        parts: by module of the step, traced in its fake mode.
        told: gets the tape of the step, and what was alive when it was over.
    """
    make_state(parts, dry_step)
    last_ones = dry_step.last
    device = parts[0].trace.device_type
    with _ready(parts, dry_step) as installed:
        engines = [regions[-1].offload for regions in installed if regions[-1].offload is not None]
        tape = Tape(next_sequence_number) if told is not None else None
        with AllocationCounter(
            dry_step.alive(), workspace=workspace, device=device, record_levels=True, tape=tape
        ) as counter:
            static = counter.live_bytes
            for engine in engines:
                engine.transfers.clear()
            if tape is not None:
                _listen(installed[0], counter)
            forward, backward, held = dry_step.passes(counter)
            counter.reset_peak()
            if last_ones:
                counter.phase("optimizer")
            for optimizer in last_ones:
                optimizer.step()
            last = counter.peak_bytes if last_ones else 0
            if tape is not None and told is not None:
                told(tape, counter.live_bytes)
            del held
        host_bytes = sum(engine.pool.peak_bytes for engine in engines)
        pinned_bytes = sum(engine.pool.real_bytes for engine in engines)
        transfers = tuple(transfer for engine in engines for transfer in engine.transfers)
    beside = parts[0].trace.loop.elsewhere_bytes
    levels = StepLevels.of(counter.stretches, beside_bytes=beside)
    return StepPeaks(
        peak_bytes=max(forward, backward, last) + beside,
        static_bytes=static + beside,
        forward_peak_bytes=forward + beside,
        backward_peak_bytes=backward + beside,
        optimizer_peak_bytes=last + beside if last_ones else 0,
        host_bytes=host_bytes,
        pinned_bytes=pinned_bytes,
        transfers=transfers,
        levels=levels,
    )


def dry_run_events(part: ModulePolicy, dry_step: DryStep) -> tuple[AllocationEvent, ...]:
    """Every allocation of the whole step under a plan, in order, to be looked at. What kernels take inside of a call is
    not among them.
    """
    make_state([part], dry_step)
    with _ready([part], dry_step):
        device = part.trace.device_type
        with AllocationCounter(dry_step.alive(), device=device, record_events=True) as counter:
            *_, held = dry_step.passes(counter)
            if dry_step.last:
                counter.phase("optimizer")
            for optimizer in dry_step.last:
                optimizer.step()
            del held
        return counter.events


@contextlib.contextmanager
def _ready(parts: Sequence[ModulePolicy], dry_step: DryStep) -> Iterator[list[list[PlannedForward]]]:
    """The step can be run in here, its modules under their policies; the regions of each, the root's last."""
    installed: list[list[PlannedForward]] = []
    with contextlib.ExitStack() as stack:
        for module, part in zip(dry_step.modules, parts, strict=True):
            stack.callback(module.zero_grad)
            installed.append(stack.enter_context(_under(module, part)))
        stack.enter_context(dry_step.around(parts[0].trace))
        stack.enter_context(quiet_gc())
        stack.enter_context(unseen_outputs({k: c for part in parts for k, c in part.trace.classes.items()}))
        yield installed


def _listen(regions: Sequence[PlannedForward], counter: AllocationCounter) -> None:
    """The counter hears of every call of a block."""
    for region in regions[:-1]:
        region.listener = _Listener(region.name, counter)


class _Listener:
    """Tells a counter of one block's calls."""

    def __init__(self, name: str, counter: AllocationCounter) -> None:
        self.name, self.counter = name, counter

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `CallListener`."""
        self.counter.enters(self.name, (args, kwargs))

    def ends(self, returned: Sequence[Any]) -> None:
        """See `CallListener`."""
        self.counter.leaves(returned)


@contextlib.contextmanager
def _under(module: nn.Module, part: ModulePolicy) -> Iterator[list[PlannedForward]]:
    """The module under its policies; its regions, the root's last."""
    regions = install(
        module, part.trace, part.policies, part.root, part.segments, checked=True, how=Check(part.trace.loop.check)
    )
    stand_in_for_opaque(regions, part.trace, part.opaque)
    try:
        yield regions
    finally:
        for region in reversed(regions):
            region.remove()


def fake_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, trace: ModelTrace) -> torch.optim.Optimizer:
    """The same optimizer over the fake copy's parameters, its state faked."""
    return optimizer_over(optimizer, [model], [trace.fake_model], trace.mode)


def optimizer_over(
    optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], copies: Sequence[nn.Module], mode: FakeTensorMode
) -> torch.optim.Optimizer:
    """The same optimizer over the parameters of fake copies; its state, and parameters of no model, faked."""
    memo: dict[int, Any] = {}
    for model, fake_model in zip(models, copies, strict=True):
        for real, fake in zip(model.parameters(), fake_model.parameters(), strict=True):
            memo[id(real)] = fake
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) not in memo:
            memo[id(parameter)] = fake_batch(parameter, mode)
    inside = [one for one in getattr(optimizer, "optimizers", ()) if isinstance(one, torch.optim.Optimizer)]
    own = [value for one in (optimizer, *inside) for value in _own_attributes(one).values()]
    for value in (*tree_leaves(list(optimizer.state.values())), *tree_leaves(own)):
        if isinstance(value, Tensor) and id(value) not in memo:
            memo[id(value)] = value.clone() if value.dim() == 0 else fake_batch(value, mode)
    with _copied_whole():
        made: torch.optim.Optimizer = copied(optimizer, memo)
    for ours, theirs in zip(made.param_groups, optimizer.param_groups, strict=True):
        _decide(ours, theirs)
    return made


def _own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's attributes besides groups and state: counts, settings, buffers.

    Hooks, and a ``step`` that a scheduler has wrapped, belong to the real optimizer and are left out.
    """
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups", "defaults")
        and not name.startswith("_optimizer_")
        and not callable(value)
    }


@contextlib.contextmanager
def _copied_whole() -> Iterator[None]:
    """Copies of optimizers have the attributes of their classes, too: torch's own leave them out."""
    own = torch.optim.Optimizer.__getstate__
    torch.optim.Optimizer.__getstate__ = lambda self: {**_own_attributes(self), **own(self)}
    try:
        yield
    finally:
        torch.optim.Optimizer.__getstate__ = own


def _decide(group: dict[str, Any], like: dict[str, Any]) -> None:
    """Which implementation a step takes hangs on the types of parameters, and fake ones have another."""
    if "foreach" not in group or group["foreach"] is not None or group.get("fused") is not None:
        return
    differentiable = bool(group.get("differentiable", False))
    group["fused"], group["foreach"] = _default_to_fused_or_foreach(like["params"], differentiable, use_fused=False)
