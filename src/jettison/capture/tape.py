"""The growing record of a region: buffers, each one version of one storage, and the ops that make them of one another.

NOTE [ Identity of a saved tensor ]
A dispatch mode sees every ATen call below autograd; pack hooks see every tensor that autograd saves, above it. The two
are matched by storage: while a capture lasts it holds every storage that it has seen, so that no address is used twice,
and a tensor is (buffer, size, stride, storage offset, dtype). A transposed square matrix, an offset slice or an
expanded row is therefore never mistaken for its base. An in-place write gives the storage a new version, which is a new
buffer: whoever saved or read the old one refers to the old one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from jettison.capture.randomness import ADVANCE, Movement
from jettison.capture.recording import Call, Read, TensorRef
from jettison.capture.tensor_subclasses import is_dense, plain, storage_of
from jettison.errors import TraceError
from jettison.ledger.program import Buffer, Op, Source

ONLY_DENSE = "only dense tensors can be recorded: pad nested ones (to_padded_tensor), or train without a plan"
RNG_STATE_BYTES = {"cpu": 5056, "cuda": 16}


class Tape:
    """Buffers, ops and calls so far, and which buffer a tensor is."""

    def __init__(self, module: nn.Module, stream: bytes | None) -> None:
        self.buffers: list[Buffer] = []
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self.names: dict[int, str] = {}
        self.named_at: dict[int, int] = {}
        self.made: dict[int, Tensor] = {}  # buffer -> what Python's numbers made
        self.path: list[str] = []
        self.initial_states: dict[str, int] = {}
        self.states: dict[str, int] = {}  # device -> buffer of its random state now
        self.state_broken = False
        self.lent: int | None = None  # while somebody else's numbers are drawn: the CPU's state for after that
        self._stream = stream  # where the CPU's generator stands as long as nobody moves it by hand
        self.entangled = False
        self.versions: dict[int, list[int]] = {}  # storage -> all buffers that it was, parameters aside
        self.registered: dict[int, int] = {}  # storage of a module's buffer -> what it is before anybody writes to it
        self._current: dict[int, int] = {}  # storage -> the buffer that it is
        self._alive: list[tuple[Any, Tensor]] = []
        self._named: dict[int, tuple[str, int]] = {}  # storage -> name and offset of its first parameter
        for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
            if is_dense(tensor):
                self._named.setdefault(storage_of(tensor), (name, plain(tensor).storage_offset()))

    @property
    def where(self) -> str:
        """Path of the module that runs now, relative to the region."""
        return self.path[-1] if self.path else ""

    def tensors(self) -> list[Tensor]:
        """One of each memory that the recording knows, which it keeps alive."""
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
                self.entangled = self.entangled or plain(tensor).grad_fn is not None
        return TensorRef.of(index, tensor)

    def _new_buffer(self, tensor: Tensor, source: Source, **more: Any) -> int:
        """What the tensor's memory is from here on."""
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

    def _is_now(self, tensor: Tensor, buffer: int) -> None:
        """Another object for a memory that is known."""
        self._current.setdefault(storage_of(tensor), buffer)
        self._alive.append((tensor.untyped_storage(), tensor))

    def _keepable(self, buffer: int, keepable: bool = True) -> None:
        self.buffers[buffer] = replace(self.buffers[buffer], keepable=keepable)

    def _add_op(self, name: str, call: Call, inputs: Sequence[int], outputs: Sequence[int], **more: Any) -> None:
        more = {"index": len(self.ops), "flops": 0, "bytes_moved": 0, "path": self.where, **more}
        self.ops.append(Op(name=name, inputs=tuple(inputs), outputs=tuple(outputs), **more))
        self.calls.append(call)

    def _origin(self, buffer: int) -> tuple[set[int], set[int]]:
        """Calls that compute a buffer, and the buffers that they start from: numbers that Python had are none."""
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
        """Whether it is made of nothing but numbers that Python had anyway."""
        calls, starts = self._origin(buffer)
        return not starts and all(self.calls[i].state_in is None for i in calls)

    def _read(self, ref: TensorRef, found: Any, shape_only: bool) -> Read | None:
        """How to find out what the forward would read there in other arguments. None for what is always the same."""
        calls, starts = self._origin(ref.buffer)
        if any(self.buffers[b].source is not Source.INPUT for b in starts) or not all(map(self._can_redo, calls)):
            return Read(ref, found, shape_only, None)
        return Read(ref, found, shape_only, tuple(sorted(calls))) if starts else None

    def _can_redo(self, index: int) -> bool:
        """Whether a call draws nothing, and writes to nothing or to what another call has made."""
        call = self.calls[index]
        return call.state_in is None and all(self.buffers[old].producer is not None for old, _new in call.written)

    # random states ----------------------------------------------------------------------------------------------------

    def follows(self, device: str) -> bool:
        """Whether the state of a device's generator is known here."""
        return not self.state_broken and (self.lent is None or device == "cpu")

    def move_state(self, move: Movement, device: str) -> tuple[int, int]:
        """Record what moves the random state and does nothing else; buffers of the state before and after."""
        before, after = self._next_state(len(self.ops), device)
        call = Call(move.func, move.args, dict(move.kwargs), (), state_in=before, state_out=after, device=device)
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
        """The default generators draw another stream from here on, until `take_back`.

        On other devices than the CPU it cannot be followed; they go on as before afterwards.

        Args:
            borrowed: from the CPU's state to the first of that stream.
            left: from the CPU's state to the one after the loan.
        """
        if not self.follows("cpu") or self.lent is not None:
            self.state_broken = True
            return
        self.states["cpu"], self.lent = self.move_state(left, "cpu")
        self.move_state(borrowed, "cpu")

    def take_back(self) -> None:
        """The loan ends. One that began before this region did has nothing to come back to."""
        if self.lent is None:
            self.state_broken = True
        else:
            self.states["cpu"], self.lent, self._stream = self.lent, None, None
