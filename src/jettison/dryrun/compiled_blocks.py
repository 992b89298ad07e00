"""Compiled blocks, compiled and measured: the buffers that a policy can choose from, and bytes and seconds per choice.

A compiled block has no ops that a dry run could follow: Inductor decides which buffers its wrapper allocates, reuses
and frees, depending on fusion. So every choice is compiled once for each class of blocks and run on real tensors like
those of the step; its bytes are the allocator's, its seconds the minimum of several runs that alternate with the other
choices. The block that runs is a copy with the model's parameters: gradients, buffers and random numbers stay.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jettison.capture.block_stand_ins import stand_in
from jettison.capture.fsdp2 import left_of_fsdp
from jettison.capture.model_trace import BlockClass, CompiledProgram, CompileSettings, ModelTrace
from jettison.capture.pytrees import tree_flatten, tree_leaves, tree_unflatten
from jettison.capture.randomness import forked_streams
from jettison.capture.signature import as_signed, opaque_copy
from jettison.capture.tensor_subclasses import plain
from jettison.core.errors import TraceError
from jettison.core.progress import Progress
from jettison.dryrun.block_levels import BlockLevels, forward_alone, given_to_block
from jettison.dryrun.counter import allocation_deltas, quiet_gc
from jettison.runtime.compiled_regions import compiled, first_lines, kept_buffers, looking, one_graph
from jettison.solve.checkpoint_policy import CheckpointPolicy, KeepAll
from jettison.solve.problem import OffloadedTensor, RegionOption

WARM_UPS = 2  # the first compiles, the second fills caches of libraries
ROUNDS = 5
TIMED_SECONDS = 4.0  # for all choices together: short ones are repeated more often, as they vary more
MOST_ROUNDS = 40
NOISE = 0.03  # of the minimum of some rounds, on a machine that others use
LEAST_SECONDS = 1e-9  # of a choice that keeps less, so that more is kept if it is as fast

Run = Callable[[], None]


class MeasuredChoice(NamedTuple):
    """Levels of one call, seconds of its forward and backward, and, by buffer, what could be offloaded."""

    levels: BlockLevels
    seconds: float
    saved: Mapping[int, OffloadedTensor] = MappingProxyType({})


def survey(trace: ModelTrace, cls: BlockClass, settings: CompileSettings) -> CompiledProgram:
    """Inductor's program of a block before it chooses what to save; a `TraceError` if torch finds no single graph."""
    from torch._inductor.compile_fx import compile_fx

    from jettison.runtime.compiled_partition import Partition, watching_splits

    def split_only(graph: Any, inputs: Any) -> Any:  # a new function each time: dynamo's cache must not have it
        patches = {**dict(settings.options), "custom_partitioner_fn": Partition(KeepAll())}
        return compile_fx(graph, inputs, inner_compile=_uncompiled, config_patches=patches)

    with watching_splits() as seen, _alone(trace), torch._functorch.config.patch(enable_autograd_cache=False):
        block = _CompiledBlock(trace, cls)
        block.module.forward = one_graph(block.module.forward, backend=split_only)
        try:
            block.run()
        except Exception as error:  # dynamo, Inductor or the block may raise anything
            raise TraceError(first_lines(error)) from error
    if len(seen) != 1:
        raise TraceError(f"{len(seen)} graphs with a backward came of it; expected one")
    return CompiledProgram(program=seen[0].program, default=seen[0].kept, settings=settings)


_MEASURED: dict[Any, MeasuredChoice] = {}
"""Measured choices of this process: the same choice always has the same levels."""


def measure_choices(
    trace: ModelTrace, cls: BlockClass, choices: Mapping[str, CheckpointPolicy], progress: Progress, *, may_move: bool
) -> dict[str, MeasuredChoice]:
    """Levels of each choice for a class of compiled blocks, by its key. ``may_move``: saved tensors pass hooks."""
    assert cls.compiled is not None
    shared = frozenset(next(c.shared for c in trace.calls if c.class_key == cls.key))
    here = trace.root_signature[1], torch.get_num_threads(), trace.loop.gradients_preallocated, trace.device_type
    what = cls.compiled.program.digest(), cls.compiled.settings, may_move, here, shared
    missing = {key: policy for key, policy in choices.items() if (what, policy) not in _MEASURED}
    if missing:
        with _alone(trace):
            found = _measured(trace, cls, missing, progress, may_move)
        _MEASURED.update(((what, missing[key]), levels) for key, levels in found.items())
    return {key: _MEASURED[what, policy] for key, policy in choices.items()}


def _measured(
    trace: ModelTrace, cls: BlockClass, choices: Mapping[str, CheckpointPolicy], progress: Progress, may_move: bool
) -> dict[str, MeasuredChoice]:
    assert cls.compiled is not None
    block = _CompiledBlock(trace, cls)
    own, settings = block.module.forward, cls.compiled.settings
    forwards = {key: compiled(own, settings, policy, says=may_move) for key, policy in choices.items()}
    saved: dict[str, Mapping[int, OffloadedTensor]] = {}
    levels: dict[str, BlockLevels] = {}
    for number, (key, forward) in enumerate(forwards.items(), 1):
        progress(f"compiling blocks like {cls.example}: way {number} of {len(forwards)}")
        block.module.forward = forward
        for _ in range(WARM_UPS):
            block.run()
        saved[key] = block.saved() if may_move else {}
        with kept_buffers() if may_move else contextlib.nullcontext():
            levels[key] = block.levels()
    progress(f"timing blocks like {cls.example}")
    seconds = dict.fromkeys(forwards, float("inf"))  # the minimum of each, in turn
    began = time.perf_counter()
    for done in range(MOST_ROUNDS):
        if done >= ROUNDS and time.perf_counter() - began > TIMED_SECONDS:
            break
        for key, forward in forwards.items():
            block.module.forward = forward
            seconds[key] = min(seconds[key], block.seconds())
    return {key: MeasuredChoice(levels[key], seconds[key], saved[key]) for key in forwards}


class _CompiledBlock:
    """A block on real tensors, with arguments like those of a step."""

    def __init__(self, trace: ModelTrace, like: BlockClass) -> None:
        leaves, spec = tree_flatten((like.args, like.kwargs))
        self.module = _copy_of(trace, like.example)
        self.call = opaque_copy(tree_unflatten([stand_in(leaf) for leaf in leaves], spec), stand_in)
        self.shared = {p for c in trace.calls if c.class_key == like.key for p in c.shared}
        self.device, self.held = trace.device_type, trace.loop.gradients_preallocated

    def run(self) -> None:
        for phase in self._phases():
            phase()

    def saved(self) -> dict[int, OffloadedTensor]:
        """Tensors that a forward saves and that could be offloaded."""
        leaves, spec = tree_flatten(opaque_copy(self.call))
        given = given_to_block(leaves, self.shared)
        held = (leaf for p, leaf in enumerate(given) if isinstance(leaf, Tensor) and (p in self.shared or leaf.is_leaf))
        alive = [*self.module.parameters(), *self.module.buffers(), *held]
        args, kwargs = tree_unflatten(given, spec)
        with looking() as found, torch.enable_grad():
            output = self.module.forward(*args, **kwargs)
        return found.alone(alive, given, tree_leaves(output))

    def seconds(self) -> float:
        """Seconds of a forward and a backward; on one thread its CPU time, which other processes do not lengthen."""
        clock = time.thread_time if self.device is None and torch.get_num_threads() == 1 else time.perf_counter
        forward, backward, end = self._phases()
        self._wait()
        began = clock()
        forward()
        backward()
        self._wait()
        took = clock() - began
        end()
        return took

    def levels(self) -> BlockLevels:
        with quiet_gc():
            (resident, forward_peak), (freed, backward_peak), (left, _) = map(self._during, self._phases())
        return BlockLevels(resident, forward_peak, backward_peak, max(0, resident + freed + left))

    def _phases(self) -> tuple[Run, Run, Run]:
        """The phases of a run: forward, backward, and the end, after which only lasting bytes are left."""
        leaves, spec = tree_flatten(opaque_copy(self.call))
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter) if self.held and parameter.requires_grad else None
        state: list[Any] = []

        def forward() -> None:
            box = [tree_unflatten(given_to_block(leaves, self.shared), spec)]
            state.extend(forward_alone(self.module, box))

        def backward() -> None:
            state[0].backward()
            state[0] = None

        def end() -> None:
            if not self.held:
                self.module.zero_grad(set_to_none=True)

        return forward, backward, end

    def _during(self, run: Run) -> tuple[int, int]:
        """Bytes that a phase leaves allocated, and its peak."""
        if self.device is None:
            live = peak = 0
            for delta in allocation_deltas(run):
                live += delta
                peak = max(peak, live)
            return live, peak
        self._wait()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        self._wait()
        return torch.cuda.memory_allocated() - base, torch.cuda.max_memory_allocated() - base

    def _wait(self) -> None:
        if self.device is not None:
            torch.accelerator.synchronize()


@contextlib.contextmanager
def _alone(trace: ModelTrace) -> Iterator[None]:
    """Set the switches of the trace; random generators are restored afterwards."""
    with forked_streams(), as_signed(trace.root_signature[1]), torch.enable_grad():
        yield


def _copy_of(trace: ModelTrace, name: str) -> nn.Module:
    """The block with the model's own parameters, with gradients of their own, and copies of its buffers; or made up."""
    fake = trace.fake_model.get_submodule(name)

    def tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
        named = module.named_parameters, module.named_buffers
        return [pair for of_kind in named for pair in of_kind(remove_duplicate=False)]

    real = dict(tensors(trace.real.get_submodule(name))) if trace.real is not None else {}
    memo: dict[int, Any] = {id(left): left for left in left_of_fsdp(fake)}
    for key, tensor in tensors(fake):
        theirs = real.get(key)
        if theirs is None or plain(theirs) is not theirs or theirs.shape != tensor.shape:
            made = stand_in(tensor).detach()
        else:
            made = theirs.detach() if isinstance(tensor, nn.Parameter) else theirs.detach().clone()
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    return copy.deepcopy(fake, memo)


def _uncompiled(graph: Any, inputs: Any, **how: Any) -> Any:
    """Replacement of Inductor's compiler of one graph."""

    def boxed(given: list[Any]) -> Any:
        values = list(given)
        given.clear()
        return graph(*values)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def seconds_of_levels(levels: Mapping[str, MeasuredChoice]) -> dict[str, float]:
    """Seconds of a forward and a backward, by choice, from the fewest bytes on. ``levels`` come in that order.

    Timings vary: a choice that keeps less only counts as faster if it is so by more than `NOISE`. (Reading masks and
    sums from memory can cost more than recomputing them.) Choices with equal bytes, for which Inductor made the same
    code, are as fast as the fastest.
    """
    fastest: dict[tuple[int, ...], float] = {}
    for level in levels.values():
        fastest[level.levels] = min(level.seconds, fastest.get(level.levels, level.seconds))
    found: dict[str, float] = {}
    before = 0.0
    for key, level in reversed(list(levels.items())):
        own = fastest[level.levels]
        before = own if own < (1 - NOISE) * before else max(own, before + LEAST_SECONDS)
        found[key] = before
    return dict(reversed(found.items()))


def options_of_levels(levels: Mapping[str, MeasuredChoice]) -> tuple[RegionOption, ...]:
    """Options for the solver, with seconds in excess of the fastest choice."""
    seconds = seconds_of_levels(levels)
    least = min(seconds.values())
    return tuple(RegionOption(key=k, seconds=seconds[k] - least, **one.levels._asdict()) for k, one in levels.items())
