"""Rehearsal: the planned step, run by the runtime that will run it, on fake tensors under an allocation counter.

Blocks are rehearsed one option at a time and the root once an option, for the levels that the solver adds up (NOTE [ The
step's levels ] in plan/problem.py). The whole step is rehearsed at the end: its peak is the one that a plan states.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from jettison.measure.memory import AllocationCounter, Workspace, static_tensors
from jettison.plan.problem import RegionOption, RootOption
from jettison.runtime.install import install
from jettison.runtime.region import PlannedForward
from jettison.runtime.treatment import Exactly, Full, KeepAll, Treatment
from jettison.trace.capture import RegionTrace, TensorRef
from jettison.trace.fakes import fake_batch
from jettison.trace.model import BlockClass, ModelTrace, call_model, loss_of, stub_outputs
from jettison.trace.observe import stand_in, undisturbed
from jettison.trace.signature import call_signature


@dataclass(frozen=True, kw_only=True)
class StepRehearsal:
    """Bytes of a rehearsed step: at its peak, in each phase, and what it starts from."""

    peak_bytes: int
    static_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    optimizer_peak_bytes: int  # 0 without an optimizer

    @property
    def phase(self) -> str:
        """The phase that sets the peak."""
        peaks = {
            "forward": self.forward_peak_bytes,
            "backward": self.backward_peak_bytes,
            "optimizer": self.optimizer_peak_bytes,
        }
        return max(peaks, key=lambda name: peaks[name])


@contextlib.contextmanager
def planned(module: nn.Module, name: str, treatment: Treatment, trace: RegionTrace, signature: Any) -> Iterator[None]:
    """The module runs under a treatment, with a program that is known already."""
    region = PlannedForward(module, name, treatment)
    region.adopt(signature, trace, checked=True)
    try:
        yield
    finally:
        region.remove()


def rehearse_block(
    trace: ModelTrace, cls: BlockClass, kept: frozenset[int], key: str, seconds: float, workspace: Workspace | None = None
) -> RegionOption:
    """Levels of one block under one decision."""
    module = trace.twin.get_submodule(cls.example)
    treatment = Exactly(cls.trace.program.digest(), kept, KeepAll())
    shared = {cls.trace.inputs[b.index] for b in cls.trace.program.buffers if b.index in cls.trace.inputs and b.free}
    with trace.context(), _quiet_gc(), planned(module, cls.example, treatment, cls.trace, cls.signature):
        resident, forward_peak, backward_peak = block_levels(module, (cls.args, cls.kwargs), shared, workspace)
        module.zero_grad(set_to_none=True)
    return RegionOption(
        key=key, resident_bytes=resident, forward_peak_bytes=forward_peak, backward_peak_bytes=backward_peak,
        seconds=seconds,
    )  # fmt: skip


def block_levels(
    module: nn.Module, call: tuple[Any, Any], shared: set[int], workspace: Workspace | None
) -> tuple[int, int, int]:
    """Resident bytes, forward peak and backward peak of one call of a module, as it is now, on arguments like these."""
    leaves, spec = tree_flatten(call)
    outer = [leaf.detach() for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i in shared]
    counter = AllocationCounter([*module.parameters(), *module.buffers(), *outer], workspace=workspace)
    with counter:
        start = counter.live_bytes
        counter.reset_peak()
        given = [_argument(leaf, i in shared) for i, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(given, spec)
        del given
        box = [(args, kwargs)]
        del args, kwargs
        loss = _forward(module, box)
        forward_peak = counter.peak_bytes - start
        torch.clear_autocast_cache()
        resident = counter.live_bytes - start
        counter.reset_peak()
        before = counter.live_bytes
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            loss.backward()
        return resident, forward_peak, counter.peak_bytes - before


def _argument(leaf: Any, shared: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if shared or not leaf.is_floating_point():
        return leaf.detach().requires_grad_(leaf.requires_grad)
    if not leaf.requires_grad:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).normal_()
    return _Source.apply(torch.zeros((), requires_grad=True), leaf.shape, leaf.stride(), leaf.dtype, leaf.device)


class _Source(torch.autograd.Function):
    """A tensor from nowhere, whose gradient goes nowhere."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, shape: Any, stride: Any, dtype: Any, device: Any) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).normal_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (None,) * 5


def _forward(module: nn.Module, box: list[Any]) -> Tensor:
    """Run the block on arguments that nobody else holds; what comes back is a scalar over its outputs."""
    args, kwargs = box.pop()
    with torch.enable_grad():
        output = module(*args, **kwargs)
        return _Sink.apply(*(t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad))


class _Sink(torch.autograd.Function):
    """A scalar of some tensors that saves none of them; its backward makes gradients that only the engine owns."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.metas = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return tuple(torch.empty_strided(m[0], m[1], dtype=m[2], device=m[3]) for m in ctx.metas)


class _Levels:
    """Listens to a root run over stubs."""

    def __init__(self, counter: AllocationCounter, inputs: list[int], outputs: list[int]) -> None:
        self.counter = counter
        self.inputs = inputs
        self.outputs = outputs
        self.forward_levels: list[int] = []
        self.backward_levels: dict[int, int] = {}
        self.loss_peak = 0

    def forward(self, call: int) -> None:
        self.forward_levels.append(self.counter.live_bytes - self.inputs[call])
        self.counter.reset_peak()

    def backward(self, call: int) -> None:
        if not self.backward_levels:
            self.loss_peak = self.counter.peak_bytes
        self.backward_levels[call] = self.counter.live_bytes - self.outputs[call]
        self.counter.reset_peak()


def rehearse_root(
    trace: ModelTrace, kept: frozenset[int], key: str, seconds: float, workspace: Workspace | None = None
) -> RootOption:
    """Levels of everything around the blocks under one decision; the blocks are stubs that cost nothing."""
    twin = trace.twin
    calls = iter(range(len(trace.calls)))
    sizes = [_chain_bytes(trace, i) for i in range(len(trace.calls))]
    static = static_tensors(twin, trace.batch)
    counter = AllocationCounter(static, workspace=workspace)
    levels = _Levels(counter, [s[0] for s in sizes], [s[1] for s in sizes])
    names = list(dict.fromkeys(c.name for c in trace.calls))

    def stub(*args: Any, **kwargs: Any) -> Any:
        call = next(calls)
        region = trace.classes[trace.calls[call].class_key].trace
        leaves, _ = call_signature(args, kwargs)
        held = tuple(leaves[p] for p in trace.calls[call].shared if isinstance(leaves[p], Tensor))
        return stub_outputs(region, leaves, probe=levels, call=call, held=held)

    modules = [twin.get_submodule(name) for name in names]
    root = PlannedForward(twin, "", Exactly(trace.root.program.digest(), kept, KeepAll()), blocks=tuple(names))
    root.adopt(trace.root_signature, trace.root, checked=True)
    try:
        for module in modules:
            module.forward = _announced(root, stub)  # type: ignore[method-assign]
        with trace.context(), _quiet_gc(), counter:
            base = counter.live_bytes
            _run_step(trace, twin, counter)
            tail = counter.peak_bytes
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)
        root.remove()
        twin.zero_grad(set_to_none=True)
    count = len(trace.calls)
    if not levels.backward_levels:  # no blocks: everything happens around them
        levels.loss_peak = tail
    return RootOption(
        key=key,
        held_forward_bytes=tuple(b - base for b in levels.forward_levels),
        held_backward_bytes=tuple(levels.backward_levels.get(i, base) - base for i in range(count)),
        loss_peak_bytes=levels.loss_peak - base,
        tail_peak_bytes=tail - base,
        seconds=seconds,
    )


def _announced(root: PlannedForward, stub: Any) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = stub(*args, **kwargs)
        root.nested_done(output)
        return output

    return forward


def _chain_bytes(trace: ModelTrace, call: int) -> tuple[int, int]:
    """Bytes of a block call's own inputs and outputs: they are the block's, not the root's."""
    block = trace.calls[call]
    region = trace.classes[block.class_key].trace
    buffers = region.program.buffers
    inputs = sum(buffers[b].nbytes for b, p in region.inputs.items() if p not in block.shared)
    made = {r.buffer for r in region.output_leaves if isinstance(r, TensorRef) and r.buffer not in region.inputs}
    floating = {r.buffer for r in region.output_leaves if isinstance(r, TensorRef) and r.dtype.is_floating_point}
    return inputs, sum(buffers[b].nbytes for b in made & floating)


def _run_step(trace: ModelTrace, model: nn.Module, counter: AllocationCounter) -> tuple[int, int]:
    """One forward and backward; peak bytes of each. The output lives through backward where the training loop holds it."""
    counter.reset_peak()
    with torch.enable_grad():
        output = call_model(model, trace.batch)
        loss = loss_of(output, trace.loss_fn)
    if not trace.holds_output:
        del output
    torch.clear_autocast_cache()
    forward = counter.peak_bytes
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        loss.backward()
    return forward, counter.peak_bytes


def rehearse_step(
    trace: ModelTrace,
    treatments: dict[str, Treatment],
    root: Treatment,
    segments: Iterable[list[str]] = (),
    *,
    opaque: Mapping[str, RegionOption] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    workspace: Workspace | None = None,
) -> StepRehearsal:
    """The whole step under a plan.

    Args:
        treatments: by block name.
        opaque: levels of the blocks that cannot run on fake tensors; they are stood in for.
        optimizer: of the twin (see `twin_optimizer`). Its state is made in a first step that is not counted.
    """
    twin = trace.twin
    regions = install(twin, trace, treatments, root, segments, checked=True)
    for region in regions:
        if region.name in (opaque or {}):
            region.forward = _StandIn(trace, region.name, opaque[region.name])  # type: ignore[index]
            region.treatment = KeepAll()
    try:
        with trace.context(), _quiet_gc():
            if optimizer is not None and not optimizer.state:
                for parameter in twin.parameters():
                    parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            counter = AllocationCounter(static_tensors(twin, trace.batch, optimizer), workspace=workspace)
            with counter:
                static = counter.live_bytes
                forward, backward = _run_step(trace, twin, counter)
                counter.reset_peak()
                if optimizer is not None:
                    optimizer.step()
                last = counter.peak_bytes
    finally:
        for region in reversed(regions):
            region.remove()
        twin.zero_grad(set_to_none=True)
    return StepRehearsal(
        peak_bytes=max(forward, backward, last if optimizer is not None else 0),
        static_bytes=static,
        forward_peak_bytes=forward,
        backward_peak_bytes=backward,
        optimizer_peak_bytes=last if optimizer is not None else 0,
    )


def observe_block(trace: ModelTrace, cls: BlockClass) -> tuple[RegionOption, RegionOption]:
    """Levels of a block that cannot be recorded, kept whole and checkpointed whole, on real tensors.

    Its shapes may depend on values: another batch may take more. Parameters, their gradients, buffers and random
    generators are left as they were.
    """
    assert trace.real is not None
    module = trace.real.get_submodule(cls.example)
    leaves, spec = tree_flatten((cls.args, cls.kwargs))
    shared = {p for c in trace.calls if c.class_key == cls.key for p in c.shared}
    call = tree_unflatten([stand_in(leaf) for leaf in leaves], spec)
    gradients = [(p, p.grad) for p in module.parameters()]
    found = []
    with undisturbed(module), _quiet_gc():
        started = time.perf_counter()
        with torch.no_grad():
            module(*call[0], **call[1])
        seconds = time.perf_counter() - started
        for key, how in (("none", KeepAll()), ("full", Full())):
            region = PlannedForward(module, cls.example, how)
            region.give_up(cls.signature, cls.problem)
            region.quiet = True
            try:
                for parameter, _ in gradients:
                    parameter.grad = None
                resident, forward_peak, backward_peak = block_levels(module, call, shared, None)
            finally:
                region.remove()
            found.append(
                RegionOption(
                    key=key, resident_bytes=resident, forward_peak_bytes=forward_peak, backward_peak_bytes=backward_peak,
                    seconds=seconds if key == "full" else 0.0,
                )
            )  # fmt: skip
    for parameter, gradient in gradients:
        parameter.grad = gradient
    return found[0], found[1]


class _StandIn:
    """The forward of a block that cannot run on fake tensors: allocates what the block was seen to allocate."""

    def __init__(self, trace: ModelTrace, name: str, levels: RegionOption) -> None:
        self.region = next(trace.classes[c.class_key].trace for c in trace.calls if c.name == name)
        self.module = trace.twin.get_submodule(name)
        self.levels = levels
        self.own = next(_chain_bytes(trace, i) for i, c in enumerate(trace.calls) if c.name == name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = call_signature(args, kwargs)
        held = _blob(self.levels.resident_bytes)
        _blob(self.levels.forward_peak_bytes - self.levels.resident_bytes - self.own[0])
        return stub_outputs(self.region, leaves, probe=self, held=(held,))

    def forward(self, call: int) -> None:
        """Nothing to note."""

    def backward(self, call: int) -> None:
        gradients = [p for p in self.module.parameters() if p.requires_grad]
        _blob(self.levels.backward_peak_bytes - self.own[1])
        for p in gradients:
            p.grad = torch.empty_like(p) if p.grad is None else p.grad


def _blob(nbytes: int) -> Tensor:
    return torch.empty(max(0, nbytes), dtype=torch.uint8)


def twin_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, trace: ModelTrace) -> torch.optim.Optimizer:
    """The same optimizer over the twin's parameters, its state faked."""
    memo: dict[int, Any] = {}
    for real, fake in zip(model.parameters(), trace.twin.parameters(), strict=True):
        memo[id(real)] = fake
    for state in optimizer.state.values():
        for value in tree_leaves(state):
            if isinstance(value, Tensor):
                memo[id(value)] = value.clone() if value.dim() == 0 else fake_batch(value, trace.mode)
    return copy.deepcopy(optimizer, memo)


@contextlib.contextmanager
def _quiet_gc() -> Iterator[None]:
    """Collect first, and not in the middle: deaths by the cycle collector come at times that no plan can know."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
