"""Capture: run a region once and record its ATen ops, its buffers, and its saved tensors, and where they are found."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedOperatorException
from torch.utils._python_dispatch import _disable_current_modes

from jettison.capture import op_traits
from jettison.capture.pytrees import op_leaves, op_map, tree_flatten, tree_leaves
from jettison.capture.randomness import ADVANCE, Movement, default_stream, movement_of
from jettison.capture.signature import Switches, described, kernel_switches
from jettison.capture.tensor_subclasses import Wrapping, is_dense, plain, storage_of, version_of, wrapping
from jettison.core.errors import TraceError
from jettison.ledger.program import Anchor, Buffer, Op, Program, Slot, Source


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as a view of a buffer; ``offset`` in elements from the start of the storage.

    Of a DTensor this is the local tensor; ``wrap`` restores the wrapper. ``conj`` and ``neg``: the view has a lazy
    conjugation or negation.
    """

    buffer: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    wrap: Wrapping | None = None
    conj: bool = False
    neg: bool = False

    @classmethod
    def of(cls, buffer: int, tensor: Tensor) -> TensorRef:
        """A tensor's view of a buffer."""
        part, wrap = plain(tensor), wrapping(tensor)
        size, stride = tuple(part.shape), tuple(part.stride())
        return cls(buffer, size, stride, part.storage_offset(), part.dtype, wrap, part.is_conj(), part.is_neg())


@dataclass(frozen=True, slots=True)
class ValueRead:
    """A value that Python read from a tensor: the tensor's view, and the value.

    ``shape_only``: the op's output shape depends on values, and ``found`` is that shape. ``calls`` compute the tensor
    from the region's arguments, by position among its calls; None if it is made of something else.
    """

    ref: TensorRef
    found: Any
    shape_only: bool
    calls: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Tap:
    """A place at a module boundary where a buffer can be seen: call ``call`` of module ``path``, leaf ``leaf``."""

    path: str
    call: int
    is_output: bool
    leaf: int
    ref: TensorRef


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """A recorded op as a call. Tensors in ``args`` and ``kwargs`` are `TensorRef`s.

    ``outputs`` lines up with the op's flat tensor outputs; None for an output that is a view or no tensor. ``written``
    maps each buffer that the op overwrites to its successor. ``state_out`` is often the output of another op, which
    only moves the state: NOTE [ The state moves by shape ] in randomness.py.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorRef | None, ...]
    written: tuple[tuple[int, int], ...] = ()
    state_in: int | None = None
    state_out: int | None = None
    device: str = "cpu"
    under: Switches | None = None  # kernel switches that the forward had set; None if they are those of its start


@dataclass(frozen=True, slots=True)
class Expected:
    """Expectation of a checked run: a call's `signature_of`, and the buffers that it reads, writes and makes.

    ``reads`` lines up with the call's flat tensor arguments, ``makes`` with its flat tensor results. ``writes`` pairs a
    position among the arguments with the buffer's successor. ``skippable``: a cast that autocast may have cached.
    ``numbers``: whether its plain numbers are those of the recording, and not read from the batch.
    """

    signature: tuple[Any, ...]
    reads: tuple[TensorRef, ...]
    makes: tuple[TensorRef, ...]
    writes: tuple[tuple[int, int], ...]
    skippable: bool
    numbers: bool


Place = tuple[bool, int]
"""(is it an output, its leaf position)."""


@dataclass(kw_only=True)
class RegionTrace:
    """A recorded region: the pure `Program`, and everything needed to recompute parts of it."""

    program: Program
    inputs: dict[int, int]  # buffer -> leaf position of the region's flattened arguments
    output_leaves: list[Any]  # TensorRef, or the value itself, in the order of the flattened output
    output_spec: Any
    calls: list[RecordedOp] = field(default_factory=list)
    slots: list[TensorRef] = field(default_factory=list)
    saved_after: tuple[int, ...] = ()  # by slot, the number of ops before autograd saved it
    taps: dict[int, Tap] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # buffer -> dotted name of the parameter or registered buffer
    sequence: list[Expected] = field(default_factory=list)
    initial_states: dict[str, int] = field(default_factory=dict)  # device -> buffer of its random state at the start
    blocks: dict[int, tuple[int, int]] = field(default_factory=dict)  # buffer -> (nested call, output leaf)
    given: dict[int, TensorRef] = field(default_factory=dict)  # buffer -> the argument, or a nested call's result
    named_at: dict[int, int] = field(default_factory=dict)  # buffer -> byte offset of the parameter in its storage
    constants: frozenset[int] = frozenset()  # buffers of outputs that require no gradient
    reads: tuple[ValueRead, ...] = ()  # values that the arguments must have for the recording to hold
    made: dict[int, Tensor] = field(default_factory=dict)  # buffer -> a tensor made of Python's numbers
    problem: str = ""  # why nothing may be recomputed by it; it then only lists saved tensors
    unwritten: frozenset[int] = frozenset()  # buffers that no kernel writes: their bits are uninitialized
    entangled: bool = False  # it reads a tensor with a graph that is none of its arguments
    overwritten: frozenset[int] = frozenset()  # buffers of others that it writes to
    late: frozenset[Place] = frozenset()  # arguments and outputs that others write to before backward
    late_inside: frozenset[int] = frozenset()  # buffers of its own that others write to before backward
    form: str = ""  # the program's, before anchors for later writes
    written_later: frozenset[int] = frozenset()  # all buffers of `late` and `late_inside`
    asked: frozenset[int] = frozenset()  # leaf positions of arguments that a backward inside the forward reads
    detached: dict[int, str] = field(default_factory=dict)  # op -> parameter that it reads without its graph

    def decisive_arguments(self) -> set[int]:
        """Leaf positions of arguments whose values decide which ops run, as a padding mask's do."""
        known = [read for read in self.reads if read.calls is not None]
        read = {b for one in known for i in one.calls or () for b in self.program.ops[i].inputs}
        read |= {one.ref.buffer for one in known}
        return {position for b, position in self.inputs.items() if b in read}

    def anchor(self, late: frozenset[Place], inside: frozenset[int] = frozenset()) -> None:
        """Anchor ops for later writes by others. Autograd gets the new values of saved buffers, so these may not be
        recomputed, or read for recomputation; unsaved arguments are gone by then, and not to be kept.
        """
        self.form = self.form or self.program.form()
        self.late, self.late_inside = self.late | late, self.late_inside | inside
        found = inside | self.buffers_at(late)
        self.written_later |= found
        saved = found & self.program.needed_buffers()
        given = {b for b in found - saved if self.program.buffers[b].source is not Source.OP}
        touched = {op.index for op in self.program.ops if saved.intersection((*op.inputs, *op.outputs))}
        self.anchor_ops(touched | {op.index for op in self.program.ops if given.intersection(op.inputs)})
        lost = found - saved - given
        buffers = tuple(replace(b, keepable=False) if b.index in lost else b for b in self.program.buffers)
        self.taps = {b: tap for b, tap in self.taps.items() if buffers[b].keepable}
        self.program = replace(self.program, buffers=buffers)

    def anchor_reads(self, names: Collection[str]) -> None:
        """Keep all results of these parameters and buffers, which are written to before backward."""
        moving = {b for b, name in self.names.items() if name in names}
        self.anchor_ops({op.index for op in self.program.ops if moving.intersection(op.inputs)})

    def anchor_detached(self, names: Collection[str]) -> None:
        """Keep all results of parameters that step inside of backward: only reads known to autograd precede that."""
        self.anchor_ops({op for op, name in self.detached.items() if name in names})
        self.detached = {op: name for op, name in self.detached.items() if name not in names}

    def anchor_ops(self, found: Collection[int]) -> None:
        """Keep all results of these ops, which are written to later."""
        if found:
            self.form = self.form or self.program.form()
            anchored = {op: replace(self.program.ops[op], anchor=Anchor.MUTATED) for op in found}
            ops = tuple(op if op.anchor else anchored.get(op.index, op) for op in self.program.ops)
            self.program = replace(self.program, ops=ops)

    def buffers_at(self, places: frozenset[Place]) -> frozenset[int]:
        """Buffers of some arguments and outputs."""
        found = {b for b, position in self.inputs.items() if (False, position) in places}
        for is_output, leaf in places:
            ref = self.output_leaves[leaf] if is_output and leaf < len(self.output_leaves) else None
            if isinstance(ref, TensorRef):
                found.add(ref.buffer)
        return frozenset(found)

    def share(self, positions: Collection[int]) -> None:
        """Note that arguments at these leaf positions are alive anyway, and cost this region nothing."""
        free = {b for b, position in self.inputs.items() if position in positions}
        buffers = tuple(replace(b, free=True) if b.index in free else b for b in self.program.buffers)
        self.program = replace(self.program, buffers=buffers)

    def likeness(self) -> str:
        """Equal for regions that run the same ops, with the same numbers, on the same views of similar tensors."""
        leaves = [leaf if isinstance(leaf, TensorRef) else described(leaf) for leaf in self.output_leaves]
        calls = [
            (str(c.func), described((c.args, c.kwargs)), c.outputs, c.written, c.state_in, c.under) for c in self.calls
        ]
        text = repr((self.program.digest(), calls, self.slots, self.inputs, self.names, leaves, self.reads))
        return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", text).encode()).hexdigest()

    @cached_property
    def casts(self) -> dict[int, str]:
        """Saved casts that autocast made and may have in its cache, each with the name of its parameter."""
        made = {ref.buffer: e.reads[0].buffer for e in self.sequence if e.skippable for ref in e.makes}
        return {ref.buffer: self.names[made[ref.buffer]] for ref in self.slots if ref.buffer in made}

    @property
    def draws(self) -> bool:
        """Whether the region uses a default random generator."""
        return bool(self.initial_states)


def signature_of(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[Any, ...]:
    """Signature that two runs must share: the op, its numbers, shape, stride and dtype of its results."""
    results = tuple((tuple(t.shape), layout(t), t.dtype) for t in op_leaves(out) if isinstance(t, Tensor))
    return func, results, tuple(repr(v) for v in op_leaves(args, kwargs) if isinstance(v, bool | int | float))


def layout(tensor: Tensor) -> tuple[int, ...]:
    """Strides of the dims with more than one element: two kernels may set the others differently."""
    return layout_of(tensor.shape, tensor.stride())


def layout_of(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    return tuple([s if n != 1 else 0 for n, s in zip(size, stride, strict=True)])


# tape -----------------------------------------------------------------------------------------------------------------
#
# NOTE [ Identity of a saved tensor ]
# A dispatch mode sees every ATen call below autograd; pack hooks see every tensor that autograd saves, above it. The
# two are matched by storage: a capture holds every storage that it has seen, so that no address is reused, and a tensor
# is (buffer, size, stride, storage offset, dtype). A transposed square matrix, an offset slice or an expanded row is
# therefore never mistaken for its base. An in-place write gives the storage a new version, which is a new buffer:
# earlier saves and reads refer to the old one.

ONLY_DENSE = "only dense tensors can be recorded: pad nested ones (to_padded_tensor), or train without a plan"
RNG_STATE_BYTES = {"cpu": 5056, "cuda": 16}

BY_HAND = "it moves torch's random generator by hand (a seed, a saved state, fork_rng)"
_GUESSED = "it decides by values that are not known before it runs"
_MADE_OF_NUMBERS = torch.ops.aten.lift_fresh.default
"""Op that `torch.tensor` and assignments of numbers apply to the tensor that they have just made."""
TargetOutput = tuple[tuple[int, int], ...]
"""Buffers that are overwritten, each with its successor."""


class SavedView(NamedTuple):
    """A saved tensor: its view, the op before it, the module; the tensor itself and its version then."""

    ref: TensorRef
    op: str
    path: str
    tensor: Tensor
    version: int
    after: int  # number of ops before it


class _Ran(NamedTuple):
    """An op that has run. ``given`` are its arguments with `TensorRef`s for tensors."""

    func: Any
    args: Any
    kwargs: Any
    given: tuple[Any, dict[str, Any]]
    out: Any
    numbers: bool  # it computes with a number that may have been read from the batch, and differ in the next


class OpRecorder:
    """The growing record of one region."""

    def __init__(
        self, module: nn.Module, inputs: list[Any], *, strict: bool = True, stream: bytes | None = None
    ) -> None:
        self.buffers: list[Buffer] = []
        self.ops: list[Op] = []
        self.calls: list[RecordedOp] = []
        self.names: dict[int, str] = {}
        self.named_at: dict[int, int] = {}
        self.made: dict[int, Tensor] = {}  # buffer -> a tensor made of Python's numbers
        self.path: list[str] = []
        self.initial_states: dict[str, int] = {}
        self.states: dict[str, int] = {}  # device -> buffer of its current random state
        self.state_broken = False
        self.lent: int | None = None  # during a loan, the CPU's state after it
        # the CPU generator's state unless something sets it
        self._stream: bytes | None = default_stream() if stream is None else stream
        self.entangled = False
        self.inside: Container[int] = ()  # storages of tensors inside of its arguments, such as caches
        self.versions: dict[int, list[int]] = {}  # storage -> all its buffers in order, parameters aside
        self.registered: dict[int, int] = {}  # storage of a module's buffer -> its buffer before any write
        self._current: dict[int, int] = {}  # storage -> its current buffer
        self._alive: list[tuple[Any, Tensor]] = []
        self._named: dict[int, tuple[str, int]] = {}  # storage -> name and offset, in bytes, of its first parameter
        for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
            if is_dense(tensor):
                begin = plain(tensor).storage_offset() * plain(tensor).element_size()
                self._named.setdefault(storage_of(tensor), (name, begin))
        self.module = module
        self.strict = strict  # whether unsupported ops raise; otherwise they are noted
        self.problem = ""
        self.slots: list[SavedView] = []
        self.taps: dict[int, Tap] = {}
        self.inputs: dict[int, int] = {}
        self.blocks: dict[int, tuple[int, int]] = {}
        self.given: dict[int, TensorRef] = {}
        # read here: while autocast casts an argument it counts as disabled
        self.autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        self.reads: list[tuple[TensorRef, Any, bool]] = []
        self.has_numbers = False  # Python has read some from tensors, and may compute with them
        self.sequence: list[Expected] = []
        self.overwritten: set[int] = set()  # buffers of others that were written to
        self.overtaken: set[int] = set()  # saved buffers that were written to afterwards
        self.writes: list[tuple[int, int]] = []  # (storage, nested calls before it)
        self.nested_at: list[int] = []  # for each call of a nested region, the number of ops before it
        self.unwritten: set[int] = set()  # buffers that no kernel writes
        self.asked: set[int] = set()  # slots that a backward inside the forward has read
        self.detached: dict[int, str] = {}  # op -> the trained parameter that it reads without its graph
        self._trained = {
            n for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad and plain(p) is p
        }
        self._switches = kernel_switches()
        for position, leaf in enumerate(inputs):
            if isinstance(leaf, Tensor) and not self.knows(leaf) and storage_of(leaf) not in self._named:
                b = self._new_buffer(leaf, Source.INPUT, name=str(position), keepable=True)
                self.inputs[b], self.given[b] = position, self.ref(leaf)

    @property
    def where(self) -> str:
        """Path of the running module, relative to the region."""
        return self.path[-1] if self.path else ""

    def tensors(self) -> list[Tensor]:
        """One tensor of each memory that the recording knows, which it keeps alive."""
        return [plain(tensor) for _, tensor in self._alive]

    def knows(self, tensor: Tensor) -> bool:
        """Whether it lies in memory that was seen before."""
        return is_dense(tensor) and storage_of(tensor) in self._current

    def ref(self, tensor: Tensor) -> TensorRef:
        """The tensor as a view of a known buffer; a tensor never seen before becomes a parameter or an outer buffer."""
        if not is_dense(tensor):
            raise TraceError(f"it computes with a tensor whose layout is {plain(tensor).layout}; {ONLY_DENSE}")
        storage = storage_of(tensor)
        index = self._current.get(storage)
        if index is None:
            name, offset = self._named.get(storage, (None, 0))
            if name is not None:
                index = self._new_buffer(tensor, Source.PARAMETER, name=name, free=True)
                self.names[index], self.named_at[index] = name, offset
                if not isinstance(tensor, nn.Parameter):
                    self.registered[storage] = index
            else:
                index = self._new_buffer(tensor, Source.OUTER)
                self.entangled = self.entangled or (plain(tensor).grad_fn is not None and storage not in self.inside)
        return TensorRef.of(index, tensor)

    def _new_buffer(self, tensor: Tensor, source: Source, **more: Any) -> int:
        tensor = plain(tensor)
        storage, key = tensor.untyped_storage(), storage_of(tensor)
        self._current[key] = index = self._add_buffer(storage.nbytes(), source, **more)
        self._alive.append((storage, tensor))
        if source is not Source.PARAMETER:
            self.versions.setdefault(key, []).append(index)
        return index

    def _add_buffer(self, nbytes: int, source: Source, **more: Any) -> int:
        self.buffers.append(Buffer(index=len(self.buffers), nbytes=nbytes, source=source, **more))
        return len(self.buffers) - 1

    def _keepable(self, buffer: int, keepable: bool = True) -> None:
        self.buffers[buffer] = replace(self.buffers[buffer], keepable=keepable)

    def _add_op(self, name: str, call: RecordedOp, inputs: Sequence[int], outputs: Sequence[int], **more: Any) -> None:
        more = {"index": len(self.ops), "flops": 0, "bytes_moved": 0, "path": self.where, **more}
        self.ops.append(Op(name=name, inputs=tuple(inputs), outputs=tuple(outputs), **more))
        self.calls.append(call)

    def _origin(self, buffer: int) -> tuple[set[int], set[int]]:
        """Calls that compute a buffer, and the buffers that they start from; Python's numbers do not count."""
        calls: set[int] = set()
        starts: set[int] = set()
        stack = [buffer]
        while stack:
            b = stack.pop()
            producer = self.buffers[b].producer
            if b in self.made or producer in calls:
                continue
            if producer is None:
                starts.add(b)
            else:
                calls.add(producer)
                stack.extend(self.ops[producer].inputs)
        return calls, starts

    def _is_constant(self, buffer: int) -> bool:
        """Whether it is only made of numbers that Python had anyway."""
        calls, starts = self._origin(buffer)
        return not starts and all(self.calls[i].state_in is None for i in calls)

    def _read(self, ref: TensorRef, found: Any, shape_only: bool) -> ValueRead | None:
        """The value that the forward reads there, to look up in other arguments. None for a constant one."""
        positions, starts = self._origin(ref.buffer)
        calls = [self.calls[i] for i in positions]
        written = [old for call in calls for old, _new in call.written]
        # a repeated call draws nothing, and writes at most to a result of another call
        repeats = all(c.state_in is None for c in calls) and all(self.buffers[b].producer is not None for b in written)
        if not repeats or any(self.buffers[b].source is not Source.INPUT for b in starts):
            return ValueRead(ref, found, shape_only, None)
        return ValueRead(ref, found, shape_only, tuple(sorted(positions))) if starts else None

    # random states ----------------------------------------------------------------------------------------------------

    def follows(self, device: str) -> bool:
        """Whether the state of a device's generator is tracked."""
        return not self.state_broken and (self.lent is None or device == "cpu")

    def move_state(self, move: Movement, device: str) -> tuple[int, int]:
        """Record an op that only moves the random state; buffers of the state before and after."""
        before, after = self._next_state(len(self.ops), device)
        call = RecordedOp(move.func, move.args, dict(move.kwargs), (), state_in=before, state_out=after, device=device)
        self._add_op(ADVANCE, call, (before,), (after,), bytes_moved=move.nbytes, price_key=move.price_key)
        return before, after

    def _next_state(self, op: int, device: str) -> tuple[int, int]:
        nbytes = RNG_STATE_BYTES.get(device, 5056)
        if device not in self.states:
            self.states[device] = self.initial_states[device] = self._add_buffer(nbytes, Source.RANDOM, keepable=True)
        before = self.states[device]
        self.states[device] = after = self._add_buffer(nbytes, Source.RANDOM, producer=op)
        return before, after

    def lend(self, borrowed: Movement, left: Movement) -> None:
        """Note that the default generators draw another stream from here on, until `take_back`: ``borrowed`` leads from
        the CPU's state to its first, ``left`` to the state after it. Other devices cannot be tracked: they go on.
        """
        if not self.follows("cpu") or self.lent is not None:
            self.state_broken = True
            return
        self.states["cpu"], self.lent = self.move_state(left, "cpu")
        self.move_state(borrowed, "cpu")

    def take_back(self) -> None:
        """End the loan. One that began before this region did has nothing to return to."""
        if self.lent is None:
            self.state_broken = True
        else:
            self.states["cpu"], self.lent, self._stream = self.lent, None, None

    # recording --------------------------------------------------------------------------------------------------------

    def refuse(self, problem: str) -> None:
        """Note a problem that no recipe supports; a strict recorder raises it as a `TraceError`."""
        if self.strict:
            raise TraceError(problem)
        self.problem = self.problem or problem

    def _require_own_stream(self) -> None:
        """Check that nothing but a loan has moved torch's generator: recording itself draws nothing."""
        if self.lent is not None or self.state_broken:
            return
        now = default_stream()
        if self._stream is None:  # a loan has drawn a number for its seed
            self._stream = now
        elif now != self._stream:
            self.refuse(BY_HAND)

    # tensors from outside --------------------------------------------------------------------------------------------

    def block_output(self, tensor: Tensor, call: int, leaf: int) -> None:
        """Note a tensor that a nested region returned."""
        self.state_broken = True
        if not self.knows(tensor):
            b = self._new_buffer(tensor, Source.BLOCK, name=f"{call}.{leaf}", keepable=True)
            self.blocks[b], self.given[b] = (call, leaf), self.ref(tensor)

    def saved(self, tensor: Tensor) -> int:
        """Note a tensor that autograd saved; returns its slot."""
        part = plain(tensor)
        if not is_dense(part):
            raise TraceError(f"it saves a tensor whose layout is {part.layout}; {ONLY_DENSE}")
        ref = self.ref(tensor)
        self.slots.append(
            SavedView(ref, self.ops[-1].name if self.ops else "", self.where, part, version_of(part), len(self.ops))
        )
        self._keepable(ref.buffer)
        return len(self.slots) - 1

    def boundary(self, path: str, call: int, is_output: bool, tree: Any) -> None:
        """Note tensors at a module boundary, which can be kept without a saved slot."""
        for leaf, tensor in enumerate(tree_leaves(tree)):
            if isinstance(tensor, Tensor) and self.knows(tensor):
                ref = self.ref(tensor)
                if self.buffers[ref.buffer].source is Source.OP and ref.buffer not in self.taps:
                    self.taps[ref.buffer] = Tap(path, call, is_output, leaf, ref)
                    self._keepable(ref.buffer)

    # ops --------------------------------------------------------------------------------------------------------------

    def call(self, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Run one op through ``run`` and record it, unless it only makes views."""
        of_numbers = func is _MADE_OF_NUMBERS and not isinstance(args[0], FakeTensor) and not self.knows(args[0])
        given = op_map(lambda leaf: self.ref(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        if of_numbers:
            self.made[given[0][0].buffer] = _values_of(args[0])
        pieces: dict[int, list[Tensor]] = {}  # by the overwritten buffer
        for tensor in op_traits.writes(func, args, kwargs):
            pieces.setdefault(self._current[storage_of(tensor)], []).append(tensor)
        out = run()
        if torch.Tag.data_dependent_output in func.tags:
            for tensor in _tensors(args, kwargs):
                self._read_value(tensor)
        ran = _Ran(func, args, kwargs, given, out, self.has_numbers and op_traits.takes_number(func, args, kwargs))
        makes: tuple[TensorRef, ...] = ()
        written: TargetOutput = ()
        if pieces or not all(map(self.knows, _tensors(out))):
            written = self._record(ran, pieces)
            makes = tuple(map(self.ref, _tensors(out)))
        if op_traits.computes(func, args, kwargs, out):
            self.sequence.append(self._expected(ran, makes, written))
        return out

    def _record(self, ran: _Ran, pieces: Mapping[int, list[Tensor]]) -> TargetOutput:
        func, args, kwargs, given, out, numbers = ran
        device = next((t.device.type for t in _tensors(out, args)), "cpu")
        anchor = op_traits.anchor_of(func, kwargs, given[0], device)
        random = anchor is not Anchor.GENERATOR and op_traits.draws(func, args, kwargs)
        if numbers:
            anchor = anchor or Anchor.OPAQUE
        if random:
            self._require_own_stream()
        state: tuple[int, int] | None = None
        if random and self.follows(device):
            move = movement_of(func, args, kwargs, out, device, numbers_known=anchor is None)
            state = None if move is None else self.move_state(move, device)
        statistics: TargetOutput = ()
        pure_args = op_traits.without_statistics(func, given[0]) if pieces else None
        if pure_args is not None:
            statistics, given, pieces = self._statistics(func, pieces), (pure_args, given[1]), {}
        empty = op_traits.made_by_shape(func, kwargs, out)
        if empty is not None:
            func, args, kwargs = empty
            given = args, kwargs
        index, inputs = len(self.ops), list(dict.fromkeys(ref.buffer for ref in _refs(given)))
        for ref, tensor in zip(_refs(ran.given), _tensors(ran.args, ran.kwargs), strict=True):
            name = self.names.get(ref.buffer, "")
            if not tensor.requires_grad and name in self._trained:
                self.detached[index] = name
        if any(self.buffers[b].source is not Source.OP for b in pieces):
            anchor = Anchor.MUTATED
        written = tuple((old, self._overwrite(old, parts, index)) for old, parts in pieces.items())
        if len(written) == 1 and isinstance(out, Tensor) and func._schema.returns[0].alias_info is not None:
            # a real tensor that something fake was written into: the result is fake, and the same memory
            self._current.setdefault(storage_of(out), written[0][1])
            self._alive.append((out.untyped_storage(), out))
        outputs = [new for _old, new in written]
        refs = self._results(out, outputs, index)
        self._reads_of_shapes(func, args, refs)
        if random and state is None:
            if not self.follows(device):
                anchor = anchor or Anchor.OPAQUE
            elif anchor is not None:  # it moves the state by values that will not be available
                self.state_broken = True
            else:
                state = self._next_state(index, device)
                outputs.append(state[1])
        before, after = state or (None, None)
        if before is not None:
            inputs.append(before)
        self.unwritten.update(self.ref(t).buffer for t in op_traits.unwritten_results(func, args, kwargs, out))
        flops, moved = op_traits.op_cost(func, args, kwargs, out)
        switches = kernel_switches()
        under = None if switches == self._switches else switches
        call = RecordedOp(func, tuple(given[0]), given[1], tuple(refs), written, before, after, device, under)
        price = op_traits.price_key(func, *given)
        self._add_op(str(func), call, inputs, outputs, flops=flops, bytes_moved=moved, price_key=price, anchor=anchor)
        return (*statistics, *written)

    def _results(self, out: Any, outputs: list[int], op: int) -> list[TensorRef | None]:
        """Views of the results on memory that an op wrote or allocated; new buffers are added to ``outputs``."""
        refs: list[TensorRef | None] = []
        for leaf in op_leaves(out):
            if isinstance(leaf, Tensor) and not self.knows(leaf):
                outputs.append(self._new_buffer(leaf, Source.OP, producer=op))
            ref = self.ref(leaf) if isinstance(leaf, Tensor) else None
            refs.append(ref if ref is not None and ref.buffer in outputs else None)
        return refs

    def _expected(self, ran: _Ran, makes: tuple[TensorRef, ...], written: TargetOutput) -> Expected:
        func, args, kwargs, given, out, numbers = ran
        reads = tuple(_refs(given))
        places = {ref.buffer: place for place, ref in enumerate(reads)}
        of_autocast = self.autocast and func._schema.name == "aten::_to_copy"
        return Expected(
            signature_of(func, args, kwargs, out),
            reads,
            makes,
            tuple((places[old], new) for old, new in written if old in places),
            of_autocast and self.buffers[given[0][0].buffer].source is Source.PARAMETER,
            not numbers,
        )

    # writes -----------------------------------------------------------------------------------------------------------

    def _overwrite(self, old: int, parts: Sequence[Tensor], op: int) -> int:
        """Successor of a buffer that an op writes to."""
        self.writes.append((storage_of(parts[0]), len(self.nested_at)))
        if self.buffers[old].source is not Source.OP:
            return self._overwrite_of_others(old, parts[0], op)
        new = self._new_buffer(parts[0], Source.OP, producer=op)
        held = [(i, saved) for i, saved in enumerate(self.slots) if saved.ref.buffer == old]
        places = [self.ref(t) for t in parts]
        if any(
            version_of(saved.tensor) != saved.version or not all(are_apart(saved.ref, place) for place in places)
            for _i, saved in held
        ):  # autograd holds it with its new values, and it may not be recomputed or read
            self.overtaken.add(old)
            return new
        # the saved part is left alone: pieces of memory with their own version counters (``unsafe_chunk``, as in
        # recurrent cells). Its slots are then the new buffer's, which has the same values there
        for i, saved in held:
            self.slots[i] = saved._replace(ref=replace(saved.ref, buffer=new))
            self._keepable(new)
        self._keepable(old, False)
        self.taps.pop(old, None)
        return new

    def _overwrite_of_others(self, old: int, tensor: Tensor, op: int) -> int:
        self.overwritten.add(old)
        new = self._new_buffer(tensor, Source.OP, producer=op)
        if old in self.names:
            self.names[new] = self.names[old]
        return new

    def _statistics(self, func: Any, pieces: Mapping[int, list[Tensor]]) -> TargetOutput:
        """Record a batch norm's running statistics as an op of their own, which is never recomputed."""
        index = len(self.ops)
        written = tuple((old, self._overwrite_of_others(old, parts[0], index)) for old, parts in pieces.items())
        made = [new for _old, new in written]
        call = RecordedOp(func, (), {}, (), written)
        self._add_op(f"{func}, its running statistics", call, tuple(pieces), made, anchor=Anchor.MUTATED)
        return written

    # values that decisions depend on ---------------------------------------------------------------------------------

    def _reads_of_shapes(self, func: Any, args: Any, refs: Sequence[TensorRef | None]) -> None:
        name = func._schema.name
        if name == "aten::_ctc_loss":  # by the lengths, and by no computed value
            for lengths in args[2:4]:
                if isinstance(lengths, Tensor):
                    self._note_read(lengths)
            return
        if name == "aten::masked_select":
            self._read_value(args[1])
            return
        if name == "aten::index":  # writing by a mask makes no shape
            deciding = [t for t in _tensors(args[1:2]) if t.dtype in (torch.bool, torch.uint8)]
        else:
            deciding = _tensors(args) if torch.Tag.dynamic_output_shape in func.tags else []
        if any(isinstance(plain(t), FakeTensor) for t in deciding):
            self.refuse(_GUESSED)
        elif deciding:
            self.has_numbers = True
            self.reads.extend((ref, ref.size, True) for ref in refs if ref is not None)

    def _read_value(self, tensor: Tensor) -> None:
        """Note that an op, or Python, depends on the values of this tensor."""
        if isinstance(plain(tensor), FakeTensor):
            self.refuse(_GUESSED)
        elif not self._is_constant(self.ref(tensor).buffer):
            self._note_read(tensor)

    def _note_read(self, tensor: Tensor) -> None:
        # one truth is decided by; a computation with it uses 0 or 1, and is recorded for each
        self.has_numbers = self.has_numbers or tensor.dtype is not torch.bool or tensor.numel() > 1
        self.reads.append((self.ref(tensor), _values_of(tensor), False))

    def read_by_hand(self, tensor: Tensor) -> None:
        """Note that Python read a tensor's values without an op (``tolist``, ``numpy``)."""
        if type(plain(tensor)) is FakeTensor:
            raise UnsupportedOperatorException("Python asks for its memory (data_ptr, DLPack)")
        if self.knows(tensor) and not self._is_constant(self.ref(tensor).buffer):
            self._note_read(tensor)

    # the end ----------------------------------------------------------------------------------------------------------

    def finish(self, output: Any) -> RegionTrace:
        self._require_own_stream()
        leaves, spec = tree_flatten(output)
        output_leaves = [self.ref(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        asked = {saved.ref.buffer for i, saved in enumerate(self.slots) if i in self.asked}
        reads = tuple(read for found in self.reads if (read := self._read(*found)) is not None)
        program = Program(
            buffers=tuple(self.buffers),
            ops=tuple(self._anchored(op, asked) for op in self.ops),
            slots=tuple(
                Slot(index=i, buffer=ref.buffer, shape=ref.size, dtype=str(ref.dtype)[6:], op=op, path=path)
                for i, (ref, op, path, *_) in enumerate(self.slots)
            ),
            outputs=tuple(r.buffer for r in output_leaves if isinstance(r, TensorRef)),
        )
        if any(read.calls is None for read in reads) and not self.strict:
            self.refuse("it decides by numbers that are not read out of its arguments")
        return RegionTrace(
            program=program,
            slots=[saved.ref for saved in self.slots],
            saved_after=tuple(saved.after for saved in self.slots),
            output_leaves=output_leaves,
            output_spec=spec,
            constants=frozenset(self.ref(t).buffer for t in leaves if isinstance(t, Tensor) and not t.requires_grad),
            reads=reads,
            unwritten=frozenset(self.unwritten),
            overwritten=frozenset(self.overwritten),
            asked=frozenset(self.inputs[b] for b in asked if b in self.inputs),
            **{name: getattr(self, name) for name in _AS_RECORDED},
        )

    def _anchored(self, op: Op, asked: set[int]) -> Op:
        """Anchor an op that may not be recomputed because of a later write."""
        if op.anchor is not None:
            return op
        if self.overwritten.intersection(op.inputs) or self.overtaken.intersection((*op.inputs, *op.outputs)):
            return replace(op, anchor=Anchor.MUTATED)
        return replace(op, anchor=Anchor.ASKED) if asked.intersection(op.outputs) else op


_AS_RECORDED = (
    *("problem", "calls", "taps", "inputs", "names", "sequence", "initial_states", "blocks", "given", "named_at"),
    *("made", "entangled", "detached"),
)
"""Fields of a `RegionTrace` that the recorder has under the same names."""


def _tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in op_leaves(*values) if isinstance(leaf, Tensor)]


def _refs(given: tuple[Any, Any]) -> list[TensorRef]:
    return [leaf for leaf in op_leaves(*given) if isinstance(leaf, TensorRef)]


def _values_of(tensor: Tensor) -> Tensor:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return tensor.detach().clone()


# pieces of one memory: whether two views of it overlap ----------------------------------------------------------------


def are_apart(a: TensorRef, b: TensorRef) -> bool:
    """Whether two views of one memory surely have no element in common: disjoint boxes of one grid."""
    if a.dtype is not b.dtype:
        return False
    sizes: dict[int, list[int]] = {}  # by stride, largest first
    for place, ref in enumerate((a, b)):
        for n, step in zip(ref.size, ref.stride, strict=True):
            if n == 0:
                return True
            if n > 1:
                found = sizes.setdefault(step, [1, 1])
                if step < 1 or found[place] > 1:
                    return False  # several dims have this stride: no grid
                found[place] = n
    starts = [a.offset, b.offset]
    meets, room = True, None
    for step in sorted(sizes, reverse=True):
        at = [start // step for start in starts]
        starts = [start % step for start in starts]
        lengths = sizes[step]
        if room is not None and any(
            room % step or first + n > room // step for first, n in zip(at, lengths, strict=True)
        ):
            return False  # one wraps into the next row
        meets = meets and at[0] < at[1] + lengths[1] and at[1] < at[0] + lengths[0]
        room = step
    return not meets or starts[0] != starts[1]
