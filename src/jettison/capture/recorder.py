"""Capture: run a region once and write down its ATen ops, its buffers, and what autograd saved of them.

NOTE [ Identity of a saved tensor ]
A dispatch mode sees every ATen call below autograd; pack hooks see every tensor that autograd saves, above it. The
two are
matched by storage: while a capture lasts it holds every storage that it has seen, so that no address is used twice,
and a
tensor is (buffer, size, stride, storage offset, dtype). A transposed square matrix, an offset slice or an expanded
row is
therefore never mistaken for its base. An in-place write gives the storage a new version, which is a new buffer: whoever
saved or read the old one refers to the old one.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from jettison.capture.described import described
from jettison.capture.opinfo import (
    anchor_of,
    computes,
    draws,
    hollow_results,
    is_bookkeeping,
    op_cost,
    price_key,
    takes_number,
    without_statistics,
    writes,
)
from jettison.capture.pieces import are_apart
from jettison.capture.randomness import ADVANCE, Movement, movement_of
from jettison.capture.signature import Switches, kernel_switches
from jettison.capture.streams import default_stream
from jettison.capture.trees import op_leaves, op_map, tree_flatten, tree_leaves
from jettison.capture.wrapped import Wrapping, desugars, infers_shapes, plain, storage_of, wrapping
from jettison.errors import TraceError
from jettison.ledger.program import Anchor, Buffer, Op, Program, Slot, Source

_GUESSED = "it decides by values that are not known before it runs"
RNG_STATE_BYTES = {"cpu": 5056, "cuda": 16}


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as a view of a buffer; ``offset`` in elements from the start of the storage.

    Of a DTensor this is the part inside; ``wrap`` puts it back. ``conj`` and ``neg``: the view is seen through a
    conjugation or a change of sign that nobody has carried out.
    """

    buffer: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    wrap: Wrapping | None = None
    conj: bool = False
    neg: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """A value that left tensors for Python: how the tensor is seen, and what was found in it.

    ``shape_only``: an op whose output's shape hangs on values was run, and ``found`` is that shape. ``calls`` compute
    the tensor out of the region's arguments, by position among its calls; None where it is made of something else.
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
class Call:
    """How a recorded op is called again. Tensors in ``args`` and ``kwargs`` are `TensorRef`s.

    ``outputs`` lines up with the op's flat tensor outputs; None where an output is a view or not a tensor.
    ``written`` maps each buffer that the op overwrites to the buffer that it becomes. ``state_out`` is often the output
    of another op, which moves the state and does nothing else: NOTE [ The state moves by shape ] in randomness.py.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorRef | None, ...]
    written: tuple[tuple[int, int], ...] = ()
    state_in: int | None = None
    state_out: int | None = None
    device: str = "cpu"
    under: Switches | None = None  # where the forward had put kernel switches; None where they stood as at its start


@dataclass(frozen=True, slots=True)
class Expected:
    """What the check of a run waits for: a call's `signature_of`, and the buffers that it reads, writes and makes.

    ``reads`` lines up with the call's flat tensor arguments, ``makes`` with its flat tensor results. ``writes`` pairs
    a position among the arguments with the buffer that it becomes. ``skippable``: a cast that autocast may have cached.
    ``numbers``: whether its plain numbers are those of the recording, and not read out of the batch.
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
    """A captured region: the pure `Program`, and what is needed to run parts of it again."""

    program: Program
    calls: list[Call]
    slots: list[TensorRef]
    taps: dict[int, Tap]
    inputs: dict[int, int]  # buffer -> leaf position of the region's flattened arguments
    names: dict[int, str]  # buffer -> dotted name of the parameter or registered buffer
    output_leaves: list[Any]  # TensorRef, or the value itself, in the order of the flattened output
    output_spec: Any
    sequence: list[Expected] = field(default_factory=list)
    initial_states: dict[str, int] = field(default_factory=dict)  # device -> buffer of its random state at the start
    blocks: dict[int, tuple[int, int]] = field(default_factory=dict)  # buffer -> (nested call, output leaf)
    given: dict[int, TensorRef] = field(default_factory=dict)  # buffer -> the argument, or what a nested call returned
    named_at: dict[int, int] = field(default_factory=dict)  # buffer -> offset of the parameter in its storage
    constants: frozenset[int] = frozenset()  # buffers of outputs that want no gradient
    reads: tuple[Read, ...] = ()  # what must be found in the arguments for the recording to hold
    made: dict[int, Tensor] = field(default_factory=dict)  # buffer -> what Python's numbers made
    effects: str = ""  # what of Python's state a run changes, in words; such a run must not be repeated
    problem: str = ""  # why nothing may be computed again by it; it then only says what is saved
    hollow: frozenset[int] = frozenset()  # buffers that no kernel writes: their bits are chance, and nobody's
    entangled: bool = False  # it reads a tensor with a graph that is none of its arguments
    overwritten: frozenset[int] = frozenset()  # buffers of others that it writes to
    late: frozenset[Place] = frozenset()  # arguments and outputs that others write to before backward
    late_inside: frozenset[int] = frozenset()  # the same of its buffers
    form: str = ""  # the program's, before anything was anchored for what others write
    asked: frozenset[int] = frozenset()  # leaf positions of arguments that a backward inside the forward reads

    def anchor(self, late: frozenset[Place], inside: frozenset[int] = frozenset()) -> None:
        """What somebody else writes to later. Of what is saved autograd gets what it holds by then, so nobody may
        compute that, or with that; of what is not saved, arguments are not there any more to compute with, and nothing
        is to be held.
        """
        self.form = self.form or self.program.form()
        self.late, self.late_inside = self.late | late, self.late_inside | inside
        found = set(inside) | {b for b, position in self.inputs.items() if (False, position) in late}
        for is_output, leaf in late:
            ref = self.output_leaves[leaf] if is_output and leaf < len(self.output_leaves) else None
            if isinstance(ref, TensorRef):
                found.add(ref.buffer)
        saved = found & self.program.needed_buffers()
        given = {b for b in found - saved if self.program.buffers[b].source is not Source.OP}
        ops = tuple(
            replace(op, anchor=op.anchor or Anchor.MUTATED)
            if saved.intersection((*op.inputs, *op.outputs)) or given.intersection(op.inputs)
            else op
            for op in self.program.ops
        )
        buffers = tuple(
            replace(b, keepable=False) if b.index in found - saved - given else b for b in self.program.buffers
        )
        self.taps = {b: tap for b, tap in self.taps.items() if buffers[b].keepable}
        self.program = replace(self.program, ops=ops, buffers=buffers)

    def likeness(self) -> str:
        """Equal for regions that run the same ops, with the same numbers, on the same views of alike tensors."""
        leaves = [leaf if isinstance(leaf, TensorRef) else described(leaf) for leaf in self.output_leaves]
        calls = [
            (str(c.func), described((c.args, c.kwargs)), c.outputs, c.written, c.state_in, c.under) for c in self.calls
        ]  # fmt: skip
        text = repr((self.program.digest(), calls, self.slots, self.inputs, self.names, leaves, self.reads))
        return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", text).encode()).hexdigest()

    @property
    def draws(self) -> bool:
        """Whether the region uses a default random generator."""
        return bool(self.initial_states)


class ValuesRead(TraceError):
    """Python wants the values of a fake tensor."""


class Recorder:
    """The growing record of one region."""

    def __init__(
        self, module: nn.Module, inputs: list[Any], *, strict: bool = True, stream: bytes | None = None
    ) -> None:  # fmt: skip
        self.module = module
        self.strict = strict  # what cannot be held is an error; else it is noted
        self.problem = ""
        self.buffers: list[dict[str, Any]] = []
        self.ops: list[dict[str, Any]] = []
        self.calls: list[Call] = []
        self.slots: list[TensorRef] = []
        self.slot_info: list[tuple[int, str]] = []
        self._saved: list[tuple[Tensor, int]] = []  # by slot: the tensor and its version
        self.taps: dict[int, Tap] = {}
        self.inputs: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.blocks: dict[int, tuple[int, int]] = {}
        self.given: dict[int, TensorRef] = {}
        self.path: list[str] = []
        # asked here: while autocast casts an argument it counts as switched off
        self.autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        self.initial_states: dict[str, int] = {}
        self.states: dict[str, int] = {}  # device -> buffer of its random state now
        self.state_broken = False
        self.reads: list[tuple[TensorRef, Any, bool]] = []
        self.has_numbers = False  # Python has some out of tensors, and may compute with them
        self.made: dict[int, Tensor] = {}  # buffer -> what Python's numbers made
        self.entangled = False
        self.lent: int | None = None  # while somebody else's numbers are drawn: the CPU's state for after that
        self.sequence: list[Expected] = []
        self.overtaken: set[int] = set()  # saved buffers that were written to afterwards
        self.versions: dict[int, list[int]] = {}  # storage -> all buffers that it was, parameters aside
        self.writes: list[tuple[int, int]] = []  # (storage, nested calls before it)
        self.nested_at: list[int] = []  # for each call of a nested region, the number of ops before it
        self.hollow: set[int] = set()  # buffers that no kernel writes
        self.asked: set[int] = set()  # slots that a backward inside the forward has read
        self._stream: bytes | None = default_stream() if stream is None else stream
        self._switches = kernel_switches()
        self._current: dict[int, int] = {}
        self._alive: list[Any] = []
        self._named: dict[int, str] = {}
        self._named_at: dict[int, int] = {}
        self.named_at: dict[int, int] = {}
        for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
            if self._named.setdefault(storage_of(tensor), name) == name:
                self._named_at[storage_of(tensor)] = plain(tensor).storage_offset()
        for position, leaf in enumerate(inputs):
            if isinstance(leaf, Tensor):
                self._input(leaf, position)

    @property
    def where(self) -> str:
        """Path of the module that runs now, relative to the region."""
        return self.path[-1] if self.path else ""

    def _input(self, tensor: Tensor, position: int) -> None:
        key = storage_of(tensor)
        if key in self._current or key in self._named:
            return
        b = self._new_buffer(plain(tensor), Source.INPUT, name=str(position), keepable=True)
        self.inputs[b] = position
        self.given[b] = self.ref(tensor)

    def _new_buffer(self, tensor: Tensor, source: Source, **more: Any) -> int:
        storage = tensor.untyped_storage()
        index = len(self.buffers)
        self.buffers.append({"index": index, "nbytes": storage.nbytes(), "source": source, **more})
        self._alive.append((storage, tensor))
        self._current[_storage_key(tensor)] = index
        if source is not Source.PARAMETER:
            self.versions.setdefault(_storage_key(tensor), []).append(index)
        return index

    def tensors(self) -> list[Tensor]:
        """One of each memory that the recording knows, which it keeps alive."""
        return [plain(tensor) for _, tensor in self._alive]

    def ref(self, tensor: Tensor) -> TensorRef:
        """The tensor as a view of a known buffer; a tensor never seen before becomes a parameter or an outer buffer."""
        wrap = wrapping(tensor)
        tensor = plain(tensor)
        key = _storage_key(tensor)
        index = self._current.get(key)
        if index is None:
            name = self._named.get(key)
            if name is not None:
                index = self._new_buffer(tensor, Source.PARAMETER, name=name, free=True)
                self.names[index] = name
                self.named_at[index] = self._named_at[key]
            else:
                index = self._new_buffer(tensor, Source.OUTER)
                self.entangled = self.entangled or tensor.grad_fn is not None
        return TensorRef(
            index, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype, wrap,
            tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip

    def block_output(self, tensor: Tensor, call: int, leaf: int) -> None:
        """A nested region made this tensor."""
        if storage_of(tensor) not in self._current:
            b = self._new_buffer(plain(tensor), Source.BLOCK, name=f"{call}.{leaf}", keepable=True)
            self.blocks[b] = (call, leaf)
            self.given[b] = self.ref(tensor)
        self.state_broken = True

    def saved(self, tensor: Tensor) -> int:
        """Autograd saved this tensor; its slot."""
        if plain(tensor).layout is not torch.strided:
            raise TraceError(f"it saves a tensor whose layout is {plain(tensor).layout}")
        ref = self.ref(tensor)
        self.slots.append(ref)
        self.slot_info.append((len(self.ops) - 1, self.where))
        self._saved.append((plain(tensor), plain(tensor)._version))
        self.buffers[ref.buffer]["keepable"] = True
        return len(self.slots) - 1

    def _spares_what_is_saved(self, old: int, new: int, written: Sequence[Tensor]) -> bool:
        """Whether a write leaves alone what autograd holds of a buffer: pieces of one memory whose versions are counted
        apart (``unsafe_chunk``, as recurrent cells do). The slots are the new buffer's then: it holds the same there.
        """
        held = [i for i, ref in enumerate(self.slots) if ref.buffer == old]
        places = [self.ref(t) for t in written]
        for i in held:
            tensor, version = self._saved[i]
            if tensor._version != version or not all(are_apart(self.slots[i], place) for place in places):
                return False
        for i in held:
            self.slots[i] = replace(self.slots[i], buffer=new)
            self.buffers[new]["keepable"] = True
        return True

    def boundary(self, path: str, call: int, is_output: bool, tree: Any) -> None:
        """Tensors that cross a module boundary can be held without a saved slot."""
        for leaf, tensor in enumerate(tree_leaves(tree)):
            if isinstance(tensor, Tensor) and storage_of(tensor) in self._current:
                ref = self.ref(tensor)
                if self.buffers[ref.buffer]["source"] is Source.OP and ref.buffer not in self.taps:
                    self.taps[ref.buffer] = Tap(path, call, is_output, leaf, ref)
                    self.buffers[ref.buffer]["keepable"] = True

    def call(self, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Run one op through ``run`` and record it, unless it only makes views."""
        made_here = (
            func is _MADE_OF_NUMBERS
            and not isinstance(args[0], FakeTensor)
            and _storage_key(args[0]) not in self._current
        )
        spec_args, spec_kwargs = op_map(self._spec, (args, kwargs))
        if made_here:
            self.made[spec_args[0].buffer] = _values_of(args[0])
        pure_args = without_statistics(func, spec_args)
        written_tensors = writes(func, args, kwargs)
        pieces: dict[int, list[Tensor]] = {}  # by the buffer that is overwritten
        for t in written_tensors:
            pieces.setdefault(self._current[_storage_key(t)], []).append(t)
        out = run()
        if torch.Tag.data_dependent_output in func.tags:
            for leaf in op_leaves(args, kwargs):
                if isinstance(leaf, Tensor):
                    self._read_value(leaf)
        expected = None
        if computes(func, args, kwargs, out):
            expected = len(self.sequence)
            reads = tuple(leaf for leaf in op_leaves(spec_args, spec_kwargs) if isinstance(leaf, TensorRef))
            numbers = not (self.has_numbers and takes_number(func, args, kwargs))
            self.sequence.append(
                Expected(
                    signature_of(func, args, kwargs, out), reads, (), (), self._is_weight_cast(func, spec_args), numbers
                )
            )
        out_leaves = op_leaves(out)
        fresh = [t for t in out_leaves if isinstance(t, Tensor) and _storage_key(t) not in self._current]
        if not fresh and not written_tensors:
            return out
        device = next((t.device.type for t in op_leaves(out_leaves, args) if isinstance(t, Tensor)), "cpu")
        anchor = anchor_of(func, kwargs, spec_args, device)
        random = anchor is not Anchor.GENERATOR and draws(func, args, kwargs)
        if anchor is None and self.has_numbers and takes_number(func, args, kwargs):
            anchor = Anchor.OPAQUE  # the number may have come out of the batch, and be another one in the next
        if random:
            self._require_own_stream()
        state_in = state_out = None
        if random and self.follows(device):
            move = movement_of(func, args, kwargs, out, device, numbers_known=anchor is None)
            if move is not None:
                state_in, state_out = self.move_state(move, device)
        moved_statistics: tuple[tuple[int, int], ...] = ()
        if pure_args is not None and written_tensors:
            moved_statistics = self._statistics(func, pieces)
            spec_args, pieces = pure_args, {}
        index = len(self.ops)
        inputs = list(dict.fromkeys(r.buffer for r in op_leaves(spec_args, spec_kwargs) if isinstance(r, TensorRef)))
        outputs: list[int] = []
        written: list[tuple[int, int]] = []
        for old, parts in pieces.items():
            self.writes.append((_storage_key(parts[0]), len(self.nested_at)))
            new = self._new_buffer(parts[0], Source.OP, producer=index)
            if self.buffers[old]["source"] is not Source.OP:
                anchor = Anchor.MUTATED
                self.buffers[old]["overwritten"] = True
                if old in self.names:
                    self.names[new] = self.names[old]
            elif self._spares_what_is_saved(old, new, parts):  # whoever held it would hold the new values
                self.buffers[old]["keepable"] = False
                self.taps.pop(old, None)
            else:  # autograd holds it, new values and all, and nobody may compute it or with it
                self.overtaken.add(old)
            written.append((old, new))
            outputs.append(new)
        if len(written) == 1 and isinstance(out, Tensor) and func._schema.returns[0].alias_info is not None:
            # a real tensor that something fake was written into: what comes back is fake, and the same memory
            self._current.setdefault(_storage_key(out), written[0][1])
            self._alive.append((out.untyped_storage(), out))
        refs: list[TensorRef | None] = []
        for t in out_leaves:
            if isinstance(t, Tensor) and _storage_key(t) not in self._current:
                outputs.append(self._new_buffer(t, Source.OP, producer=index))
            refs.append(self.ref(t) if isinstance(t, Tensor) and self.ref(t).buffer in outputs else None)
        self._reads_of_shapes(func, args, refs)
        if expected is not None:
            entry = self.sequence[expected]
            places = {leaf.buffer: place for place, leaf in enumerate(entry.reads)}
            self.sequence[expected] = replace(
                entry, makes=tuple(self.ref(t) for t in out_leaves if isinstance(t, Tensor)),
                writes=tuple((places[old], new) for old, new in (*moved_statistics, *written) if old in places),
            )  # fmt: skip
        if random and state_in is None:
            if not self.follows(device):
                anchor = anchor or Anchor.OPAQUE
            elif anchor is not None:  # it moves the state by values that will not be there
                self.state_broken = True
            else:
                state_in, state_out = self._next_state(index, device)
                outputs.append(state_out)
        if state_in is not None:
            inputs.append(state_in)
        self.hollow.update(self.ref(t).buffer for t in hollow_results(func, args, kwargs, out))
        flops, moved = op_cost(func, args, kwargs, out)
        self.ops.append(
            {
                "index": index, "name": str(func), "inputs": tuple(inputs), "outputs": tuple(outputs), "flops": flops,
                "bytes_moved": moved, "path": self.where, "price_key": price_key(func, spec_args, spec_kwargs),
                "anchor": anchor,
            }
        )  # fmt: skip
        self.calls.append(
            Call(
                func, tuple(spec_args), spec_kwargs, tuple(refs), tuple(written), state_in, state_out, device,
                None if (switches := kernel_switches()) == self._switches else switches,
            )
        )  # fmt: skip
        return out

    def _statistics(self, func: Any, pieces: Mapping[int, list[Tensor]]) -> tuple[tuple[int, int], ...]:
        """A batch norm moves its running statistics: an op of its own, which never runs again. The rest of it may."""
        index, outputs = len(self.ops), []
        for old, parts in pieces.items():
            self.buffers[old]["overwritten"] = True
            outputs.append(self._new_buffer(parts[0], Source.OP, producer=index))
            if old in self.names:
                self.names[outputs[-1]] = self.names[old]
        self.ops.append(
            {
                "index": index, "name": f"{func}, its running statistics", "inputs": tuple(pieces),
                "outputs": tuple(outputs), "flops": 0, "bytes_moved": 0, "path": self.where, "anchor": Anchor.MUTATED,
            }
        )  # fmt: skip
        written = tuple(zip(pieces, outputs, strict=True))
        self.calls.append(Call(func, (), {}, (), written))
        return written

    def _require_own_stream(self) -> None:
        """Recording draws nothing: whoever moves torch's generator meanwhile does so by hand. A loan is known."""
        if self.lent is not None or self.state_broken:
            return
        now = default_stream()
        if self._stream is None:  # a loan has taken a number for its seed
            self._stream = now
        elif now != self._stream:
            self.refuse("it moves torch's random generator by hand (a seed, a saved state, fork_rng)")

    def refuse(self, problem: str) -> None:
        """No recipe can hold this.

        Raises:
            TraceError: always, if this is a strict recorder.
        """
        if self.strict:
            raise TraceError(problem)
        self.problem = self.problem or problem

    def _reads_of_shapes(self, func: Any, args: Any, refs: list[TensorRef | None]) -> None:
        if func._schema.name == "aten::_ctc_loss":  # by the lengths, and by nothing that is computed
            for lengths in args[2:4]:
                if isinstance(lengths, Tensor):
                    self._note_read(lengths)
            return
        if func._schema.name == "aten::masked_select":
            self._read_value(args[1])
            return
        if func._schema.name == "aten::index":  # writing by a mask makes no shape
            masks = (torch.bool, torch.uint8)
            deciding = [t for t in op_leaves(args[1:2]) if isinstance(t, Tensor) and t.dtype in masks]
        else:
            dynamic = torch.Tag.dynamic_output_shape in func.tags
            deciding = [t for t in op_leaves(args) if isinstance(t, Tensor)] if dynamic else []
        if any(isinstance(plain(t), FakeTensor) for t in deciding):
            self.refuse(_GUESSED)
        elif deciding:
            self.has_numbers = True
            self.reads.extend((ref, ref.size, True) for ref in refs if ref is not None)

    def _read_value(self, tensor: Tensor) -> None:
        """An op, or Python, went by what is in this tensor."""
        if isinstance(plain(tensor), FakeTensor):
            self.refuse(_GUESSED)
        elif not self._is_constant(self.ref(tensor).buffer):
            self._note_read(tensor)

    def _note_read(self, tensor: Tensor) -> None:
        # one truth is decided by; whoever computes with it does so with 0 or 1, and is recorded for each
        self.has_numbers = self.has_numbers or tensor.dtype is not torch.bool or tensor.numel() > 1
        self.reads.append((self.ref(tensor), _values_of(tensor), False))

    def _is_constant(self, buffer: int) -> bool:
        """Whether it is made of nothing but numbers that Python had anyway."""
        stack, seen = [buffer], {buffer}
        while stack:
            b = stack.pop()
            index = self.buffers[b].get("producer")
            if b in self.made:
                continue
            if index is None or self.calls[index].state_in is not None:
                return False
            stack.extend(new := set(self.ops[index]["inputs"]) - seen)
            seen |= new
        return True

    def read_by_hand(self, tensor: Tensor) -> None:
        """Python got at a tensor's values in a way that no op tells (``tolist``, ``numpy``)."""
        if type(plain(tensor)) is FakeTensor:
            raise ValuesRead("it reads values out of a tensor (tolist, numpy)")
        if storage_of(tensor) in self._current and not self._is_constant(self.ref(tensor).buffer):
            self._note_read(tensor)

    def _spec(self, leaf: Any) -> Any:
        return self.ref(leaf) if isinstance(leaf, Tensor) else leaf

    def _is_weight_cast(self, func: Any, spec_args: Any) -> bool:
        if func._schema.name != "aten::_to_copy" or not self.autocast:
            return False
        return self.buffers[spec_args[0].buffer]["source"] is Source.PARAMETER

    def move_state(self, move: Movement, device: str) -> tuple[int, int]:
        """Record what moves the random state and does nothing else; buffers of the state before and after."""
        index = len(self.ops)
        before, after = self._next_state(index, device)
        self.ops.append(
            {
                "index": index, "name": ADVANCE, "inputs": (before,), "outputs": (after,), "flops": 0,
                "bytes_moved": move.nbytes, "path": self.where, "price_key": move.price_key,
            }
        )  # fmt: skip
        self.calls.append(
            Call(move.func, move.args, dict(move.kwargs), (), state_in=before, state_out=after, device=device)
        )
        return before, after

    def follows(self, device: str) -> bool:
        """Whether the state of a device's generator is known here."""
        return not self.state_broken and (self.lent is None or device == "cpu")

    def lend(self, borrowed: Movement, left: Movement) -> None:
        """The default generators draw another stream from here on, until `take_back`.

        On other devices than the CPU it cannot be followed; they go on as before afterwards.

        Args:
            borrowed: from the CPU's state to the first of that stream.
            left: from the CPU's state to the one after the loan.
        """
        if not self.follows("cpu") or self.lent is not None:
            self.state_broken = True
            return
        before, after = self.move_state(left, "cpu")
        self.states["cpu"], self.lent = before, after
        self.move_state(borrowed, "cpu")

    def take_back(self) -> None:
        """The loan ends. One that began before this region did has nothing to come back to."""
        if self.lent is None:
            self.state_broken = True
        else:
            self.states["cpu"], self.lent, self._stream = self.lent, None, None

    def _next_state(self, op: int, device: str) -> tuple[int, int]:
        size = RNG_STATE_BYTES.get(device, 5056)
        if device not in self.states:
            self.states[device] = self.initial_states[device] = len(self.buffers)
            self.buffers.append(
                {"index": self.states[device], "nbytes": size, "source": Source.RANDOM, "keepable": True}
            )
        before, after = self.states[device], len(self.buffers)
        self.buffers.append({"index": after, "nbytes": size, "source": Source.RANDOM, "producer": op})
        self.states[device] = after
        return before, after

    def finish(self, output: Any) -> RegionTrace:
        """Close the record."""
        self._require_own_stream()
        leaves, spec = tree_flatten(output)
        output_leaves = [self.ref(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        overwritten = {b["index"] for b in self.buffers if b.pop("overwritten", False)}
        asked = {ref.buffer for i, ref in enumerate(self.slots) if i in self.asked}
        for op in self.ops:
            if (op.get("anchor") is None and overwritten.intersection(op["inputs"])) or (
                op.get("anchor") is None and self.overtaken.intersection((*op["inputs"], *op["outputs"]))
            ):
                op["anchor"] = Anchor.MUTATED
            if op.get("anchor") is None and asked.intersection(op["outputs"]):
                op["anchor"] = Anchor.ASKED
        reads = tuple(self._read(*read) for read in self.reads)
        self.program = Program(
            buffers=tuple(Buffer(**b) for b in self.buffers),
            ops=tuple(Op(**op) for op in self.ops),
            slots=tuple(
                Slot(
                    index=i, buffer=ref.buffer, shape=ref.size, dtype=str(ref.dtype).removeprefix("torch."),
                    op=self.ops[info[0]]["name"] if info[0] >= 0 else "", path=info[1],
                )
                for i, (ref, info) in enumerate(zip(self.slots, self.slot_info, strict=True))
            ),
            outputs=tuple(r.buffer for r in output_leaves if isinstance(r, TensorRef)),
        )  # fmt: skip
        if any(read is not None and read.calls is None for read in reads) and not self.strict:
            self.refuse("it decides by numbers that are not read out of its arguments")
        return RegionTrace(
            problem=self.problem, program=self.program, calls=self.calls, slots=self.slots, taps=self.taps,
            inputs=self.inputs, names=self.names, output_leaves=output_leaves, output_spec=spec, sequence=self.sequence,
            initial_states=self.initial_states, blocks=self.blocks, given=self.given, named_at=self.named_at,
            constants=frozenset(self.ref(t).buffer for t in leaves if isinstance(t, Tensor) and not t.requires_grad),
            reads=tuple(read for read in reads if read is not None), made=self.made,
            hollow=frozenset(self.hollow), entangled=self.entangled, overwritten=frozenset(overwritten),
            asked=frozenset(self.inputs[b] for b in asked if b in self.inputs),
        )  # fmt: skip

    def _read(self, ref: TensorRef, found: Any, shape_only: bool) -> Read | None:
        """How to find out what the forward would read there in other arguments. None for what is always the same."""
        calls: set[int] = set()
        stack, from_arguments = [ref.buffer], False
        while stack:
            buffer = self.buffers[stack.pop()]
            if buffer["source"] is Source.INPUT:
                from_arguments = True
                continue
            if buffer["index"] in self.made:
                continue
            index = buffer.get("producer")
            if index is None or self.calls[index].state_in is not None or not self._can_write_again(index):
                return Read(ref, found, shape_only, None)
            if index not in calls:
                calls.add(index)
                stack.extend(self.ops[index]["inputs"])
        return Read(ref, found, shape_only, tuple(sorted(calls))) if from_arguments else None

    def _can_write_again(self, index: int) -> bool:
        """Whether a call writes to nothing, or to what another call has made."""
        return all("producer" in self.buffers[old] for old, _new in self.calls[index].written)


def _values_of(tensor: Tensor) -> Tensor:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return tensor.detach().clone()


_MADE_OF_NUMBERS = torch.ops.aten.lift_fresh.default
"""What `torch.tensor` and assignments of numbers pass a tensor through that they have just made."""
_BY_HAND = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr}


class ReadingWatch(TorchFunctionMode):
    """Tells a recorder of values that Python takes out of tensors past the dispatcher."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _BY_HAND:
            self.recorder.read_by_hand(args[0])
        if func is torch._C._nn.one_hot:
            return _one_hot(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """What torch runs on real tensors; on fake ones it compares with a range instead."""
    if num_classes < 1 or tensor.numel() == 0 or not isinstance(tensor, FakeTensor):
        return torch._C._nn.one_hot(tensor, num_classes)
    made = torch.ops.aten.zeros.default([*tensor.shape, num_classes], dtype=tensor.dtype, device=tensor.device)
    return made.scatter_(-1, tensor.unsqueeze(-1), 1)


class CaptureMode(TorchDispatchMode):
    """Feeds every ATen call to the recorder on top of the stack; nested regions push their own."""

    def __init__(self) -> None:
        super().__init__()
        self.recorders: list[Recorder] = []
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if desugars(types):
            if self.recorders and draws(func, args, kwargs) and not _on_cpu(args):
                # DTensor shifts the generator's state around the op, where no recorder sees it
                self.recorders[-1].state_broken = True
            return NotImplemented
        if not self.recorders or self.paused or is_bookkeeping(func) or infers_shapes():
            return func(*args, **kwargs)
        return self.recorders[-1].call(func, args, kwargs, lambda: func(*args, **kwargs))

    @contextlib.contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Ops and saved tensors go to ``recorder`` until the block ends; inner saved-tensor hooks are refused."""

        listening = [recorder]  # emptied at the end: the graph outlives the recording and must not own the record

        def pack(tensor: Tensor) -> tuple[Tensor, int]:
            slot = listening[0].saved(tensor) if listening else -1
            return tensor.detach() if tensor.requires_grad and not tensor.is_leaf else tensor, slot

        def unpack(packed: tuple[Tensor, int]) -> Tensor:
            tensor, slot = packed
            if listening:  # a backward inside the forward
                listening[0].asked.add(slot)
            return tensor

        pack.of_a_region = True  # type: ignore[attr-defined]
        self.recorders.append(recorder)
        hooks = _watch_modules(recorder)
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack), ReadingWatch(recorder):
                yield
        finally:
            listening.clear()
            self.recorders.pop()
            for hook in hooks:
                hook.remove()


def _on_cpu(args: Any) -> bool:
    return all(t.device.type == "cpu" for t in op_leaves(args) if isinstance(t, Tensor))


def _watch_modules(recorder: Recorder) -> list[Any]:
    hooks = []
    calls: dict[str, int] = {}
    for path, module in recorder.module.named_modules():
        if path == "":
            continue

        def before(_m: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            calls[path] = calls.get(path, -1) + 1
            recorder.path.append(path)
            recorder.boundary(path, calls[path], False, (args, kwargs))

        def after(_m: nn.Module, _args: Any, output: Any, path: str = path) -> None:
            if recorder.path and recorder.path[-1] == path:
                recorder.path.pop()
            recorder.boundary(path, calls.get(path, 0), True, output)

        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        hooks.append(module.register_forward_hook(after))
    return hooks


def signature_of(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[Any, ...]:
    """What two runs of one forward must agree on: the op, its numbers, shape, stride and dtype of its results."""
    results = tuple((tuple(t.shape), layout(t), t.dtype) for t in op_leaves(out) if isinstance(t, Tensor))
    return func, results, tuple(repr(v) for v in op_leaves(args, kwargs) if isinstance(v, bool | int | float))


def layout(tensor: Tensor) -> tuple[int, ...]:
    """Strides of the dims that have more than one element: the others are arbitrary, and two kernels may set them
    differently.
    """
    return layout_of(tensor.shape, tensor.stride())


def layout_of(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """See `layout`."""
    return tuple([s if n != 1 else 0 for n, s in zip(size, stride, strict=True)])


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
