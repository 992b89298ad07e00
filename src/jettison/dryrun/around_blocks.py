"""Memory levels of the model around its blocks.

The blocks are stubs without memory, so that all allocations are the root's. If blocks and root are entangled (the root
reads tensors that a block left in a side list, such as router logits) a stub would leave too little; then the blocks
run for real and their known bytes are subtracted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jettison.capture.model_trace import ModelTrace
from jettison.capture.signature import call_signature
from jettison.capture.stand_ins import forwards, stub_outputs
from jettison.capture.trees import tree_leaves
from jettison.core.errors import UnsupportedModule
from jettison.dryrun.block import chain_bytes, hold_gradients, run_step
from jettison.dryrun.counter import AllocationCounter, Workspace, quiet_gc, static_tensors
from jettison.dryrun.observed import stand_in_for_opaque
from jettison.dryrun.tape import StretchTape
from jettison.ledger.program import Source
from jettison.runtime.install import install
from jettison.runtime.planned import PlannedForward
from jettison.solve.policy import CheckpointPolicy, Exactly, KeepAll
from jettison.solve.problem import RegionOption, RootOption

if TYPE_CHECKING:
    from jettison.dryrun.step import DryStep


class _StubsFallShort(Exception):
    """A block gets tensors that another one leaves in Python's state, and stubs leave none."""


def is_entangled(trace: ModelTrace) -> bool:
    """Whether the root reads tensors that reached it other than as a block's output."""
    return any(b.source is Source.OUTER and b.index not in trace.root.made for b in trace.root.program.buffers)


def dry_run_root(
    trace: ModelTrace,
    kept: frozenset[int],
    key: str,
    seconds: float,
    workspace: Workspace | None = None,
    *,
    plain: Mapping[str, RegionOption] | None = None,
    through_blocks: bool = False,
) -> RootOption:
    """Levels of everything around the blocks under one decision.

    Args:
        plain: levels of each block class with everything kept; used if root and blocks are entangled.
        through_blocks: they are, although the recording does not show it.
    """
    count = len(trace.calls)
    if trace.loop.gradients_held:
        with trace.context():
            hold_gradients(trace, trace.fake_model)
    static = static_tensors(trace.fake_model, trace.batch)
    counter = AllocationCounter(static, workspace=workspace, device=trace.device_type)
    levels = _RootLevels(counter, [chain_bytes(trace, i) for i in range(count)])
    policy = Exactly(trace.root.program.digest(), kept, KeepAll())
    real = plain if through_blocks or is_entangled(trace) else None  # blocks that run instead of stubs
    held, gradients = [0] * count, [0] * count
    if real is not None:
        held = [real[call.class_key].resident_bytes for call in trace.calls]
        for number, name in enumerate(call.name for call in trace.calls):
            if not trace.loop.gradients_held and all(call.name != name for call in trace.calls[:number]):
                trained = (p for p in trace.fake_model.get_submodule(name).parameters() if p.requires_grad)
                gradients[number] = sum(p.nbytes for p in trained)
    setting = _over_stubs(trace, levels, policy) if real is None else _over_blocks(trace, levels, policy, real)
    try:
        with setting, trace.context(), quiet_gc(), counter:
            base = counter.live_bytes
            run_step(trace, trace.fake_model, counter)
            tail = counter.peak_bytes
    except _StubsFallShort as error:
        if real is not None or plain is None:
            raise UnsupportedModule(
                "the forward calls its blocks more often in a dry run than when it was recorded: it goes by state that "
                "is not put back in between. Hold that state in attributes of the model or of the batch"
            ) from error
        return dry_run_root(trace, kept, key, seconds, workspace, plain=plain, through_blocks=True)
    finally:
        trace.fake_model.zero_grad(set_to_none=True)
    if real is not None and len(levels.forward_levels) < count:  # a block's forward was called past its hooks
        return dry_run_root(trace, kept, key, seconds, workspace)
    before = [0, *accumulate(held)]  # held by the blocks before this one
    after = [sum(gradients[i + 1 :]) for i in range(count)]
    if not levels.backward_levels:  # no blocks: everything happens around them
        levels.loss_peak = tail
    return RootOption(
        key=key,
        held_forward_bytes=tuple(level - base - before[i] for i, level in enumerate(levels.forward_levels)),
        held_backward_bytes=tuple(
            levels.backward_levels.get(i, base + before[i + 1] + after[i]) - base - before[i + 1] - after[i]
            for i in range(count)
        ),
        loss_peak_bytes=max(0, levels.loss_peak - base - before[-1]),
        tail_peak_bytes=max(0, tail - base - sum(gradients)),
        seconds=seconds,
    )


def around_stubs(
    trace: ModelTrace, policy: CheckpointPolicy, dry_step: DryStep, workspace: Workspace | None = None
) -> StretchTape | None:
    """Tape of a step whose blocks are stubs, without its optimizer; None if stubs do not suffice. Its levels around the
    blocks are those of the step, in a small part of its time.
    """
    if is_entangled(trace):
        return None
    tape = StretchTape()
    levels = _RootLevels(AllocationCounter(), [(0, 0)] * len(trace.calls))
    try:
        with _over_stubs(trace, levels, policy), dry_step.around(trace), quiet_gc():
            levels.counter = AllocationCounter(
                dry_step.alive(), workspace=workspace, device=trace.device_type, record_levels=True, tape=tape
            )
            with levels.counter:
                *_, held = dry_step.passes(levels.counter)
                levels.counter.reset_peak()
                tape.end_bytes = levels.counter.live_bytes
                del held
    except _StubsFallShort:
        return None
    finally:
        trace.fake_model.zero_grad()
    return tape


class _RootLevels:
    """Records allocated bytes when a block's forward and its backward start, and the peak between blocks."""

    def __init__(self, counter: AllocationCounter, chains: Sequence[tuple[int, int]]) -> None:
        self.counter, self.chains = counter, chains  # bytes of each call's own inputs and outputs
        self.forward_levels: list[int] = []
        self.backward_levels: dict[int, int] = {}
        self.loss_peak = 0

    def forward(self, call: int) -> None:
        self.forward_levels.append(self.counter.live_bytes - self.chains[call][0])
        self.counter.reset_peak()

    def backward(self, call: int) -> None:
        if not self.backward_levels:
            self.loss_peak = self.counter.peak_bytes
        self.backward_levels[call] = self.counter.live_bytes - self.chains[call][1]
        self.counter.reset_peak()


def _next_of(calls: Iterator[int]) -> int:
    """Return the number of the running call, of which there may be more than were recorded."""
    call = next(calls, None)
    if call is None and torch._C._current_graph_task_id() == -1:
        raise _StubsFallShort
    if call is None:
        raise UnsupportedModule(
            "the model calls its blocks once more in backward, as torch.utils.checkpoint does; take that out first: "
            "Jettison would recompute inside what is recomputed"
        )
    return call


@contextlib.contextmanager
def _over_stubs(trace: ModelTrace, levels: _RootLevels, policy: CheckpointPolicy) -> Iterator[None]:
    calls = iter(range(len(trace.calls)))
    names = list(dict.fromkeys(c.name for c in trace.calls))
    root = PlannedForward(trace.fake_model, "", policy, blocks=tuple(names))
    root.recordings.adopt(trace.root_signature, trace.root, checked=True)
    root.in_dry_run = True

    def stub(*args: Any, **kwargs: Any) -> Any:
        call = _next_of(calls)
        region = trace.classes[trace.calls[call].class_key].trace
        leaves, (_, described, _) = call_signature(args, kwargs)
        if len(described) != len(trace.calls[call].signature[0][1]):
            raise _StubsFallShort  # a list that the blocks fill
        held = tuple(leaves[p] for p in trace.calls[call].shared if isinstance(leaves[p], Tensor))
        levels.counter.enters(trace.calls[call].name, (args, kwargs))

        def run() -> Any:
            output = stub_outputs(region, leaves, probe=levels, call=call, held=held)
            levels.counter.leaves(output)
            return output

        return root.nested(run)

    modules = [trace.fake_model.get_submodule(name) for name in names]
    try:
        with forwards(dict.fromkeys(modules, stub)):
            yield
    finally:
        root.remove()


@contextlib.contextmanager
def _over_blocks(
    trace: ModelTrace, levels: _RootLevels, policy: Exactly, plain: Mapping[str, RegionOption]
) -> Iterator[None]:
    names = list(dict.fromkeys(c.name for c in trace.calls))
    regions = install(trace.fake_model, trace, dict.fromkeys(names, KeepAll()), policy, checked=True)
    stand_in_for_opaque(regions, trace, {c.name: plain[c.class_key] for c in trace.calls})
    calls = iter(range(len(trace.calls)))
    current: list[int] = []

    def before(_module: Any, args: Any, kwargs: Any) -> None:
        call = _next_of(calls)
        current.append(call)
        levels.forward(call)
        if call == 0:  # once the gradient of the first block's input exists, the blocks' backward is over
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _gradient: levels.counter.reset_peak())

    def after(_module: Any, _args: Any, output: Any) -> None:
        call = current.pop()
        levels.counter.reset_peak()
        first = next((t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad), None)
        if first is not None:
            first.register_hook(lambda _gradient: levels.backward(call))

    for listener in (before, after):  # guards must not take them for a change of the model
        setattr(listener, "of_a_region", True)  # noqa: B010
    modules = [trace.fake_model.get_submodule(name) for name in names]
    hooks = [m.register_forward_pre_hook(before, with_kwargs=True) for m in modules]
    hooks += [m.register_forward_hook(after) for m in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for region in reversed(regions):
            region.remove()
