"""Blocks that cannot run on fake tensors: observed on real ones, and stood in for when the step is dry-run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jettison.capture.dispatch import eagerly
from jettison.capture.model_trace import BlockClass, ModelTrace
from jettison.capture.randomness import seed_streams
from jettison.capture.signature import call_signature, opaque_copy
from jettison.capture.stand_ins import run_holding_nothing, stand_in, stub_outputs, undisturbed, without_gradient_hooks
from jettison.capture.tensor_subclasses import arrived, has_gradients
from jettison.capture.trees import tree_flatten, tree_leaves, tree_unflatten
from jettison.core.errors import WrongValue
from jettison.dryrun.block import BlockLevels, block_levels, chain_bytes
from jettison.dryrun.counter import Workspace, quiet_gc
from jettison.runtime.offload import Group, Moved, flat_bytes
from jettison.runtime.planned import PlannedForward
from jettison.runtime.recordings import Verdict
from jettison.solve.policy import Full, KeepAll
from jettison.solve.problem import RegionOption

RANDOM_RUNS = 4


def observe_block(
    trace: ModelTrace, cls: BlockClass, workspace: Workspace | None = None
) -> tuple[RegionOption, RegionOption]:
    """Levels of a block that cannot be recorded, kept whole and checkpointed whole, on real tensors.

    Its shapes may depend on values. So it runs on several random arguments, and on arguments whose every row is the
    same, which a router sends all to the same experts; the levels are the highest, and as much more as they differ by.
    The same block has the same levels whenever it is asked. Parameters, their gradients, buffers and random generators
    are left as they were.
    """
    assert trace.real is not None
    module = trace.real.get_submodule(cls.example)
    leaves, spec = tree_flatten((cls.args, cls.kwargs))
    shared = {p for c in trace.calls if c.class_key == cls.key for p in c.shared}
    gradients = [(p, p.grad) for p in module.parameters()]
    found: list[RegionOption] = []
    with undisturbed(module, leaves), without_gradient_hooks(module), quiet_gc(), eagerly():
        seed_streams(0)
        given = [[stand_in(leaf) for leaf in leaves] for _ in range(RANDOM_RUNS)]
        given.append([_alike(leaf) for leaf in given[0]])
        calls = [opaque_copy(tree_unflatten(values, spec), stand_in) for values in given]
        started = time.perf_counter()
        run_holding_nothing(module, calls[0])
        seconds = time.perf_counter() - started
        for key, how in (("none", KeepAll()), ("full", Full())):
            region = PlannedForward(module, cls.example, how)
            region.quiet, region.recordings.never, region.recordings.late = True, cls.problem, cls.trace.late
            try:
                levels = []
                for call in calls:
                    for parameter, _ in gradients:
                        held = trace.loop.gradients_held and parameter.requires_grad
                        parameter.grad = torch.empty_like(parameter) if held else None
                    levels.append(block_levels(module, call, shared, workspace, trace.device_type))
            except WrongValue:  # what its trial did not show: a real step would stop
                cls.verdict = Verdict(again=False, why="a second run of its forward gives other values")
                found.append(replace(found[0], key=key))
                continue
            finally:
                region.remove()
            highest = BlockLevels(*(2 * max(n) - min(n) for n in zip(*levels, strict=True)))
            found.append(RegionOption(key=key, seconds=seconds if key == "full" else 0.0, **highest._asdict()))
    for parameter, gradient in gradients:
        parameter.grad = gradient
    return found[0], found[1]


def _alike(leaf: Any) -> Any:
    """The same argument with one row everywhere."""
    if not isinstance(leaf, Tensor) or not has_gradients(leaf.dtype) or leaf.dim() < 2 or not leaf.numel():
        return leaf
    same = leaf.detach().clone(memory_format=torch.preserve_format)
    return same.copy_(leaf.detach()[(0,) * (leaf.dim() - 1)]).requires_grad_(leaf.requires_grad)


class StandIn:
    """The forward of a block that cannot run on fake tensors: allocates what the block was seen to allocate, and sends
    to the host what it will send.
    """

    def __init__(self, trace: ModelTrace, planned: PlannedForward, levels: RegionOption) -> None:
        self.planned, self.module, self.levels, self.device = planned, planned.module, levels, trace.device_type
        calls = [number for number, call in enumerate(trace.calls) if call.name == planned.name]
        first = trace.calls[calls[0]]
        self.region, self.shared = trace.classes[first.class_key].trace, first.shared
        self.compiled = any(trace.classes[trace.calls[number].class_key].compiled for number in calls)
        self.lasting: Tensor | None = None
        self.own = chain_bytes(trace, calls[0])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = call_signature(args, kwargs)
        # its levels are what it has for itself; what others get as well is alive as long as any of them needs it
        shared = tuple(leaves[p] for p in self.shared if isinstance(leaves[p], Tensor))
        self.lasting = self._blob(self.levels.lasting_bytes)  # in a cache, say, that the output of the model has
        held = self._blob(self.levels.resident_bytes - self.levels.lasting_bytes)
        group = self.planned.begin_group(moves=False) if self.compiled else None
        call = _StandInCall(self, held, group)
        made = [self._blob(sent.nbytes) for sent in self.levels.sent if sent.place is None]
        there = self.levels.resident_bytes + sum(t.nbytes for t in made)
        self._blob(self.levels.forward_peak_bytes - there - self.own[0])
        output = stub_outputs(self.region, leaves, probe=call, held=shared)
        if group is not None:
            self._send(call, group, made, (leaves, tree_leaves(output)))
            group.end()
        return output

    def _send(self, call: _StandInCall, group: Group, made: list[Tensor], ends: tuple[list[Any], list[Any]]) -> None:
        """In their order: tensors of its own, arguments, results."""
        for sent in self.levels.sent:
            tensor = made.pop(0) if sent.place is None else ends[sent.place[0]][sent.place[1]]
            if sent.place is None or not tensor.is_leaf:  # what somebody holds in any case stays
                part = arrived(tensor)
                call.moved.append(group.engine.send(flat_bytes(part, 0, part.untyped_storage().nbytes()), group))

    def backward(self, call: _StandInCall) -> None:
        """Run the backward of one call."""
        if call.group is not None:
            call.group.asked()
        came = [moved.open() for moved in call.moved]
        call.moved.clear()
        self._blob(self.levels.backward_peak_bytes - self.own[1])
        call.held.clear()  # its peak counts what is still held when it comes: gradients do not come on top of all of it
        for p in call.trained:  # as they were in the forward: under FSDP unsharded ones
            if p.grad is None:
                p.grad = torch.empty_like(p)
        del came

    def _blob(self, nbytes: int) -> Tensor:
        return torch.empty(max(0, nbytes), dtype=torch.uint8, device=self.device)


class _StandInCall:
    """One call of a stand-in, between its forward and its backward."""

    def __init__(self, of: StandIn, held: Tensor, group: Group | None) -> None:
        self.of, self.held, self.group = of, [held], group
        self.moved: list[Moved] = []
        self.trained = [p for p in of.module.parameters() if p.requires_grad]

    def forward(self, call: int) -> None:
        """Nothing to note."""

    def backward(self, call: int) -> None:
        self.of.backward(self)


def stand_in_for_opaque(
    regions: Iterable[PlannedForward], trace: ModelTrace, levels: Mapping[str, RegionOption]
) -> None:
    """Blocks that cannot run on fake tensors, or run compiled, allocate what they were seen to: ``levels``, by name."""
    stood_in = {c.name for c in trace.calls if trace.classes[c.class_key].stood_in}
    for region in regions:
        if region.name in stood_in and region.name in levels:
            region.forward = StandIn(trace, region, levels[region.name])
            region.put_plan(replace(region.plan, policy=KeepAll()))
