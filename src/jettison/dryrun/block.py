"""Memory levels of one call of one module: bytes left allocated, and peaks of its forward and backward."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from jettison.capture.fakes import roughly
from jettison.capture.model_trace import BlockClass, ModelTrace, call_model, context_of, loss_of
from jettison.capture.recording import TensorRef
from jettison.capture.signature import as_signed, opaque_copy
from jettison.capture.stand_ins import tensors_made
from jettison.capture.tensor_subclasses import bytes_of, has_gradients, parts_of, plain, storage_of
from jettison.capture.trees import tree_flatten, tree_leaves, tree_unflatten
from jettison.core.errors import TraceError
from jettison.dryrun.counter import AllocationCounter, Workspace, quiet_gc, static_tensors
from jettison.runtime.planned import PlannedForward
from jettison.runtime.witness import Check
from jettison.solve.policy import CheckpointPolicy
from jettison.solve.problem import RegionOption


class BlockLevels(NamedTuple):
    """Bytes of one call. ``lasting_bytes`` of the resident ones outlive its backward, as in a cache."""

    resident_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    lasting_bytes: int


def dry_run_block(
    trace: ModelTrace,
    cls: BlockClass,
    policy: CheckpointPolicy,
    key: str,
    seconds: float,
    workspace: Workspace | None = None,
) -> RegionOption:
    """Levels of one block under one policy, with its recorded program."""
    module = trace.fake_model.get_submodule(cls.example)
    shared = {cls.trace.inputs[b.index] for b in cls.trace.program.buffers if b.index in cls.trace.inputs and b.free}
    with contextlib.ExitStack() as stack:
        stack.enter_context(context_of(trace, module))
        stack.enter_context(as_signed(cls.signature[1]))  # the model may enable autocast around its blocks
        stack.enter_context(quiet_gc())
        region = PlannedForward(module, cls.example, policy, how=Check(trace.loop.check))
        stack.callback(region.remove)
        region.recordings.adopt(cls.signature, cls.trace, checked=True)
        region.in_dry_run = True
        hold_gradients(trace, module)
        try:
            levels = block_levels(module, (cls.args, cls.kwargs), shared, workspace, trace.device_type)
        except (LookupError, AttributeError) as error:  # of code that distinguishes fake tensors from real ones
            raise TraceError(
                f"blocks like {cls.example} ran on the batch itself, and cannot run on tensors without values "
                f"({type(error).__name__}: {error}); leave them out with regions=[...]"
            ) from error
    return RegionOption(key=key, seconds=seconds, **levels._asdict())


def block_levels(
    module: nn.Module, call: tuple[Any, Any], shared: set[int], workspace: Workspace | None, device: str | None
) -> BlockLevels:
    """Levels of one call of a module in its present state, on arguments like these. Leaves it without gradients."""
    leaves, spec = tree_flatten(opaque_copy(call))
    outer = [leaf.detach() for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i in shared]
    counter = AllocationCounter([*static_tensors(module), *outer], workspace=workspace, device=device)
    with counter:
        start = counter.live_bytes
        held = sum(bytes_of(p.grad) for p in module.parameters() if p.grad is not None)
        counter.reset_peak()
        given = given_to_block(leaves, shared)
        args, kwargs = tree_unflatten(given, spec)
        del given
        box = [(args, kwargs)]
        del args, kwargs
        loss, stored = forward_alone(module, box)
        forward_peak = counter.peak_bytes - start
        torch.clear_autocast_cache()
        resident = counter.live_bytes - start
        counter.reset_peak()
        before = counter.live_bytes
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), roughly(module):
            loss.backward()
        backward_peak = counter.peak_bytes - before
        del loss  # but not its storage, which the caller has
        module.zero_grad(set_to_none=True)
        lasting = max(0, counter.live_bytes - start + held)
        del stored
        return BlockLevels(resident, forward_peak, backward_peak, lasting)


def given_to_block(leaves: list[Any], shared: set[int]) -> list[Any]:
    """Leaves like these, owned by the call alone except for the shared ones."""
    given: list[Any] = []
    together: dict[int, list[int]] = {}  # storage -> positions of leaves made in it
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and (position in shared or not has_gradients(leaf.dtype)):
            given.append(leaf.detach().requires_grad_(leaf.requires_grad))
            continue
        given.append(leaf)
        if isinstance(leaf, Tensor):
            together.setdefault(storage_of(leaf), []).append(position)
    for storage, positions in together.items():
        parts = [leaves[p] for p in positions]
        refs = [TensorRef.of(storage, t) for t in parts]
        trained = [t.requires_grad for t in parts]
        seed = torch.zeros((), requires_grad=any(trained), device=parts[0].device)
        for position, made in zip(positions, _FromNowhere.apply(seed, refs, trained, parts[0].device), strict=True):
            given[position] = made
    return given


class _FromNowhere(torch.autograd.Function):
    """Tensors without a source, whose gradients are discarded."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, refs: list[TensorRef], trained: list[bool], device: Any) -> tuple[Tensor, ...]:
        made = tensors_made(refs, device)
        for tensor in made:
            plain(tensor).normal_()
        ctx.mark_non_differentiable(*(t for t, wanted in zip(made, trained, strict=True) if not wanted))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None,) * 4


def forward_alone(module: nn.Module, box: list[Any]) -> tuple[Tensor, list[Any]]:
    """Run the block on arguments that nothing else references; return a scalar over its outputs, and tensors that it
    left in lists and dicts among its arguments.
    """
    args, kwargs = box.pop()
    given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
    with torch.enable_grad():
        output = module.forward(*args, **kwargs)  # as it was recorded: hooks have seen the arguments before
        stored = [leaf for leaf in tree_leaves((args, kwargs)) if id(leaf) not in given]
        wanted = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        # a skipped block returns its arguments, which may require no gradients
        return _ScalarOf.apply(*wanted) if wanted else torch.zeros((), requires_grad=True), stored


class _ScalarOf(torch.autograd.Function):
    """A scalar of some tensors that saves none of them; its backward makes gradients that only the engine owns."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.metas = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return tuple(torch.empty_strided(m[0], m[1], dtype=m[2], device=m[3]) for m in ctx.metas)


def chain_bytes(trace: ModelTrace, call: int) -> tuple[int, int]:
    """Bytes of a block call's own inputs and outputs: they are the block's, not the root's."""
    block = trace.calls[call]
    region = trace.classes[block.class_key].trace
    buffers = region.program.buffers
    inputs = sum(buffers[b].nbytes for b, p in region.inputs.items() if p not in block.shared)
    made = {r.buffer for r in region.output_leaves if isinstance(r, TensorRef) and r.buffer not in region.inputs}
    floating = {r.buffer for r in region.output_leaves if isinstance(r, TensorRef) and has_gradients(r.dtype)}
    return inputs, sum(buffers[b].nbytes for b in made & floating)


def run_step(trace: ModelTrace, model: nn.Module, counter: AllocationCounter) -> tuple[int, int, Any]:
    """Run one forward and backward of a model; peak bytes of each, and the output if the loop references it."""
    counter.reset_peak()
    counter.phase("forward", first=True)
    with torch.enable_grad():
        output = call_model(model, trace.batch)
        loss = loss_of(output, trace.loss_fn)
    if not trace.loop.holds_output:
        output = None
    torch.clear_autocast_cache()
    forward = counter.peak_bytes
    counter.phase("backward")
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), roughly(model):
        loss.backward()
    return forward, counter.peak_bytes, output


def with_memory_of_their_own(gradients: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
    """Copy gradients that share memory with another one. Such a gradient may hold more than it shows: for a parameter
    expanded from a batch of one row, autograd keeps a view of a larger gradient.
    """
    alone = {p: storage_of(parts_of(g)[-1]) for p, g in gradients.items() if type(g) is FakeTensor}
    times = Counter(alone.values())
    return {p: gradients[p] for p, storage in alone.items() if times[storage] == 1}


def hold_gradients(
    trace: ModelTrace, module: nn.Module, left: Mapping[nn.Parameter, Tensor] = MappingProxyType({})
) -> None:
    """Allocate the gradients that the loop has when its forward starts, those ``left`` by a step if it was seen. Call
    it in the trace's context.
    """
    if trace.loop.gradients_held:
        for parameter in module.parameters():
            held = left[parameter] if parameter in left else torch.empty_like(parameter)
            parameter.grad = held if parameter.requires_grad else None
