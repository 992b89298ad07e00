"""Straight-line Python that recomputes dropped tensors: one function for each unpacked tensor.

NOTE [ Functions by state ]
The ops of an unpack depend on the unpacks before it: they leave values that it reads, and use up others. Both are known
when code is generated, so that a function keeps values in local variables, deletes each after its last use, and stores
in the frame's table only values for later unpacks. A state is the knowledge between two unpacks: the values in the
table, and the remaining uses of each recomputed buffer. A backward in another order (a part of the graph, a second
backward) reaches other states, and their functions are generated when it does.

NOTE [ Use counts ]
A recomputed buffer is used once by each dropped slot on it and once by each recomputed op that reads it. The count
starts at that number, and at zero the value is deleted and the count reset, so that a second backward over a retained
graph recomputes the same values.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any, Final, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from jettison.capture.recorder import TensorRef
from jettison.capture.signature import Switches, switched
from jettison.capture.tensor_subclasses import plain, version_of
from jettison.core.errors import UsageError
from jettison.runtime.cuda_graphs import is_capturing
from jettison.runtime.offload import stale
from jettison.runtime.recipe import Recipe, RecipeStep, SlotAction
from jettison.runtime.views import in_a_copy, view_of
from jettison.runtime.witness import MEMORY, _ndarray

Function: TypeAlias = Callable[[Any, Any], Tensor]
"""Function of a frame and the unpacked handle; it returns the tensor that backward gets."""

UNWRAPPED: Final = frozenset({Tensor, nn.Parameter})  # classes of most tensors: nothing is wrapped in them
Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, and offset in a storage, in elements
Reading: TypeAlias = tuple[tuple[int, ...], Any, tuple[int, ...], int, int, int, int, int]
"""A `Cut`, the byte offset from the buffer's start, and the slot's number."""
EMPTY: Final = torch.ops.aten.empty_strided.default
INDENT: Final = "    "
LITERALS: Final = (bool, int, str, type(None), torch.dtype)

_NO_TENSOR: Final = torch.empty(0, device="meta")
_WRITES: Final = threading.Lock()


class ValuesAtHand:
    """Values stored between two unpacks, and the remaining uses; see NOTE [ Functions by state ]."""

    __slots__ = ("at_hand", "kept", "left", "next")

    def __init__(self, left: Mapping[int, int], at_hand: frozenset[int]) -> None:
        self.left, self.at_hand = left, at_hand
        self.next: dict[SlotAction, tuple[Function, ValuesAtHand]] = {}
        self.kept: dict[SlotAction, tuple[Function, ValuesAtHand]] = {}  # for nodes that unpack again: none used up


class RecomputeCode:
    """The functions of one recipe, generated at first use."""

    through: Callable[[Callable[..., Any], Callable[..., Any]], Callable[..., Any]] | None = None
    """For benchmarks: maps an op and its caller to the caller in code generated meanwhile."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.cells = recipe.cells
        self.stored = {buffer: view for buffer in recipe.counts if (view := self._stored(buffer)) is not None}
        self.readings = [self._reading(buffer, cell) for buffer, cell in recipe.cells.items()]
        self.parameters = {buffer: n for n, buffer in enumerate(recipe.parameters)}
        self.start = ValuesAtHand(recipe.counts, frozenset())
        self.states = {(tuple(recipe.counts.values()), frozenset[int]()): self.start}
        self.sources: list[str] = []
        self.constants: dict[str, Any] = dict(NAMES)

    def function(self, state: ValuesAtHand, slot: SlotAction, *, keeps: bool) -> tuple[Function, ValuesAtHand]:
        """The function of an unpack, and the state after it; if the node unpacks again, with the value still stored."""
        table = state.kept if keeps else state.next
        with _WRITES:  # regions share this, and a backward may run in several threads
            if (found := table.get(slot)) is not None:
                return found
            name = f"recompute_{len(self.sources)}"
            writer = _FunctionWriter(self, state, slot, keeps=keeps)
            source = writer.source(name)
            exec(_compiled(source), self.constants)  # generated text only; constants of the program are names in it
            self.sources.append(f"# {self._asked(slot)}\n{source}")
            left, at_hand = writer.left, frozenset(writer.at_hand)
            after = self.states.setdefault((tuple(left.values()), at_hand), ValuesAtHand(left, at_hand))
            found = table[slot] = (self.constants[name], after)
            return found

    def _asked(self, slot: SlotAction) -> str:
        """Comment that names the saved tensor of a function."""
        number = next((n for n, one in enumerate(self.recipe.slots) if one is slot), None)
        if number is None:
            return "an output, which is the input of the block after"
        saved = self.recipe.trace.program.slots[number]
        return f"saved tensor {saved.index}{f' of {saved.path}' if saved.path else ''}, after {saved.op or 'the start'}"

    def place(self, buffer: int, ref: TensorRef) -> Place | None:
        """Position of a view in the storage of a recomputed buffer; None if more than that distinguishes it."""
        source = self.recipe.sources.get(buffer)
        is_plain = ref.__class__ is TensorRef and ref.wrap is None and not (ref.conj or ref.neg)
        if is_plain and source is not None and source.dtype is ref.dtype and not (source.conj or source.neg):
            return ref.size, ref.stride, ref.offset
        return None

    def _stored(self, buffer: int) -> TensorRef | None:
        """The view that is stored of a buffer if all its saved tensors are that view, else None: the op's result is.
        Below autograd a view has a version of its own, so that these nodes must get one tensor for a write to be seen.
        """
        actions = (*self.recipe.slots, *self.recipe.handed.values())
        first, *others = [action.view for action in actions if action.ref.buffer == buffer] or [None]
        is_only = first is not None and self.place(buffer, first) is not None and all(one == first for one in others)
        return first if is_only else None

    def _reading(self, buffer: int, cell: int) -> Reading | None:
        """Addresses of a witness's elements in a recomputed buffer; None if reading them needs a view of it."""
        index = self.recipe.witnessed.get(cell)
        if index is None:
            return None
        ref = self.recipe.slots[index].ref
        cut = self.recipe.slots[index].spots.cut(ref.dtype)
        if cut is None or not cut[-2] or self.place(buffer, ref) is None:
            return None
        shift = (ref.offset - self.stored.get(buffer, self.recipe.sources[buffer]).offset) * ref.dtype.itemsize
        return *cut, shift, index

    def view_text(self, buffer: int, value: str, ref: TensorRef) -> str:
        place = self.place(buffer, ref)
        if place is None:
            return f"view_of({value}, {self.named(ref, 'view')})"
        source = self.recipe.sources[buffer]
        if place == (source.size, source.stride, source.offset):
            return value
        return _as_strided(value, ref)

    def text(self) -> str:
        """All functions so far; before any backward, those of one that unpacks the last saved tensor first."""
        if self.sources:
            return "\n\n".join(self.sources)
        fresh = RecomputeCode(self.recipe)
        state = fresh.start
        for slot in reversed([slot for slot in self.recipe.slots if slot.ref.buffer in self.recipe.counts]):
            _, state = fresh.function(state, slot, keeps=False)
        return "\n\n".join(fresh.sources)

    def named(self, value: Any, like: str = "constant") -> str:
        """Source of a constant: a literal, or a name with a leading underscore, which no variable has."""
        if value.__class__ in LITERALS or (value.__class__ is float and math.isfinite(value)):
            return repr(value)
        if isinstance(value, tuple | list) and all(v.__class__ is int for v in value):
            return repr(list(value)) if value.__class__ is list else repr(tuple(value))
        names = _numbered(f"_{like}" if like.isidentifier() else "_constant")
        return next(name for name in names if self.constants.setdefault(name, value) is value)

    def op(self, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> str:
        """The name of an op, called with these arguments."""
        is_op = isinstance(func, torch._ops.OpOverload)
        like = str(func).replace(".default", "") if is_op else getattr(func, "__name__", "")
        called = binding(func, args, kwargs)
        return self.named(called if self.through is None else self.through(func, called), like.replace(".", "_"))


def code_of(recipe: Recipe) -> RecomputeCode:
    """Return the functions of a recipe, one object for all its regions."""
    held = vars(recipe)
    if "code" not in held:
        held["code"] = RecomputeCode(recipe)
    found: RecomputeCode = held["code"]
    return found


def _numbered(name: str) -> Iterator[str]:
    return itertools.chain((name,), (f"{name}_{n}" for n in itertools.count(1)))


@functools.lru_cache(maxsize=4096)
def _compiled(source: str) -> CodeType:
    """Compile source, once for equal blocks."""
    return compile(source, "<recomputation of a planned region>", "exec")


class _FunctionWriter:
    """Generator of one function."""

    def __init__(self, code: RecomputeCode, state: ValuesAtHand, slot: SlotAction, *, keeps: bool) -> None:
        self.code, self.recipe, self.slot, self.keeps = code, code.recipe, slot, keeps
        self.left, self.at_hand = dict(state.left), set(state.at_hand)
        self.lines: list[tuple[str, frozenset[str]]] = []  # each with the uncounted variables that it reads
        self.values: dict[int, str] = {}  # buffer -> local variable
        self.views: dict[int, list[tuple[TensorRef, str]]] = {}
        self.fresh: set[int] = set()  # counted buffers that are only in a variable
        self.used: set[str] = set()

    def source(self, name: str) -> str:
        slot, buffer = self.slot, self.slot.ref.buffer
        maker = self.recipe.makers.get(buffer)
        if buffer in self.at_hand:
            value = self.values[buffer] = self._name(buffer)
            self._line(f"{value} = taken(frame, {self.code.cells[buffer]})")
            maker = None
        elif maker is not None:
            self._make(maker)
        value = self._get(buffer)
        seen = self._to_store(buffer) if buffer in self.fresh else value
        before = self.code.cells[buffer] if buffer in self.fresh else None
        if not self.keeps:
            self._release(buffer, after=seen)
        cells = {self.code.cells[fresh]: self._to_store(fresh) for fresh in sorted(self.fresh)}
        body = list(self._with_deletions())
        if maker is not None:
            # `opened` recomputes in the block before, and compares
            own = 1 + max((n for n, line in enumerate(body) if "frame.opened(" in line), default=-1)
            body[own:] = ["with below_autograd():", *(INDENT + line for line in body[own:])]
        if any("values[" in line for line in body):
            body.insert(0, "values = frame.values")
        if before is not None and before not in cells:
            body.append(f"compare(frame, ({before},), ({seen},))")
        if cells:
            body.append(f"hold(frame, {_tuple(map(str, cells))}, {_tuple(cells.values())})")
        if slot.view is not None and buffer not in self.code.stored:
            seen = self.code.view_text(buffer, value, slot.view)
        lines = (*body, f"return {seen}")
        return "\n".join([f"def {name}(frame, handle):", *(INDENT + line for line in lines), ""])

    # lines -----------------------------------------------------------------------------------------------------------

    def _line(self, text: str, reads: Iterable[str] = ()) -> None:
        self.lines.append((text, frozenset(reads)))

    def _with_deletions(self) -> Iterator[str]:
        """Delete uncounted variables (parameters, boxes and their views) after the last line that reads them."""
        last = {name: n for n, (_, reads) in enumerate(self.lines) for name in reads}
        for n, (text, reads) in enumerate(self.lines):
            yield from text.split("\n")
            if over := sorted(name for name in reads if last[name] == n):
                yield f"del {', '.join(over)}"

    def _name(self, buffer: int, like: str = "") -> str:
        """An unused variable name: the op that produces a buffer, or the parameter's name."""
        trace = self.recipe.trace
        if not like and buffer in self.recipe.makers:
            like = trace.program.ops[self.recipe.makers[buffer]].name.split(".")[1]
        if not like:
            like = self.recipe.parameters.get(buffer, "input").replace(".", "_")
        like = f"{like.strip('_')}_{buffer}"
        names = _numbered(like if like.isidentifier() else f"value_{buffer}")
        found = next(name for name in names if name not in self.used)
        self.used.add(found)
        return found

    # values ----------------------------------------------------------------------------------------------------------

    def _get(self, buffer: int) -> str:
        found = self.values.get(buffer)
        if found is None:
            found = self.values[buffer] = self._name(buffer)
            if buffer in self.at_hand:
                text = f"values[{self.code.cells[buffer]}]"
                whole = self.recipe.sources[buffer] if buffer in self.code.stored else None
                self._line(f"{found} = {text if whole is None else _as_strided(text, whole)}")
            elif buffer in self.code.parameters:
                self._line(f"{found} = parameter(frame, {self.code.parameters[buffer]})")
            else:
                self._open(found, buffer)
        return found

    def _open(self, name: str, buffer: int) -> None:
        """Read a box. A value recomputed by the block before, fetched or unpacked becomes one of ours."""
        n = self.slot.boxes.index(self.recipe.box_of[buffer])
        if buffer in self.left:
            self._line(f"{name} = frame.opened(handle[2][{n}], {buffer}, handle)")
            self._made(buffer, name)
        else:
            self._line(f"{name} = boxed(frame, handle, {n}, {buffer})")

    def _view(self, buffer: int, ref: TensorRef) -> str:
        views = self.views.setdefault(buffer, [])
        found = next((name for seen, name in views if seen is ref or seen == ref), None)
        if found is None:
            value = self._get(buffer)
            text = self.code.view_text(buffer, value, ref)
            found = self._name(buffer, f"{value}_view")
            self._line(f"{found} = {text}", self._uncounted(buffer, value))
            views.append((ref, found))
        return found

    def _to_store(self, buffer: int) -> str:
        """The variable of a recomputed buffer as `frame.values` stores it."""
        view = self.code.stored.get(buffer)
        return self.values[buffer] if view is None else self._view(buffer, view)

    def _uncounted(self, buffer: int, name: str) -> tuple[str, ...]:
        return () if buffer in self.left else (name,)

    def _made(self, buffer: int, name: str) -> None:
        """Note that a counted buffer is in this variable."""
        self.values[buffer] = name
        self.at_hand.add(buffer)
        self.fresh.add(buffer)

    def _wanted(self, buffer: int | None) -> bool:
        return buffer is not None and self.left.get(buffer, 0) > 0

    def _release(self, buffer: int, *, after: str = "") -> None:
        """Count one use; at the last one delete the buffer, except for the variable ``after``, which is still read."""
        self.left[buffer] -= 1
        if self.left[buffer] > 0:
            return
        self.left[buffer] = self.recipe.counts[buffer]
        if buffer not in self.at_hand:
            return
        self.at_hand.discard(buffer)
        if buffer not in self.fresh:
            self._line(f"values[{self.code.cells[buffer]}] = None")
        self.fresh.discard(buffer)
        names = [self.values.pop(buffer), *(name for _, name in self.views.pop(buffer, ()))]
        if gone := [name for name in names if name != after]:
            self._line(f"del {', '.join(gone)}")

    # ops -------------------------------------------------------------------------------------------------------------

    def _make(self, op: int) -> None:
        """Write an op, after the ops of its arguments. Iterative, as forwards unroll thousands of steps."""
        waiting = [op]
        while waiting:
            step = self.recipe.steps[waiting[-1]]
            for buffer, maker in step.needs:
                if buffer not in self.at_hand:
                    waiting.append(maker)
                    break
            else:
                waiting.pop()
                self._step(step)

    def _step(self, step: RecipeStep) -> None:
        leaves = [_Text() if isinstance(leaf, TensorRef) else _Text(self.code.named(leaf)) for leaf in step.leaves]
        reads: set[str] = set()
        for position, buffer, ref in step.tensors:
            leaves[position] = _Text(self._get(buffer) if ref is None else self._view(buffer, ref))
            reads.update(self._uncounted(buffer, leaves[position]))
        copies = self._copies(step, leaves, reads)
        call = self._call(step, leaves)
        if step.state_in is not None:
            state = self._get(step.state_in)
            reads.update(self._uncounted(step.state_in, state))
            leaves_state = step.state_out is not None and self._wanted(step.state_out)
            more = ", leaves=True" if leaves_state else ""
            within = f"with drawing({step.device!r}, {state}{more}){' as drawn' if leaves_state else ''}:"
            self._result(step, call, reads, within=within)
            if leaves_state:
                assert step.state_out is not None
                name = self._name(step.state_out, "state")
                self._line(f"{name} = drawn.after")
                self._made(step.state_out, name)
        else:
            self._result(step, call, reads)
        returned = {buffer for _, buffer in step.outputs}
        for positions, _old, new in step.written:
            if self._wanted(new) and new not in returned:
                name = self._name(new, "written")
                self._line(f"{name} = {leaves[positions[0]]}")
                self._made(new, name)
        if copies:
            self._line(f"del {', '.join(copies)}")
        for buffer in step.consumes:
            self._release(buffer)

    def _copies(self, step: RecipeStep, leaves: list[_Text], reads: set[str]) -> list[str]:
        """Copy arguments that an op writes to, unless that is their last use."""
        copies: list[str] = []
        for positions, old, _new in step.written:
            if old in self.at_hand and self.left[old] == 1:
                continue
            names = [_Text(self._name(old, "copy")) for _ in positions]
            given = ", ".join(leaves[p] for p in positions)
            refs = ", ".join(self.code.named(step.leaves[p], "view") for p in positions)
            self._line(f"{', '.join(names)}, = in_a_copy([{given}], [{refs}])", reads)
            for position, name in zip(positions, names, strict=True):
                leaves[position] = name
            copies += names
        return copies

    def _result(self, step: RecipeStep, call: str, reads: Iterable[str], within: str = "") -> None:
        """Write the line of an op, and those that pick its needed results."""
        schema = getattr(step.func, "_schema", None)
        returns = [] if schema is None else [str(one.type) for one in schema.returns]
        if step.outputs and (step.into is not None or returns == ["Tensor"]):
            buffer = step.outputs[0][1]
            name = self._name(buffer)
            self._op_line(f"{name} = {call}", reads, within)
            self._made(buffer, name)
            return
        if not step.outputs:
            self._op_line(call, reads, within)
            return
        flat = bool(returns) and (set(returns) == {"Tensor"} or returns == ["List[Tensor]"])
        self._op_line(f"results = {call}" if flat else f"results = flat({call})", reads, within)
        for position, buffer in step.outputs:
            name = self._name(buffer)
            self._line(f"{name} = results[{position}]")
            self._made(buffer, name)
        self._line("del results")

    def _op_line(self, text: str, reads: Iterable[str], within: str) -> None:
        self._line(f"{within}\n{INDENT}{text}" if within else text, reads)

    def _call(self, step: RecipeStep, leaves: list[_Text]) -> str:
        args, kwargs = step.arguments(leaves)
        seen, named = step.arguments(step.leaves)  # with placeholders of tensors
        if step.spec is None:
            kwargs = {key: _Text(self.code.named(value, key)) for key, value in kwargs.items()}
        if step.into is not None:
            kwargs["out"] = leaves[step.into]
            named = named | {"out": step.leaves[step.into]}
        arguments = ", ".join((*map(_text, args), *(f"{key}={_text(value)}" for key, value in kwargs.items())))
        if step.func is EMPTY:
            text = f"empty(frame, {arguments})"
        else:
            text = f"{self.code.op(step.func, seen, named)}({arguments})"
        if step.waits:
            text = f"{self.code.op(torch.ops._c10d_functional.wait_tensor.default, [], {})}({text})"
        if step.under is not None:
            text = f"under({self.code.named(step.under, 'switches')}, lambda: {text})"
        return text


class _Text(str):
    """A piece of source in place of a value."""

    __slots__ = ()


def _as_strided(value: str, ref: TensorRef) -> str:
    return f"{value}.as_strided({ref.size!r}, {ref.stride!r}, {ref.offset})"


def _tuple(texts: Iterable[str]) -> str:
    return f"({', '.join(texts)},)"


def _text(value: Any) -> str:
    """The source of an argument: pieces, also inside lists, tuples and dicts."""
    if isinstance(value, _Text):
        return value
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_text(item)}" for key, item in value.items()) + "}"
    inside = ", ".join(map(_text, value))
    return f"[{inside}]" if isinstance(value, list) else f"({inside},)" if value else "()"


# random states, and batches of gradients ----------------------------------------------------------------------------

_enter_vmap, _leave_vmap = torch._C._vmapmode_increment_nesting, torch._C._vmapmode_decrement_nesting


class OutsideOfVmap:
    """Leave the levels of `vmap`: a backward over several gradients (``is_grads_batched``) refuses random ops."""

    __slots__ = ("levels",)

    def __enter__(self) -> Self:
        self.levels = _enter_vmap() - 1
        for _ in range(self.levels + 1):
            _leave_vmap()
        return self

    def __exit__(self, *_error: object) -> None:
        for _ in range(self.levels):
            _enter_vmap()


class Drawing(OutsideOfVmap):
    """Set the default generator to a state in here, and restore it afterwards. With ``leaves``, ``after`` is the
    state in which the op left it. Raises `UsageError` in a CUDA graph, if the state is of another graph.
    """

    __slots__ = ("after", "before", "device", "leaves")

    def __init__(self, device: str, state: Tensor, *, leaves: bool = False) -> None:
        self.device, self.leaves = device, leaves
        self.before = get_state(device)
        if device == "cuda" and is_capturing():
            _refuse_another_graph(state, self.before)
        set_state(device, state)

    def __exit__(self, *_error: object) -> None:
        super().__exit__()
        if self.leaves:
            self.after = get_state(self.device)
        set_state(self.device, self.before)


def _refuse_another_graph(state: Tensor, now: Tensor) -> None:
    """Refuse a state of another capture: offsets count from its start, and the forward must have left a smaller one."""
    (seed, offset), (seed_now, offset_now) = state.view(torch.int64).tolist(), now.view(torch.int64).tolist()
    if seed != seed_now or offset >= offset_now:
        raise UsageError(
            "this CUDA graph captures a backward that redraws random numbers of a forward (dropout), and the forward "
            "is not in the graph. Capture both in one torch.cuda.graph, or plan with a policy that keeps random tensors"
        )


def get_state(device: str) -> Tensor:
    # detach() is an op that a dry run's allocation counter sees; reading the state is not
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state().detach()


def set_state(device: str, state: Tensor) -> None:
    if device == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


# names in generated code ----------------------------------------------------------------------------------------------


def _taken(frame: Any, cell: int) -> Tensor:
    """A stored value. Raises `StaleTensor` if a node of this backward wrote to it."""
    found: Tensor = frame.values[cell]
    if version_of(found) != frame.versions[cell]:
        raise stale("a recomputed tensor", frame.name, frame.versions[cell], version_of(found))
    return found


def _hold(frame: Any, cells: tuple[int, ...], tensors: tuple[Tensor, ...]) -> None:
    """Store recomputed values, each compared with forward's witness, for later unpacks."""
    _compare(frame, cells, tensors)
    values, versions = frame.values, frame.versions
    for cell, tensor in zip(cells, tensors, strict=True):
        values[cell], versions[cell] = tensor, version_of(tensor)


def _compare(frame: Any, cells: tuple[int, ...], tensors: tuple[Tensor, ...]) -> None:
    """Compare recomputed values with the witnesses of their buffers, if there are any. Raises `WrongValue`."""
    witnesses, readings, salt = frame.seen, frame.code.readings, frame.salt
    for cell, tensor in zip(cells, tensors, strict=True):
        seen, reading = witnesses[cell], readings[cell]
        if seen is None:
            continue
        if reading is not None and seen.__class__ is bytes and tensor.__class__ in UNWRAPPED and not tensor.is_neg():
            size, word, strides, itemsize, places, step, shift, index = reading  # inlined `peek`
            at = tensor.data_ptr() + shift + (salt + index) % places * step * itemsize
            if _ndarray(size, word, MEMORY, at - 1, strides).tobytes() == seen:
                continue
        frame.compare(cell, tensor)


def _parameter(frame: Any, n: int) -> Tensor:
    table, leaf, tensor, version = frame.parameters[n]
    if table[leaf] is tensor and tensor.__class__ in UNWRAPPED and version_of(tensor) == version:
        return tensor
    return frame.parameter(n)


def _boxed(frame: Any, handle: Any, n: int, buffer: int) -> Tensor:
    box = handle[2][n]
    tensor = box.tensor
    if tensor.__class__ in UNWRAPPED and version_of(tensor) == box.version:
        return tensor
    return frame.opened(box, buffer, handle)


def _flat(found: Any) -> list[Any]:
    return [found] if isinstance(found, Tensor) else tree_leaves(found)


def _empty(frame: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Uninitialized memory; fake in a dry run, where an outer mode allocates bare `empty_strided` for real."""
    known = frame.parameters  # the region's; searching the model is rarely needed
    part = plain(known[0][2] if known else next(frame.model.parameters(), _NO_TENSOR))
    if isinstance(part, FakeTensor):
        return part.new_empty_strided(*args, **kwargs)
    return EMPTY(*args, **kwargs)


def _under(switches: Switches, call: Callable[[], Any]) -> Any:
    """Call an op with the kernel switches that the forward itself had set."""
    with switched(switches):
        return call()


NAMES: Final[Mapping[str, Any]] = (
    {one.__name__: one for one in (torch, view_of, in_a_copy)}
    | {
        "below_autograd": torch._C._AutoDispatchBelowADInplaceOrView,  # skips dispatch layers that only pass ops on
        "drawing": Drawing,
    }
    | {one.__name__[1:]: one for one in (_boxed, _compare, _empty, _flat, _hold, _parameter, _taken, _under)}
)
"""Names in all generated code."""


# Faster ways to call an op from Python --------------------------------------------------------------------------------
#
# An ATen op called by its overload (``torch.ops.aten.mul.Tensor``) has its arguments matched with a schema, which takes
# as long as the op. Generated bindings (``torch.mul``) parse theirs in half of that, and choose the overload by the
# arguments. Which one a binding chooses is looked up by calling it, on tensors without memory, and stopping it there.


_HOMES = (torch._C._VariableFunctions, torch._C._nn)
_LIKE = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout)


def binding(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Return the fastest Python callable for an overload and the arguments of a recorded call (`TensorRef` in place of
    tensors), one that calls nothing else. Other functions are returned unchanged.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return func
    if func.namespace == "aten":
        kinds = tuple([_kind(arg) for arg in args]), tuple([(key, _kind(value)) for key, value in kwargs.items()])
        if None not in kinds[0] and all(kind is not None for _, kind in kinds[1]):
            found = _binding(func, *kinds)
            if found is not None:
                return found
    return func._op


def _kind(value: Any) -> Any:
    """Key of an argument that a binding may choose by; None for kinds that are not supported."""
    if isinstance(value, TensorRef):
        return Tensor if value.wrap is None and not (value.conj or value.neg) else None
    if value.__class__ in _LIKE:
        return value.__class__, value
    if isinstance(value, list | tuple):
        inside = tuple([_kind(item) for item in value])
        return None if None in inside else (value.__class__, inside)
    return None


@lru_cache(maxsize=4096)
def _binding(func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Callable[..., Any] | None:
    with _disable_current_modes():
        given = [_example(kind) for kind in args]
        named = {key: _example(kind) for key, kind in kwargs}
        for home in _HOMES:
            found: Callable[..., Any] | None = getattr(home, func._schema.name.split("::")[1], None)
            if found is not None and _calls(found, func, given, named):
                return found
    return None


def _example(kind: Any) -> Any:
    if kind is Tensor:
        return torch.empty(1, device="meta")
    cls, value = kind
    return [_example(item) for item in value] if cls in (list, tuple) else value


class _OpReached(Exception):
    """Raised when an op is reached."""


class _Stop(TorchDispatchMode):
    """Mode that ends a call at its first op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _OpReached(func, args, kwargs or {})


def _calls(found: Callable[..., Any], func: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a binding calls this overload with these arguments."""
    try:
        with torch._C.DisableTorchFunction(), torch.no_grad(), _Stop():
            found(*args, **kwargs)
    except _OpReached as called:
        other, others, named = called.args
        return other is func and _same(_by_name(func, args, kwargs), _by_name(func, others, named))
    except Exception:  # it takes other arguments
        return False
    return False


def _by_name(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments without those that equal their defaults."""
    schema = func._schema.arguments
    given = {schema[n].name: value for n, value in enumerate(args)} | kwargs
    defaults = {one.name: one.default_value for one in schema if one.has_default_value()}
    return {name: value for name, value in given.items() if name not in defaults or not _same(value, defaults[name])}


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return first is second
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    return first.__class__ is second.__class__ and bool(first == second)
