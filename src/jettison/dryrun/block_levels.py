"""Memory levels of a block's call, and of the model around its blocks: bytes left allocated, and peaks of forward and
backward. Blocks that cannot run on fake tensors are observed on real ones, and stood in for when the step is dry-run.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from jettison.capture.block_stand_ins import (
    forwards,
    restored,
    run_holding_nothing,
    stand_in,
    stub_outputs,
    tensors_made,
    without_gradient_hooks,
)
from jettison.capture.dispatch import eagerly
from jettison.capture.fake_copies import roughly
from jettison.capture.isolation import without_gradients
from jettison.capture.model_trace import BlockCall, BlockClass, ModelTrace, call_model, context_of, loss_of
from jettison.capture.pytrees import tree_flatten, tree_leaves, tree_unflatten
from jettison.capture.randomness import seed_streams
from jettison.capture.recorder import TensorRef
from jettison.capture.signature import as_signed, call_signature, opaque_copy
from jettison.capture.tensor_subclasses import arrived, bytes_of, has_gradients, parts_of, plain, storage_of
from jettison.core.errors import TraceError, UnsupportedModule, WrongValue
from jettison.dryrun.counter import (
    GIVEN,
    HELD,
    RETURNED,
    STORED,
    VIEWED,
    AllocationCounter,
    CallLevels,
    IntervalLevels,
    Place,
    Role,
    RootLevels,
    Summed,
    Workspace,
    current_node,
    intervals_of,
    quiet_gc,
    static_tensors,
)
from jettison.ledger.program import Source
from jettison.runtime.callers import of_a_region
from jettison.runtime.graph_fingerprint import nodes_behind
from jettison.runtime.install import install
from jettison.runtime.offload import Group, StorageUse, flat_bytes
from jettison.runtime.planned_forward import PlannedForward
from jettison.runtime.recordings import Verdict
from jettison.runtime.witness import Check
from jettison.solve.checkpoint_policy import CheckpointPolicy, Exactly, Full, KeepAll
from jettison.solve.problem import RegionOption, RootOption


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
    summed: Summed = frozenset(),
    *,
    logs: bool = True,
) -> tuple[RegionOption, CallLevels]:
    """A block under a policy, with its program. ``summed``: gradients that are not its alone; ``logs``: log them."""
    module = trace.fake_model.get_submodule(cls.example)
    shared = {cls.trace.inputs[b.index] for b in cls.trace.program.buffers if b.index in cls.trace.inputs and b.free}
    with contextlib.ExitStack() as stack:
        stack.enter_context(context_of(trace, module))
        stack.enter_context(as_signed(cls.signature[1]))  # the model may enable autocast around its blocks
        stack.enter_context(cls.as_called())
        stack.enter_context(quiet_gc())
        region = PlannedForward(module, cls.example, policy, how=Check(trace.loop.check))
        stack.callback(region.remove)
        region.recordings.adopt(cls.signature, cls.trace, checked=True)
        region.in_dry_run = True
        hold_gradients(trace, module)
        try:
            levels, call = block_levels(
                module, (cls.args, cls.kwargs), shared, workspace, trace.device_type, summed, logs=logs
            )
        except (LookupError, AttributeError) as error:  # of code that distinguishes fake tensors from real ones
            raise TraceError(
                f"blocks like {cls.example} ran on the batch itself, and cannot run on tensors without values "
                f"({type(error).__name__}: {error}); leave them out with regions=[...]"
            ) from error
    return RegionOption(key=key, seconds=seconds, **levels._asdict()), call


def block_levels(
    module: nn.Module,
    call: tuple[Any, Any],
    shared: set[int],
    workspace: Workspace | None,
    device: str | None,
    summed: Summed = frozenset(),
    *,
    logs: bool = False,
) -> tuple[BlockLevels, CallLevels]:
    """Levels of one call of a module in its present state, on arguments like these. Leaves it without gradients."""
    leaves, spec = tree_flatten(opaque_copy(call, lambda t: t if t.grad_fn is None else t.detach().requires_grad_()))
    shared = shared - {position for what, position, *_ in summed if what == GIVEN}
    if logs:
        _take_apart(leaves, shared)
    outer = (leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i in shared)
    statics = itertools.chain(static_tensors(module), outer)
    counter = AllocationCounter(statics, workspace=workspace, device=device, record_log=logs)

    def has_returned(output: Any, call: Any) -> None:
        if not logs:
            return
        counter.watch(tree_leaves(output), (RETURNED,))
        inside: dict[int, Tensor] = {}  # of caches among the arguments
        opaque_copy(call, lambda tensor: inside.setdefault(id(tensor), tensor))
        stores.update(counter.watch([*tree_leaves(call), *inside.values()], (STORED,)))
        counter.mark(_AROUND)

    def goes_back(made: list[Tensor]) -> None:
        """One that others hold is what an argument of its shape has already, if there is any."""
        of_results = len(made) - len(later or ())
        for what, k in sorted(role for role in summed if role[0] != GIVEN and role[1] < of_results):
            same = {n for n in range(of_results, len(made)) if what == HELD and made[n].shape == made[k].shape}
            made[:] = [made[k] if n in same else gradient for n, gradient in enumerate(made)]
            made[k] = made[k].view_as(made[k]) if what == VIEWED else made[k]
            counter.watch([*[None] * k, made[k]], (what,), held=() if same else (k,))
        counter.mark(("backward", 0, True))

    stores: dict[Role, Role] = {}
    later = [role[1] for role in sorted(summed) if role[0] == GIVEN and not role[2]] if summed else None

    with counter:
        start = counter.live_bytes
        held = sum(bytes_of(p.grad) for p in module.parameters() if p.grad is not None)
        counter.reset_peak()
        given = given_to_block(leaves, shared, lambda: counter.mark(_AROUND))
        counter.watch(given, (GIVEN,), held=shared)
        box = [tree_unflatten(given, spec)]
        given.clear()
        leaves[:] = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]  # a cache stays, with what is in it
        counter.mark(("forward", 0, True))
        loss, stored = forward_alone(module, box, has_returned, goes_back, later)
        forward_peak, left = counter.peak_bytes - start, counter.live_bytes
        torch.clear_autocast_cache()
        resident = counter.live_bytes - start
        counter.reset_peak()
        before = counter.live_bytes
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), roughly(module):
            loss.backward()
        backward_peak = counter.peak_bytes - before
        del loss  # but not its storage, which the caller has
        passes = dict(intervals_of(counter.log or (), counter.live_bytes))
        module.zero_grad(set_to_none=True)
        lasting = max(0, counter.live_bytes - start + held)
        nothing = IntervalLevels((), 0, ())
        alone = CallLevels(
            forward=passes.get(("forward", 0, True), nothing),
            backward=passes.get(("backward", 0, True), nothing),
            watched_bytes=counter.watched_bytes,
            cached_bytes=left - before,
            stores=any(role[0] == STORED for role in stores.values()),
        )
        del stored
        return BlockLevels(resident, forward_peak, backward_peak, lasting), alone


_AROUND: Place = ("", -1, False)


def _take_apart(leaves: list[Any], shared: set[int]) -> None:
    """Give shared leaves storages without other references, so that their last references are seen."""
    fakes = [p for p in shared if type(leaves[p]) is FakeTensor and leaves[p].layout is torch.strided]
    refs = [TensorRef.of(storage_of(leaves[p]), leaves[p]) for p in fakes]
    made = tensors_made(refs, leaves[fakes[0]].device, like=leaves[fakes[0]]) if fakes else ()
    found = dict(zip(fakes, made, strict=True))
    uses = Counter(storage_of(leaf) for leaf in leaves if type(leaf) is Tensor)
    alone = (p for p in shared if type(leaves[p]) is Tensor and uses[storage_of(leaves[p])] == 1)
    found |= {p: leaves[p].detach().clone() for p in alone}  # values may be read
    for position, tensor in found.items():
        if tensor.stride() == leaves[position].stride():
            leaves[position] = tensor.requires_grad_(leaves[position].requires_grad)


def given_to_block(leaves: list[Any], shared: set[int], is_over: Callable[[], object] = bool) -> list[Any]:
    """Leaves like these, referenced by the call alone except shared ones. ``is_over``: called when backward arrives."""
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
        made = _FromNowhere.apply(seed, refs, trained, parts[0].device, is_over)
        for position, tensor in zip(positions, made, strict=True):
            given[position] = tensor
    return given


class _FromNowhere(torch.autograd.Function):
    """Source of tensors whose gradients are discarded."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, refs: Any, trained: list[bool], device: Any, is_over: Any) -> Any:
        ctx.is_over = is_over
        made = tensors_made(refs, device)
        for tensor in made:
            plain(tensor).normal_()
        ctx.mark_non_differentiable(*(t for t, wanted in zip(made, trained, strict=True) if not wanted))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.is_over()
        return (None,) * 5


def forward_alone(
    module: nn.Module,
    box: list[Any],
    has_returned: Callable[[Any, Any], object] = lambda *_: None,
    goes_back: Callable[[list[Tensor]], object] = id,
    later: Iterable[int] | None = None,
) -> tuple[Tensor, list[Any]]:
    """Run the block on arguments that nothing else references; return a scalar over its outputs, and tensors that it
    left in lists and dicts among its arguments. Both functions are called at the ends of its passes that they name.
    Of arguments that it returns, those at the positions ``later`` have a gradient when its backward begins, as of later
    calls; None: all have one.
    """
    args, kwargs = box.pop()
    given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
    with torch.enable_grad():
        output = module.forward(*args, **kwargs)  # as it was recorded: hooks have seen the arguments before
        has_returned(output, (args, kwargs))
        stored = [leaf for leaf in tree_leaves((args, kwargs)) if id(leaf) not in given]
        wanted = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if later is not None:
            leaves = tree_leaves((args, kwargs))
            wanted = [t for t in wanted if id(t) not in given] + [leaves[position] for position in later]
            del leaves
        # a skipped block returns its arguments, which may require no gradients
        return _ScalarOf.apply(goes_back, *wanted) if wanted else torch.zeros((), requires_grad=True), stored


class _ScalarOf(torch.autograd.Function):
    """A scalar of some tensors that saves none of them; its backward makes gradients that only the engine owns."""

    @staticmethod
    def forward(ctx: Any, goes_back: Any, *tensors: Tensor) -> Tensor:
        ctx.goes_back = goes_back
        ctx.metas = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        made = [torch.empty_strided(m[0], m[1], dtype=m[2], device=m[3]) for m in ctx.metas]
        ctx.goes_back(made)
        return None, *made


def chain_bytes(trace: ModelTrace, call: int) -> tuple[int, int]:
    """Bytes of a block call's own inputs and outputs: they are the block's, not the root's."""
    block = trace.calls[call]
    region = trace.classes[block.class_key].trace
    buffers = region.program.buffers
    inputs = sum(buffers[b].nbytes for b, p in region.inputs.items() if p not in block.shared)
    made = {r.buffer for r in region.output_leaves if isinstance(r, TensorRef) and r.buffer not in region.inputs}
    floating = {r.buffer for r in region.output_leaves if isinstance(r, TensorRef) and has_gradients(r.dtype)}
    return inputs, sum(buffers[b].nbytes for b in made & floating)


def run_step(
    trace: ModelTrace, model: nn.Module, counter: AllocationCounter, built: Callable[[Tensor], object] = id
) -> tuple[int, int, Any]:
    """Run a model's forward and backward: peak bytes, and the output if the loop has it. ``built`` gets the loss."""
    counter.reset_peak()
    counter.phase("forward", first=True)
    with torch.enable_grad():
        output = call_model(model, trace.batch)
        loss = loss_of(output, trace.loss_fn)
    built(loss)
    if not trace.loop.keep_output:
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
    """Allocate gradients that exist when forward starts: those seen ``left`` by a step. Call in the trace's context."""
    if trace.loop.gradients_preallocated:
        for parameter in module.parameters():
            held = left[parameter] if parameter in left else torch.empty_like(parameter)
            parameter.grad = held if parameter.requires_grad else None


# the model around its blocks ------------------------------------------------------------------------------------------
#
# The blocks are stubs without memory, so that all allocations are the root's. If blocks and root are entangled (the
# root reads tensors that a block left in a side list, such as router logits) a stub would leave too little; then the
# blocks run for real and their known bytes are subtracted.


class StubsFallShort(Exception):
    """A block reads tensors that another block leaves in Python's state, which stubs do not."""


def dry_run_root(
    trace: ModelTrace,
    kept: frozenset[int],
    key: str,
    seconds: float,
    workspace: Workspace | None = None,
    *,
    plain: Mapping[str, RegionOption] | None = None,
    through_blocks: bool = False,
    logs: bool = True,
) -> tuple[RootOption, RootLevels | None]:
    """Levels of everything around the blocks under one decision, and its intervals, if stubs show them. ``plain``:
    levels of each block class with everything kept; used if root and blocks are entangled, or ``through_blocks``: they
    are, although the recording does not show it.
    """
    count = len(trace.calls)
    with trace.context():
        hold_gradients(trace, trace.fake_model)
    static = static_tensors(trace.fake_model, trace.batch)
    counter = AllocationCounter(static, workspace=workspace, device=trace.device_type, record_log=logs)
    levels = RootProbe(counter, [chain_bytes(trace, i) for i in range(count)])
    policy = Exactly(trace.root.program.digest(), kept, KeepAll())
    # whether the root reads tensors that reached it other than as a block's output
    entangled = any(b.source is Source.OUTER and b.index not in trace.root.made for b in trace.root.program.buffers)
    real = plain if through_blocks or entangled else None  # blocks that run instead of stubs
    held, gradients = [0] * count, [0] * count
    if real is not None:
        held = [real[call.class_key].resident_bytes for call in trace.calls]
        for number, name in enumerate(call.name for call in trace.calls):
            if not trace.loop.gradients_preallocated and all(call.name != name for call in trace.calls[:number]):
                trained = (p for p in trace.fake_model.get_submodule(name).parameters() if p.requires_grad)
                gradients[number] = sum(p.nbytes for p in trained)
    setting = over_stubs(trace, levels, policy) if real is None else _over_blocks(trace, levels, policy, real)
    try:
        with setting, trace.context(), quiet_gc(), counter:
            base = counter.live_bytes
            *_, output = run_step(trace, trace.fake_model, counter, levels.built)
            tail = counter.peak_bytes
            intervals = tuple(intervals_of(counter.log or (), counter.live_bytes))
            del output
    except StubsFallShort as error:
        if real is not None or plain is None:
            raise UnsupportedModule(
                "the forward calls its blocks more often in a dry run than when it was recorded: it goes by state that "
                "is not put back in between. Hold that state in attributes of the model or of the batch"
            ) from error
        return dry_run_root(trace, kept, key, seconds, workspace, plain=plain, through_blocks=True, logs=logs)
    finally:
        trace.fake_model.zero_grad(set_to_none=True)
    if real is not None and len(levels.forward_levels) < count:  # a block's forward was called past its hooks
        return dry_run_root(trace, kept, key, seconds, workspace, logs=logs)
    before = [0, *accumulate(held)]  # held by the blocks before this one
    after = [sum(gradients[i + 1 :]) for i in range(count)]
    if not levels.backward_levels:  # no blocks: everything happens around them
        levels.loss_peak = tail
    option = RootOption(
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
    if real is not None or not logs:
        return option, None
    return option, RootLevels(
        intervals=intervals,
        touched=levels.touched,
        summed=levels.summed(trace.calls),
        watched_bytes=counter.watched_bytes,
    )


class RootProbe:
    """Records allocated bytes when a block's forward and its backward start, and the peak between blocks."""

    def __init__(self, counter: AllocationCounter, chains: Sequence[tuple[int, int]]) -> None:
        self.counter, self.chains = counter, chains  # bytes of each call's own inputs and outputs
        self.touched: list[dict[Role, Role]] = []
        self.edges: list[dict[tuple[int, int], int]] = []  # by call: where gradients of arguments go
        self.givers: dict[tuple[int, int], list[int]] = defaultdict(list)  # numbers of nodes that give gradients there
        self.nodes: dict[int, int] = {}  # of calls
        self.held: dict[int, Callable[[], None]] = {}
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

    def stubs_backward(self, call: int, came: tuple[Any, ...], gradients: Callable[[], list[Any]]) -> list[Any]:
        for k, gradient in enumerate(g for g in came if g is not None):
            what = VIEWED if gradient._is_view() else HELD
            if what == VIEWED or gradient._use_count() > 1:
                self.touched[call] |= self.counter.watch([*[None] * k, gradient], (call, what))
        self.counter.mark(("backward", call, True))
        self.backward(call)
        self.held.pop(call)()
        self.nodes[call] = current_node()
        made = gradients()
        self.counter.mark_after_node(("backward", call, False))
        return made

    def given(self, call: int, leaves: Sequence[Any], shared: Iterable[int]) -> None:
        """A stub is called."""
        self.counter.mark(("forward", call, True))
        self.touched.append(self.counter.watch(leaves, (call, GIVEN)))
        shared = shared if self.chains[call][1] else ()  # a call that makes nothing has no backward to let go in
        self.held[call] = self.counter.hold(leaves[p] for p in shared if isinstance(leaves[p], Tensor))
        nodes = ((p, leaf, leaf.grad_fn) for p, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        self.edges.append({(n._sequence_nr(), leaf.output_nr): p for p, leaf, n in nodes if n is not None})

    def built(self, loss: Tensor) -> None:
        """Note which nodes give gradients to which others."""
        for node in nodes_behind([loss]):
            for after, n in node.next_functions:
                if after is not None:
                    self.givers[after._sequence_nr(), n].append(node._sequence_nr())

    def summed(self, calls: Sequence[BlockCall]) -> list[Summed]:
        found = []
        for number, (call, edges, touched) in enumerate(zip(calls, self.edges, self.touched, strict=True)):
            returned = {role for (what, _), role in touched.items() if what == RETURNED}
            label = {role for role in touched if role[0] in (HELD, VIEWED)}
            for edge, p in edges.items():
                givers = self.givers[edge]
                if p in call.shared or touched.get((GIVEN, p)) in returned or len(givers) > 1:
                    label.add((GIVEN, p, self.nodes.get(number, -1) >= max(givers, default=0)))
            found.append(frozenset(label))
        return found


def _next_of(calls: Iterator[int]) -> int:
    """Return the number of the running call, of which there may be more than were recorded."""
    if (call := next(calls, None)) is not None:
        return call
    if torch._C._current_graph_task_id() == -1:
        raise StubsFallShort
    raise UnsupportedModule(
        "the model calls its blocks once more in backward, as torch.utils.checkpoint does; take that out first: "
        "Jettison would recompute inside what is recomputed"
    )


@contextlib.contextmanager
def over_stubs(trace: ModelTrace, levels: RootProbe, policy: CheckpointPolicy) -> Iterator[None]:
    calls = iter(range(len(trace.calls)))
    names = list(dict.fromkeys(c.name for c in trace.calls))
    root = PlannedForward(trace.fake_model, "", policy, blocks=tuple(names))
    root.recordings.adopt(trace.root_signature, trace.root, checked=True)
    root.in_dry_run = True

    def stub(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        call = _next_of(calls)
        region = trace.classes[trace.calls[call].class_key].trace
        leaves, (_, described, _) = call_signature(args, kwargs)
        if len(described) != len(trace.calls[call].signature[0][1]):
            raise StubsFallShort  # a list that the blocks fill
        levels.given(call, leaves, trace.calls[call].shared)

        def run() -> Any:
            levels.forward(call)
            output = stub_outputs(region, leaves, probe=levels.stubs_backward, call=call)
            levels.touched[call] |= levels.counter.watch(tree_leaves(output), (call, RETURNED))
            levels.counter.mark(("forward", call, False))
            return output

        return root.nested(run)

    try:
        with forwards({m: partial(stub, m.forward) for m in map(trace.fake_model.get_submodule, names)}):
            yield
    finally:
        root.remove()


@contextlib.contextmanager
def _over_blocks(
    trace: ModelTrace, levels: RootProbe, policy: Exactly, plain: Mapping[str, RegionOption]
) -> Iterator[None]:
    names = list(dict.fromkeys(c.name for c in trace.calls))
    regions = install(trace.fake_model, trace, dict.fromkeys(names, KeepAll()), policy, checked=True)
    stand_in_for_opaque(regions, trace, {c.name: plain[c.class_key] for c in trace.calls})
    calls = iter(range(len(trace.calls)))

    def before(_module: Any, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        call = _next_of(calls)
        levels.forward(call)
        if call == 0:  # once the gradient of the first block's input exists, the blocks' backward is over
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _gradient: levels.counter.reset_peak())

    def after(_module: Any, _args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        call = len(levels.forward_levels) - 1
        levels.counter.reset_peak()
        first = next((t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad), None)
        if first is not None:
            first.register_hook(lambda _gradient: levels.backward(call))

    with contextlib.ExitStack() as stack:
        for region in regions:
            stack.callback(region.remove)
        for module in map(trace.fake_model.get_submodule, names):
            stack.callback(module.register_forward_pre_hook(of_a_region(before), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(of_a_region(after)).remove)
        yield


# blocks that cannot run on fake tensors: observed on real ones, and stood in for --------------------------------------

RANDOM_RUNS = 4


def observe_block(trace: ModelTrace, cls: BlockClass, workspace: Workspace | None) -> tuple[RegionOption, RegionOption]:
    """Levels of a block that cannot be recorded, kept whole and checkpointed whole, on real tensors.

    Its shapes may depend on values. So it runs on several random arguments, and on arguments whose every row is the
    same, which a router sends all to the same experts; the levels are the highest, and as much more as they differ by.
    The same block has the same levels whenever it is asked. Parameters, gradients, buffers and generators stay.
    """
    assert trace.real is not None
    module = trace.real.get_submodule(cls.example)
    leaves, spec = tree_flatten((cls.args, cls.kwargs))
    shared = set(next(c.shared for c in trace.calls if c.class_key == cls.key))
    found: list[RegionOption] = []
    with restored(module, leaves), without_gradients(module), without_gradient_hooks(module), quiet_gc(), eagerly():
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
                    for parameter in module.parameters():
                        held = trace.loop.gradients_preallocated and parameter.requires_grad
                        parameter.grad = torch.empty_like(parameter) if held else None
                    levels.append(block_levels(module, call, shared, workspace, trace.device_type)[0])
            except WrongValue:  # what its trial did not show: a real step would stop
                cls.verdict = Verdict(rerun=False, why="a second run of its forward gives other values")
                found.append(replace(found[0], key=key))
                continue
            finally:
                region.remove()
            highest = BlockLevels(*(2 * max(n) - min(n) for n in zip(*levels, strict=True)))
            found.append(RegionOption(key=key, seconds=seconds if key == "full" else 0.0, **highest._asdict()))
    return found[0], found[1]


def _alike(leaf: Any) -> Any:
    """The argument with its first row in every row."""
    if not isinstance(leaf, Tensor) or not has_gradients(leaf.dtype) or leaf.dim() < 2 or not leaf.numel():
        return leaf
    same = leaf.detach().clone(memory_format=torch.preserve_format)
    return same.copy_(leaf.detach()[(0,) * (leaf.dim() - 1)]).requires_grad_(leaf.requires_grad)


class StandIn:
    """Forward in place of a block that cannot run on fake tensors: it allocates and offloads the observed bytes."""

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
        self.lasting = self.blob(self.levels.lasting_bytes)  # in a cache, say, that the output of the model has
        held = self.blob(self.levels.resident_bytes - self.levels.lasting_bytes)
        group = self.planned.begin_group(moves=False) if self.compiled else None
        call = _StandInCall(self, held, group)
        made = [self.blob(sent.nbytes) for sent in self.levels.sent if sent.place is None]
        there = self.levels.resident_bytes + sum(t.nbytes for t in made)
        self.blob(self.levels.forward_peak_bytes - there - self.own[0])
        output = stub_outputs(self.region, leaves, probe=call.backward, held=shared)
        if group is not None:
            ends = leaves, tree_leaves(output)
            for sent in self.levels.sent:  # in their order: tensors of its own, arguments, results
                tensor = made.pop(0) if sent.place is None else ends[sent.place[0]][sent.place[1]]
                if sent.place is None or not tensor.is_leaf:  # tensors with other references stay
                    part = arrived(tensor)
                    call.moved.append(group.engine.send(flat_bytes(part, 0, part.untyped_storage().nbytes()), group))
            group.end()
        return output

    def blob(self, nbytes: int) -> Tensor:
        # a type that has gradients: integers without a fake argument are real (`RealUntilFake`), and would take memory
        return torch.empty(max(0, nbytes), dtype=torch.float8_e4m3fn, device=self.device)


class _StandInCall:
    """One call of a stand-in, between its forward and its backward."""

    def __init__(self, of: StandIn, held: Tensor, group: Group | None) -> None:
        self.of, self.held, self.group = of, [held], group
        self.moved: list[StorageUse] = []
        self.trained = [p for p in of.module.parameters() if p.requires_grad]

    def backward(self, _call: int, _came: Any, gradients: Callable[[], list[Any]]) -> list[Any]:
        if self.group is not None:
            self.group.asked()
        came = [moved.open() for moved in self.moved]
        self.moved.clear()
        self.of.blob(self.of.levels.backward_peak_bytes - self.of.own[1])
        self.held.clear()  # its peak counts what is still held when it comes: gradients do not come on top of all of it
        for p in self.trained:  # as they were in the forward: under FSDP unsharded ones
            if p.grad is None:
                p.grad = torch.empty_like(p)
        del came
        return gradients()


def stand_in_for_opaque(
    regions: Iterable[PlannedForward], trace: ModelTrace, levels: Mapping[str, RegionOption]
) -> None:
    """Context in which blocks that cannot run on fake tensors, or run compiled, allocate their observed ``levels``."""
    stood_in = {c.name for c in trace.calls if trace.classes[c.class_key].stood_in}
    for region in regions:
        if region.name in stood_in and region.name in levels:
            region.forward = StandIn(trace, region, levels[region.name])
            region.put_plan(replace(region.plan, policy=KeepAll()))
