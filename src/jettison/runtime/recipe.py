"""Recipes: the tensors that a region keeps, and the recomputation of all others.

NOTE [ Ownership ]
Nothing global owns a tensor. A kept slot owns its tensor, as in plain autograd. A dropped slot leaves a handle in the
graph; the handle owns exactly the boxes (kept values, inputs, random states) that its recipe reads. Recomputed values
live in their frame until the last use; the frame is owned by its handles. When autograd releases a saved tensor its
handle is freed, and with the last handle everything else.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Final, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from jettison.capture.op_traits import is_collective, sees_modes
from jettison.capture.randomness import ADVANCE
from jettison.capture.recorder import RecordedOp, RegionTrace, Tap, TensorRef
from jettison.capture.signature import Switches
from jettison.ledger.program import Buffer, Program, Source
from jettison.runtime.lossless_packing import Pack, packs_of
from jettison.runtime.offloaded_ranges import BufferRange, moves_of
from jettison.runtime.views import Within, within
from jettison.runtime.witness import Cut, SamplePositions, spots_of

AWAY: Final = frozenset({"drop", "offload", "pack"})  # kinds of slots that leave a handle in place of their tensor


@dataclass(eq=False)
class SlotAction:
    """Treatment of one saved slot: ``parameter`` (passed through), ``keep``, ``drop``, ``pack`` or ``offload``."""

    kind: str
    ref: TensorRef
    parameter: str = ""
    boxes: tuple[
        int, ...
    ] = ()  # box numbers that a dropped slot's recipe reads, or that holds the offloaded or packed value
    view: TensorRef | None = None  # the slot's view of the unpacked value; None if they are equal
    fill: int | None = None  # number of the box that this slot fills
    cast: str = ""  # name of the parameter that autocast has cast to it
    unwritten: bool = False  # never written: uninitialized bits, which cannot be compared
    closure: int = 0  # number of ``boxes`` among the different ones of the recipe
    cell: int | None = None  # index of its buffer in a frame's tables, if this slot leaves the buffer's witness

    @cached_property
    def spots(self) -> SamplePositions:
        return spots_of(tuple(self.ref.size), tuple(self.ref.stride))


Expected: TypeAlias = tuple[Callable[[Tensor], bool], Cut | None, str | None, SlotAction | None, int | None, int | None]
"""Expectation of a slot: whether a tensor is like the last one, and how to read its witness in place; parameter name;
action if it is dropped; box that it fills; `SlotAction.cell`."""


@dataclass(slots=True)
class RecipeStep:
    """One op to recompute, with a list of its arguments, or of all their leaves if tensors are nested in them."""

    func: Callable[..., Any]
    leaves: list[Any]
    spec: Any  # tree of the arguments; None if the leaves are the positional ones
    named: dict[str, Any]  # then the keyword arguments, none of which is a tensor
    tensors: list[tuple[int, int, TensorRef | None]]  # (position, buffer, view to take or None)
    outputs: list[tuple[int, int]]  # (flat output position, buffer), of those that are needed
    written: list[tuple[tuple[int, ...], int, int]]  # (positions of the old buffer's views, it, the new buffer)
    consumes: tuple[int, ...]
    state_in: int | None
    state_out: int | None
    device: str
    waits: bool = False  # a collective: its results are waited for
    under: Switches | None = None  # kernel switches that the forward itself had set
    into: int | None = None  # position of the argument whose memory takes the result; nothing else reads that
    needs: tuple[tuple[int, int], ...] = ()  # (buffer, op that makes it) of earlier results, random states included

    def arguments(self, leaves: list[Any]) -> tuple[Any, dict[str, Any]]:
        """Return positional and keyword arguments."""
        if self.spec is None:
            return leaves, self.named
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


def arguments_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any, dict[str, Any]]:
    """``leaves``, ``spec`` and ``named`` of the step of a recorded call."""
    nested = [arg for arg in args if isinstance(arg, list | tuple | dict)]
    if any(isinstance(leaf, TensorRef) for leaf in tree_leaves((nested, kwargs))):
        leaves, spec = tree_flatten((args, kwargs))
        return leaves, spec, {}
    return list(args), None, dict(kwargs)


@dataclass(kw_only=True)
class Recipe:
    """A region's program under one decision, ready to run."""

    trace: RegionTrace
    program: Program  # the trace's at compile time: a later anchor replaces it
    kept: frozenset[int]
    makers: dict[int, int]  # recomputed buffer -> op index
    counts: dict[int, int]
    boxes: list[int]  # box number -> buffer
    box_of: dict[int, int]
    parameters: dict[int, str]  # buffers that recipes read by name
    recomputed_ops: tuple[int, ...]
    moved: dict[int, BufferRange] = field(default_factory=dict)  # kept buffers that are offloaded
    packed: dict[int, Pack] = field(default_factory=dict)  # kept buffers that are packed
    slots: list[SlotAction] = field(default_factory=list)
    steps: dict[int, RecipeStep] = field(default_factory=dict)  # by op index
    from_inputs: list[tuple[int, int]] = field(default_factory=list)  # (box, leaf position)
    from_taps: list[tuple[int, Tap]] = field(default_factory=list)
    from_blocks: dict[tuple[int, int], int] = field(default_factory=dict)  # (nested call, output leaf) -> box
    state_boxes: list[tuple[int, str]] = field(default_factory=list)  # (box, device)
    links: dict[int, int] = field(default_factory=dict)  # input buffer -> box of the block before's output handle
    handed: dict[int, SlotAction] = field(default_factory=dict)  # output leaf -> its recomputation for the next block
    sources: dict[int, TensorRef] = field(default_factory=dict)  # buffer -> view of it that its op returns
    closures: list[tuple[int, ...]] = field(default_factory=list)  # the different boxes of slots
    cells: dict[int, int] = field(default_factory=dict)  # counted buffer -> its index in a frame's tables
    witnessed: dict[int, int] = field(default_factory=dict)  # cell -> the slot that leaves a witness of the buffer

    def held_bytes(self, *, moves: bool = True) -> int:
        """Bytes on the device between forward and backward; without ``moves``, offloaded buffers included."""
        whole = self.kept - self.packed.keys() - (self.moved.keys() if moves else set())
        return self.trace.program.kept_bytes(whole) + sum(pack.nbytes for pack in self.packed.values())

    @cached_property
    def host_bytes(self) -> int:
        return sum(move.host_bytes for move in self.moved.values())

    @cached_property
    def is_needed(self) -> bool:
        """Whether backward depends on it; not if everything that autograd saves is kept."""
        return bool(self.handed) or any(slot.kind in AWAY for slot in self.slots)

    @cached_property
    def expected(self) -> list[Expected | None]:
        """By slot, the quick path of `Frame.pack`; None before its first tensor, and where it cannot be taken."""
        return [None] * len(self.slots)

    @cached_property
    def sees_modes(self) -> bool:
        return any(sees_modes(call.func) for call in self.trace.calls)


def expected_of(slot: SlotAction, tensor: Tensor) -> Expected | None:
    """Expect tensors like this one in a slot; None if they are offloaded, packed, or wrapped. One call into C compares
    class, dtype, device, shape, strides and dispatch keys, of which some are set in conjugate and negative views.
    """
    ref = slot.ref
    if ref.wrap is not None or ref.conj or ref.neg or slot.cast or slot.kind not in ("keep", "parameter", "drop"):
        return None
    size, stride = list(tensor.shape), list(tensor.stride())
    like = torch._C._dynamo.guards.TensorGuards(tensor, dynamic_dims_sizes=[size], dynamic_dims_strides=[stride])
    cut = slot.spots.cut(ref.dtype) if tensor.is_cpu and not tensor.is_neg() else None
    reads = cut if cut is not None and cut[-2] else None
    return like.check, reads, slot.parameter or None, slot if slot.kind == "drop" else None, slot.fill, slot.cell


def shared_recipe(trace: RegionTrace, kept: frozenset[int], **more: frozenset[int]) -> Recipe:
    """Share one recipe among regions with one recording and decision: fewer cache misses. See `compile_recipe`."""
    known: WeakValueDictionary[Any, Recipe] = vars(trace).setdefault("_recipes", WeakValueDictionary())
    key = (kept, tuple(sorted(more.items())))
    found = known.get(key)
    if found is None or found.program is not trace.program:
        found = known[key] = compile_recipe(trace, kept, **more)
    return found


def compile_recipe(
    trace: RegionTrace,
    kept: frozenset[int],
    *,
    linked: frozenset[int] = frozenset(),
    handed: frozenset[int] = frozenset(),
    offloaded: frozenset[int] = frozenset(),
    packed: frozenset[int] = frozenset(),
) -> Recipe:
    """Compile a decision into actions. Raise `ValueError` if a saved buffer can be neither kept nor recomputed (from
    `Program.recompute_set`).

    Args:
        kept: buffers held between forward and backward. Free buffers (parameters, shared inputs) need not be named.
        linked: leaf positions of inputs that the block before recomputes, so that this one need not keep them.
        handed: output leaves that the next block gets in the same way. Those that cannot be recomputed are omitted, and
            the next block keeps them.
        offloaded: those of ``kept`` to offload. Buffers that cannot move stay.
        packed: of the others, those to pack. Buffers that packing would change stay unpacked.
    """
    program = trace.program
    links = {b for b, position in trace.inputs.items() if position in linked}
    kept = kept - links
    asked = {
        leaf: ref
        for leaf, ref in enumerate(trace.output_leaves)
        if leaf in handed
        and isinstance(ref, TensorRef)
        and (ref.buffer in links or program.buffers[ref.buffer].producer is not None)
        and program.can_compute(ref.buffer, kept | links)
    }
    again = program.recompute_set(kept | links, also=frozenset(ref.buffer for ref in asked.values()))
    again, givers = without_idle_moves(trace, again, kept)
    makers = {b: i for i in again for b in program.ops[i].outputs} | givers
    makers = {b: i for b, i in makers.items() if b not in kept}
    reads = [b for i in again for b in program.ops[i].inputs]
    uses = Counter([*reads, *(ref.buffer for ref in (*trace.slots, *asked.values()))])
    parameters = {
        b: trace.names[b] for b in set(reads) - makers.keys() if program.buffers[b].source is Source.PARAMETER
    }
    views = _views_read(trace, again) if offloaded or packed else {}
    written = frozenset(old for call in trace.calls for old, _ in call.written) | trace.written_later
    moved = moves_of(trace, offloaded & kept, reads=views, written=written)
    packs = packs_of(trace, packed & kept - moved.keys(), reads=views, written=written)
    boxes = sorted(set(reads) - makers.keys() - parameters.keys() | links | moved.keys() | packs.keys())
    box_of = {b: n for n, b in enumerate(boxes)}
    recipe = Recipe(
        trace=trace,
        program=program,
        kept=kept,
        makers=makers,
        counts={b: uses[b] for b in (*makers, *links, *moved, *packs)},
        boxes=boxes,
        box_of=box_of,
        parameters=parameters,
        recomputed_ops=again,
        moved=moved,
        packed=packs,
        links={b: box_of[b] for b in links},
    )
    _fill(recipe, asked)
    return recipe


def without_idle_moves(
    trace: RegionTrace, again: tuple[int, ...], kept: frozenset[int]
) -> tuple[tuple[int, ...], dict[int, int]]:
    """Ops to recompute, except those that advance a random state to where another of them leaves it in time; and for
    each state that none of the rest produces, the op that leaves it.

    In time: the reader of that state has a tensor argument that needs the op which draws. Arguments are computed before
    the state is read, so that op has run by then, whatever the order of unpacking.

    Args:
        again: `Program.recompute_set`, in order.
        kept: buffers at which the search for an argument's ops ends.
    """
    program = trace.program
    moves = [i for i in again if program.ops[i].name == ADVANCE]
    draws = {trace.calls[i].state_out: i for i in again if i not in moves and trace.calls[i].state_in is not None}
    left = set(again)
    givers: dict[int, int] = {}
    for move in reversed(moves):
        state = program.ops[move].outputs[0]
        draw = draws.get(state)
        if draw is None:
            continue
        readers = [i for i in left if state in program.ops[i].inputs]
        if all(draw in _before(trace, reader, left, kept) for reader in readers):
            left.discard(move)
            givers[state] = draw
    return tuple(i for i in again if i in left), givers


def _before(trace: RegionTrace, op: int, again: set[int], kept: frozenset[int]) -> set[int]:
    """Recomputed ops that produce the arguments of one op, random states aside."""
    program = trace.program
    found: set[int] = set()
    stack = [op]
    while stack:
        i = stack.pop()
        for b in program.ops[i].inputs:
            producer = program.buffers[b].producer
            if b in kept or b == trace.calls[i].state_in or producer not in again or producer in found:
                continue
            found.add(producer)
            stack.append(producer)
    return found


def _views_read(trace: RegionTrace, again: tuple[int, ...]) -> dict[int, list[TensorRef]]:
    """By buffer, the views that recomputed ops read."""
    found: dict[int, list[TensorRef]] = {}
    for i in again:
        for leaf in tree_leaves((trace.calls[i].args, trace.calls[i].kwargs)):
            if isinstance(leaf, TensorRef):
                found.setdefault(leaf.buffer, []).append(leaf)
    return found


def _fill(recipe: Recipe, asked: dict[int, TensorRef]) -> None:
    """Fill a recipe: recomputed ops, slots, and each box's source: an input, else a kept slot, else a boundary."""
    trace, initial_states = recipe.trace, {b: device for device, b in recipe.trace.initial_states.items()}
    sources = recipe.sources = _source_refs(trace, recipe.box_of)
    recipe.steps.update((i, _step(recipe, i, sources)) for i in recipe.recomputed_ops)
    unfilled: dict[int, int] = {}
    for n, b in enumerate(recipe.boxes):
        if b in initial_states:
            recipe.state_boxes.append((n, initial_states[b]))
        elif b in trace.blocks:
            recipe.from_blocks[trace.blocks[b]] = n
        elif b not in trace.inputs:
            unfilled[b] = n
        elif b not in recipe.links:
            recipe.from_inputs.append((n, trace.inputs[b]))
    closures = _box_closures(recipe)
    recipe.slots.extend(_slot_action(recipe, ref, closures, sources, unfilled) for ref in trace.slots)
    for leaf, ref in asked.items():
        if ref.buffer in recipe.counts:
            recipe.handed[leaf] = _slot_action(recipe, ref, closures, sources, unfilled)
    recipe.from_taps.extend((n, trace.taps[b]) for b, n in unfilled.items())
    actions = [*recipe.slots, *recipe.handed.values()]
    recipe.closures = list(dict.fromkeys(action.boxes for action in actions))
    for action in actions:
        action.closure = recipe.closures.index(action.boxes)
    recipe.cells = {buffer: n for n, buffer in enumerate(recipe.counts)}
    for index, slot in enumerate(recipe.slots):
        if slot.kind in AWAY and not slot.unwritten and (cell := recipe.cells[slot.ref.buffer]) not in recipe.witnessed:
            slot.cell, recipe.witnessed[cell] = cell, index


def _slot_action(
    recipe: Recipe,
    ref: TensorRef,
    closures: dict[int, tuple[int, ...]],
    sources: dict[int, TensorRef],
    unfilled: dict[int, int],
) -> SlotAction:
    buffer, trace = ref.buffer, recipe.trace
    if buffer in recipe.links:
        return SlotAction("drop", ref, boxes=(recipe.links[buffer],), view=within(trace, ref))
    if buffer in recipe.moved or buffer in recipe.packed:
        kind, box = "offload" if buffer in recipe.moved else "pack", recipe.box_of[buffer]
        return SlotAction(kind, ref, boxes=(box,), view=_seen(recipe, ref), fill=unfilled.pop(buffer, None))
    if buffer in recipe.makers:
        view = None if sources.get(buffer) == ref else ref
        boxes, cast = closures[recipe.makers[buffer]], trace.casts.get(buffer, "")
        return SlotAction("drop", ref, boxes=boxes, view=view, cast=cast, unwritten=buffer in trace.unwritten)
    if trace.program.buffers[buffer].source is Source.PARAMETER:
        return SlotAction("parameter", ref, parameter=trace.names[buffer])
    return SlotAction("keep", ref, fill=unfilled.pop(buffer, None))


def _source_refs(trace: RegionTrace, box_of: dict[int, int]) -> dict[int, TensorRef]:
    """For each recomputable or boxed buffer, the view of it that the runtime will hold."""
    refs: dict[int, TensorRef] = {}
    for call in trace.calls:
        for ref in call.outputs:
            if ref is not None:
                refs.setdefault(ref.buffer, ref)
    # boxes are viewed explicitly: the tensor that fills one (a slot, a tap, an input) may be any view of the buffer
    for b in box_of:
        refs.pop(b, None)
    return refs


def _step(recipe: Recipe, index: int, sources: dict[int, TensorRef]) -> RecipeStep:
    trace, call = recipe.trace, recipe.trace.calls[index]
    leaves, spec, named = arguments_of(call.args, call.kwargs)
    tensors = [
        (position, leaf.buffer, None if sources.get(leaf.buffer) == leaf else _seen(recipe, leaf))
        for position, leaf in enumerate(leaves)
        if isinstance(leaf, TensorRef)
    ]
    states = () if call.state_in is None else (call.state_in,)
    reads = dict.fromkeys((*(b for _, b, _ in tensors), *states))
    consumes = tuple([b for b in trace.program.ops[index].inputs if b in recipe.counts])
    spare = {b: trace.calls[recipe.makers[b]] for b in consumes if recipe.counts[b] == 1 and b in recipe.makers}
    found = in_place(call, trace.program.buffers, spare) if spec is None and spare else None
    into, func = found or (None, call.func if costs_like(call) is None else safe_softmax)
    return RecipeStep(
        func=func,
        leaves=leaves,
        spec=spec,
        named=named,
        tensors=tensors,
        outputs=[
            (position, ref.buffer)
            for position, ref in enumerate(call.outputs)
            if ref is not None and ref.buffer in recipe.makers and recipe.counts[ref.buffer] > 0
        ],
        written=[(tuple(p for p, b, _ in tensors if b == old), old, new) for old, new in call.written],
        consumes=consumes,
        state_in=call.state_in,
        state_out=call.state_out if call.state_out is not None and recipe.makers.get(call.state_out) == index else None,
        device=call.device,
        waits=is_collective(call.func),
        under=call.under,
        into=into,
        needs=tuple([(b, recipe.makers[b]) for b in reads if b in recipe.makers]),
    )


def _box_closures(recipe: Recipe) -> dict[int, tuple[int, ...]]:
    """For each recomputed op, the boxes that it and its predecessors read."""
    closure: dict[int, set[int]] = {}
    for i in recipe.recomputed_ops:
        closure[i] = found = set()
        for b in recipe.trace.program.ops[i].inputs:
            if b in recipe.makers:
                found |= closure[recipe.makers[b]]
            elif b in recipe.box_of:
                found.add(recipe.box_of[b])
    return {i: tuple(sorted(found)) for i, found in closure.items()}


def _seen(recipe: Recipe, ref: TensorRef) -> TensorRef:
    """Like `within`, with offsets from the start of the range if the buffer is offloaded or packed."""
    pack = recipe.packed.get(ref.buffer)
    move = recipe.moved.get(ref.buffer) if pack is None else pack.move
    return within(recipe.trace, ref) if move is None else Within.since(move.begin, ref)


# Faster ops for recomputation that are bitwise identical --------------------------------------------------------------
#
# NOTE [ Rows of nothing ]
# Attention by matmuls ends in ``_safe_softmax`` (aten/src/ATen/native/transformers/attention.cpp): a softmax, in which
# rows of only minus infinity become zeros. torch finds these by checking every score, and copies the result to fill in
# zeros: on a CPU more than half of the op's time. A softmax of such a row is NaN everywhere, so without a NaN in its
# first column there is no such row, and the softmax is the result. Otherwise the rows are searched and zeros are
# written in place. On an accelerator this question would synchronize with the device: there the op runs unchanged.
#
# NOTE [ In its place ]
# If an elementwise op is the last reader of an unsaved tensor, its result fits that tensor's memory. torch has kernels
# for most of these that write to a given output, element by element as they read: the bits are those of a separate
# result, without its memory, and with a third less memory traffic (a result's cache lines are fetched first).


aten = torch.ops.aten


def costs_like(call: RecordedOp) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """The op and arguments that take nearly all of the time of a call's replacement; None if it is not replaced."""
    if call.func is not aten._safe_softmax.default or len(call.args) != 2 or call.kwargs or call.device != "cpu":
        return None
    scores, dim = call.args
    if not scores.dtype.is_floating_point or any(
        ref is None or not _is_contiguous(ref) for ref in (scores, *call.outputs)
    ):
        return None
    return aten._softmax.default, (scores, dim, False)


def in_place(
    call: RecordedOp, buffers: Sequence[Buffer], spare: Mapping[int, RecordedOp]
) -> tuple[int, Callable[..., Any]] | None:
    """Find the argument that a call's result may overwrite, and the function that does so. ``spare`` has the recomputed
    buffers that only this call reads, each with the call that made it.
    """
    out = call.outputs[0] if len(call.outputs) == 1 else None
    if out is None or call.written or call.state_in is not None:
        return None
    for position, leaf in enumerate(call.args):
        maker = spare.get(leaf.buffer) if isinstance(leaf, TensorRef) else None
        if maker is None or getattr(maker.func, "namespace", "") != "aten":  # others may return memory that they keep
            continue
        if any(isinstance(a, TensorRef) and a.buffer == leaf.buffer and a != leaf for a in call.args):
            continue  # another view of it is read as well
        is_like = replace(leaf, buffer=out.buffer) == out
        whole = prod(out.size) * out.dtype.itemsize
        if is_like and whole == buffers[leaf.buffer].nbytes == buffers[out.buffer].nbytes:
            func = _writes_to(call.func, call.device)
            return None if func is None else (position, func)
    return None


@functools.cache
def _writes_to(func: Any, device: str) -> Callable[..., Any] | None:
    """The overload of an elementwise op that writes to a given output, if it has a kernel of its own."""
    if not isinstance(func, torch._ops.OpOverload) or torch.Tag.pointwise not in func.tags:
        return None
    wanted = [*((a.name, str(a.type)) for a in func._schema.arguments), ("out", "Tensor")]
    packet, key = func.overloadpacket, "CUDA" if device == "cuda" else "CPU"
    for name in packet.overloads():
        other: Any = getattr(packet, name)
        given = other._schema.arguments
        if given and given[-1].is_out and [(a.name, str(a.type)) for a in given] == wanted:
            is_own = torch._C._dispatch_has_kernel_for_dispatch_key(other.name(), key)
            return other if is_own else None
    return None


def _is_contiguous(ref: TensorRef) -> bool:
    expected = 1
    for n, step in zip(reversed(ref.size), reversed(ref.stride), strict=True):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True


def safe_softmax(scores: Tensor, dim: int) -> Tensor:
    """``_safe_softmax`` of floating-point numbers on a CPU; see NOTE [ Rows of nothing ]."""
    found: Tensor = aten._softmax(scores, dim, False)
    may_have = found.select(dim, 0).isnan().any() if found.shape[dim] else None
    # a dry run cannot know, and counts the memory that may be needed
    if may_have is not None and (isinstance(may_have, FakeTensor) or may_have):
        found.masked_fill_(scores.amax(dim, keepdim=True).eq(-torch.inf), 0.0)
    return found
