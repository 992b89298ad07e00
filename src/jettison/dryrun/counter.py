"""Bytes allocated by a training step, counted in two independent ways.

`AllocationCounter` is a dispatch mode: it sees every storage that an operator returns and follows it until it is freed,
on real tensors and on fake ones. `measured_peak` asks the allocator itself. If the allocator reports more, the
difference is workspace that kernels allocate and free inside one call, which no dispatch mode can see: `measure_ops`
(in `op_costs.py`) measures it, and the counter adds it through its `workspace` argument.

NOTE [ Lifetime of a storage ]
`Tensor.untyped_storage()` always returns the same Python object for one C++ storage, which lives as long as that. A
weak reference to it therefore fires when the last owner goes, whether Python, a saved variable of the graph, which
re-wraps the storage in a new tensor, or a gradient buffer of the engine.

NOTE [ Accumulating in place ]
Where several branches meet, the engine adds gradients in place if it holds the last reference, but never under a
dispatch mode, where it calls `add` out of place. The counter would see one buffer too many. It therefore withholds the
peak of such an `add` until the next operator: if the first operand is dead by then, a run without the mode would have
reused its storage, and the peak is dropped. An `add` inside a backward formula is recognised by its first operand,
which that same node has made. To a view the engine never adds in place.

The backward formulas of `gather`, of indexing and of reductions that select do the same: into zeros that they have just
made they put, add or scatter in place, but out of place where anything is a subclass, or a mode is on
(`areAnyTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp and aten's TensorAdvancedIndexing.cpp). There the
first operand was made by that same node.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch._ops import HigherOrderOperator
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jettison.capture.dispatch import WHICH_DEVICE, fakes_below, outside_of_compiled, which_device
from jettison.capture.fake_tensor_cache import UNKNOWN, QuickFakeMode
from jettison.capture.tensor_subclasses import desugars, infers_shapes, parts_of, plain
from jettison.core.objects import swapped
from jettison.core.process import by_default, uncollected
from jettison.ledger.step_levels import StepLevels
from jettison.runtime.witness import have_flag

Workspace = Callable[[Any, tuple[Any, ...], dict[str, Any]], int]
"""(operator, args, kwargs) -> bytes that the kernel allocates and frees inside the call."""

CUDA_GRANULARITY_BYTES = 512
"""The CUDA caching allocator rounds every request up to this."""

_ACCUMULATE = torch.ops.aten.add.Tensor
_INTO_ZEROS = (
    torch.ops.aten.scatter_add.default,
    torch.ops.aten.index_put.default,
    torch.ops.aten.scatter.src,
    torch.ops.aten.index_add.default,
    torch.ops.aten.put.default,
)
_DETACH = torch.ops.aten.detach.default
_STATE = "generator state"


@dataclass(frozen=True, kw_only=True)
class AllocationEvent:
    """A storage's allocation (positive) or free (negative), the operator that returned it, and bytes live afterwards.
    Storages are numbered in order of appearance; one that is resized changes more than twice.
    """

    operator: str
    storage: int
    delta_bytes: int
    live_bytes: int
    phase: str = ""


@dataclass(slots=True)
class _CountedStorage:
    bytes: int
    operator: Any  # or the name of its origin
    node: int
    number: int
    weak: Any = None
    role: Role = ()
    holds: int = 0  # its bytes stay counted until that many are over


@dataclass(slots=True)
class _Withheld:
    """The peak of an `add`, say, whose first operand may have died with it; see NOTE [ Accumulating in place ]"""

    operand: _CountedStorage
    operand_key: int
    live_bytes: int
    logged: int = 0  # events before it


@outside_of_compiled
class AllocationCounter(TorchDispatchMode):
    """Counts live and peak bytes of storages while active.

    Enter it inside (after) a `FakeTensorMode`, so that it sees the operators of the step and not those of the fake
    kernels. `static_tensors` exist before the step and count from the start. A storage first met as an operator's input
    (made outside the dispatcher, or before the counter was entered) counts from that moment. While it is `paused`, as
    for a recording inside of a step, nothing is counted. `device` restricts the count to one device type, and rounds
    each storage up as its allocator does.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        static_tensors: Iterable[Tensor] = (),
        *,
        workspace: Workspace | None = None,
        device: str | None = None,
        record_events: bool = False,
        record_levels: bool = False,
        record_log: bool = False,
    ) -> None:
        super().__init__()
        self._storages: dict[int, _CountedStorage] = {}
        self._storages_seen = 0
        self._withheld: _Withheld | None = None
        self._workspace = workspace
        self._granularity_bytes = CUDA_GRANULARITY_BYTES if device == "cuda" else 1
        self._device = device
        self._numbers = KeptNumbers() if device in (None, "cpu") else None
        self.paused = False
        self.log: list[Event] | None = [] if record_log else None
        self.watched_bytes: dict[Role, int] = {}
        self._pending_mark: tuple[Place, int] | None = None
        self._live_bytes = 0
        self._peak_bytes = 0
        self._events: list[AllocationEvent] | None = [] if record_events else None
        self._phase = ""
        self._fakes: QuickFakeMode | None = None  # if only its modes are below
        self._phase_levels: list[tuple[str, list[int]]] | None = [] if record_levels else None
        self.register(static_tensors)

    @property
    def live_bytes(self) -> int:
        """Bytes of all counted storages that are alive now."""
        return self._live_bytes

    @property
    def peak_bytes(self) -> int:
        """Highest `live_bytes` (plus workspace) since construction or `reset_peak`."""
        self._settle()
        return self._peak_bytes

    @property
    def events(self) -> tuple[AllocationEvent, ...]:
        """The event log; empty unless `record_events`."""
        return tuple(self._events or ())

    @property
    def phase_levels(self) -> list[tuple[str, list[int]]]:
        """Levels after every operator, its workspace included, by phase; empty unless `record_levels`."""
        self._settle()
        return self._phase_levels or []

    def phase(self, name: str, *, first: bool = False) -> None:
        """Begin a phase: later levels belong to it; the ``first`` forgets earlier ones."""
        self._settle()
        self._phase = name
        if self.log is not None and first:
            self.log.clear()
        self.mark((name, -1, False))
        if self._phase_levels is not None:
            if first:
                self._phase_levels.clear()
            self._phase_levels.append((name, []))
        if self._phase_levels is not None or self.log is not None:
            self._note(self._live_bytes)

    def mark(self, place: Place) -> None:
        """Begin an interval of the log."""
        if self.log is not None:
            self._settle()
            self._pending_mark = None
            self.log.append(Mark(place, self._live_bytes))

    def mark_after_node(self, place: Place) -> None:
        """Begin an interval of the log where another node of the forward's graph runs: behind this one the engine frees
        what it was given, and adds its gradients to those of others.
        """
        self._pending_mark = place, current_node()

    def watch(self, tensors: Sequence[Any], role: Role, held: Container[int] = ()) -> dict[Role, Role]:
        """Log the last references to these leaves' storages, as (*``role``, position), or as what they are watched as
        already; by the end of each role. Static ones never die, those ``held`` stay counted (see `hold`).
        """
        found: dict[Role, Role] = {}
        for position, leaf in enumerate(tensors):
            entry = self._entry_of(leaf) if self.log is not None and isinstance(leaf, Tensor) else None
            if entry is None or (entry.operator == "static" and position not in held):
                continue
            if not entry.role:
                entry.role = (*role, position)
                entry.holds += position in held
                self.watched_bytes[entry.role] = entry.bytes
            found[role[-1], position] = entry.role
        return found

    def hold(self, tensors: Iterable[Tensor]) -> Callable[[], None]:
        """Count these storages until the result is called, even if nothing refers to them any more."""
        entries = [entry for entry in map(self._entry_of, tensors) if entry is not None]
        for entry in entries:
            entry.holds += 1

        def release() -> None:
            for entry in entries:
                entry.holds -= 1
                if not entry.holds and entry.weak() is None:
                    self._change(entry, -entry.bytes)

        return release

    def _entry_of(self, tensor: Tensor) -> _CountedStorage | None:
        try:
            return self._storages.get(plain(tensor).untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # it has none
            return None

    def register(self, tensors: Iterable[Tensor]) -> None:
        """Count storages that exist already: parameters, buffers, gradients, optimizer state, the batch."""
        for tensor in tensors:
            self._count(tensor, "static", NO_NODE)
        self._raise_peak(self._live_bytes)

    def not_counting(self) -> AbstractContextManager[None]:
        """Count nothing within the context: its ops are not the step's."""
        return swapped(self, paused=True)

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Count these as freed, although an observer of the run still references them."""
        self._settle()
        for part in (part for tensor in tensors for part in parts_of(tensor)):
            entry = self._storages.pop(part.untyped_storage()._cdata, None)
            if entry is not None:
                self._change(entry, -entry.bytes)

    def reset_peak(self) -> None:
        """Restart the peak from the bytes that are live now."""
        self._settle()
        self._peak_bytes = self._live_bytes

    def __enter__(self) -> Any:
        self._resize, self._get_state = torch.UntypedStorage.resize_, torch.get_rng_state
        torch.UntypedStorage.resize_ = lambda storage, nbytes: self._resized(storage, nbytes)
        torch.get_rng_state = torch.random.get_rng_state = self._state_read
        self._fakes = fakes_below()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize
        torch.get_rng_state = torch.random.get_rng_state = self._get_state

    def _state_read(self) -> Tensor:
        """Count a generator's state, a tensor that no operator makes: checkpoints and `fork_rng` hold one."""
        state: Tensor = self._get_state()
        self._settle()
        self._count(state, _STATE, NO_NODE)
        self._raise_peak(self._live_bytes)
        return state

    def _drop_state(self, tensor: Any) -> None:
        """Count the result of `detach` on a state instead of it: on fake tensors it is another storage."""
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:  # a sparse one has several
            return
        entry = self._storages.get(tensor.untyped_storage()._cdata)
        if entry is not None and entry.operator == _STATE:
            self.forget([tensor])

    def _resized(self, storage: Any, nbytes: int) -> Any:
        """Count a resize: FSDP2 frees the storages of all-gathered parameters and refills them without an operator."""
        self._settle()
        out = self._resize(storage, nbytes)
        known = self._storages.get(storage._cdata)
        if known is not None:
            self._change(known, self._rounded(storage.nbytes()) - known.bytes)
            self._raise_peak(self._live_bytes)
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is WHICH_DEVICE:
            return which_device(*args)
        if desugars(types):
            return NotImplemented
        if self.paused or infers_shapes():
            return func(*args, **kwargs)
        if self._withheld is not None:
            self._settle()
        if isinstance(func, HigherOrderOperator):
            self._count_all((*args, *kwargs.values()), "input", NO_NODE)
            out = func(*args, **kwargs)
            self._count_all((out,), func, current_node())
            self._raise_peak(self._live_bytes)
            return out
        if func is _DETACH:
            self._drop_state(args[0])
            out = self._answer(func, args, kwargs)
            self._count_all((out,), func, NO_NODE)
            self._raise_peak(self._live_bytes)
            return out
        node = current_node()
        if self._numbers is not None:
            self._live_bytes -= self._numbers.freed_by(node)
        if self._pending_mark is not None and 0 <= node < self._pending_mark[1]:
            self.mark(self._pending_mark[0])
        self._count_all(args, "input", NO_NODE)
        self._count_all(kwargs.values(), "input", NO_NODE)
        self._raise_peak(self._live_bytes)
        withheld = self._in_place_otherwise(func, args, node) if node != NO_NODE else None
        extra_bytes = self._workspace(func, args, kwargs) if self._workspace is not None else 0
        if withheld is not None:
            self._raise_peak(self._live_bytes + extra_bytes)
        out = self._answer(func, args, kwargs)
        self._count_all((out,), func, node)
        if self._numbers is not None and (number := number_bytes(func, args)):
            kept = self._numbers.kept_by(func, args, number)
            self._live_bytes += kept
            extra_bytes = max(extra_bytes, number) - kept  # a measured workspace includes the number
        if withheld is not None:
            withheld.live_bytes, withheld.logged = self._live_bytes, len(self.log or ())
            self._withheld = withheld
        else:
            self._raise_peak(self._live_bytes + extra_bytes)
        return out

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return an operator's result: the remembered one on fake tensors, or by running it."""
        if self._fakes is not None and (out := self._fakes.remembered(func, args, kwargs)) is not UNKNOWN:
            return out
        return func(*args, **kwargs)

    def _count_all(self, values: Iterable[Any], operator: Any, node: int) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self._count(value, operator, node)
            elif isinstance(value, (list, tuple)):
                self._count_all(value, operator, node)
            elif isinstance(value, dict):
                self._count_all(value.values(), operator, node)

    def _count(self, tensor: Tensor, operator: Any, node: int) -> None:
        if self._device is not None and tensor.device.type != self._device:
            return
        tensor = plain(tensor)
        if tensor.layout is not torch.strided:
            for part in parts_of(tensor):
                self._count(part, operator, node)
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a wrapper of `torch.func`'s has none
            return
        known = self._storages.get(storage._cdata)
        nbytes = self._rounded(storage.nbytes())
        if known is None:
            self._add(storage, nbytes, operator, node)
        elif known.bytes != nbytes:  # resized in place
            self._change(known, nbytes - known.bytes)

    def _add(self, storage: Any, nbytes: int, operator: Any, node: int) -> None:
        key = storage._cdata
        self._storages_seen += 1
        entry = _CountedStorage(0, operator, node, self._storages_seen)
        this = weakref.ref(self)

        def died(_: object) -> None:
            counter = this()
            if counter is not None and counter._storages.pop(key, None) is not None:
                freed_bytes = 0 if entry.holds else entry.bytes
                if counter.log is not None and entry.role:
                    counter.log.append(LastReference(entry.role, freed_bytes))
                counter._change(entry, -freed_bytes)

        entry.weak = weakref.ref(storage, died)
        self._storages[key] = entry
        self._change(entry, nbytes)

    def _change(self, entry: _CountedStorage, delta_bytes: int) -> None:
        entry.bytes += delta_bytes
        self._live_bytes += delta_bytes
        if self._events is not None:
            self._events.append(
                AllocationEvent(
                    operator=str(entry.operator),
                    storage=entry.number,
                    delta_bytes=delta_bytes,
                    live_bytes=self._live_bytes,
                    phase=self._phase,
                )
            )

    def _in_place_otherwise(self, func: Any, args: tuple[Any, ...], node: int) -> _Withheld | None:
        """Pending peak of an op that is in place without a mode; None if not. See NOTE [ Accumulating in place ]"""
        if func is not _ACCUMULATE and func not in _INTO_ZEROS:
            return None
        operand = args[0]
        if not isinstance(operand, Tensor) or operand.layout is not torch.strided or torch.is_grad_enabled():
            return None
        is_dense = operand.is_contiguous() or is_non_overlapping_and_dense_or_false(operand)
        if not is_dense or operand._is_view():  # its base is alive: the engine is not the only owner of the storage
            return None
        key = operand.untyped_storage()._cdata
        entry = self._storages.get(key)
        if entry is None or (entry.node == node) is (func is _ACCUMULATE):
            return None
        return _Withheld(operand=entry, operand_key=key, live_bytes=0)

    def _settle(self) -> None:
        withheld, self._withheld = self._withheld, None
        if withheld is None:
            return
        is_there = self._storages.get(withheld.operand_key) is withheld.operand or withheld.operand.holds > 0
        if is_there:
            self._raise_peak(withheld.live_bytes)
            if self.log is not None:  # what has died since comes after it
                self.log.insert(withheld.logged, self.log.pop())
        self._raise_peak(self._live_bytes)

    def _raise_peak(self, live_bytes: int) -> None:
        self._note(live_bytes)
        self._peak_bytes = max(self._peak_bytes, live_bytes)

    def _note(self, live_bytes: int) -> None:
        if self.log is not None:
            self.log.append(live_bytes)
        if self._phase_levels:
            self._phase_levels[-1][1].append(live_bytes)

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._granularity_bytes) * self._granularity_bytes


@contextmanager
def quiet_gc() -> Iterator[None]:
    """Collect garbage first, and not during the run: when the collector frees something is not part of a plan."""
    gc.collect(1)  # garbage of an earlier dry run is young: none is collected while one runs
    with uncollected():
        yield


# numbers --------------------------------------------------------------------------------------------------------------
#
# Tensors made of numbers in ops with tensors, as in ``x * 0.5``: 8 bytes on the CPU, which no operator allocates and no
# saved-tensor hook sees. A factor stays until its node of autograd has run; if a graph is freed without a backward,
# nothing reports it, and its factors stay counted.

NO_NODE = -2
_KEPT = ("aten::mul", "aten::mul_", "aten::div", "aten::div_")  # for the gradient of the other factor


def current_node() -> int:
    """A number for the autograd node being evaluated; `NO_NODE` outside of backward."""
    if torch._C._current_graph_task_id() == -1:
        return NO_NODE
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


class KeptNumbers:
    """Numbers that nodes keep, by the number of their node; notified of every op in turn."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self._node = NO_NODE

    def freed_by(self, node: int) -> int:
        """Bytes that are freed when an op of another node runs."""
        if node == self._node:
            return 0
        last, self._node = self._node, node
        return self._bytes.pop(last, 0)

    def kept_by(self, func: Any, args: tuple[Any, ...], nbytes: int) -> int:
        """Bytes of an op's number that the node just made for it keeps."""
        if not nbytes or func._schema.name not in _KEPT or not torch.is_grad_enabled():
            return 0
        if not getattr(args[0], "requires_grad", False):  # a number divided by a number
            return 0
        self._bytes[torch._C._autograd._get_sequence_nr() - 1] = nbytes
        return nbytes


def number_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes of the tensor that an op's second operand becomes; 0 if it is a tensor, or stays a number."""
    if len(args) < 2 or not isinstance(args[1], int | float | complex):
        return 0
    if not isinstance(func._schema.arguments[1].type, torch.TensorType):
        return 0
    return 1 if isinstance(args[1], bool) else 16 if isinstance(args[1], complex) else 8


# tensors that are alive before a step ---------------------------------------------------------------------------------


def unique_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages under `tensors`."""
    storages = (part.untyped_storage() for tensor in tensors for part in parts_of(tensor))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def static_tensors(
    model: nn.Module, batch: Any = (), optimizer: torch.optim.Optimizer | None = None
) -> tuple[Tensor, ...]:
    """Tensors that are alive before a step: parameters, their gradients, buffers, the optimizer's state, the batch."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = tree_leaves(list(optimizer.state.values())) if optimizer is not None else []
    others = [leaf for leaf in [*state, *tree_leaves(batch)] if isinstance(leaf, Tensor)]
    return (*parameters, *gradients, *model.buffers(), *others)


# other memory of an allocator -----------------------------------------------------------------------------------------


def elsewhere_bytes(model: nn.Module, batch: Any = (), optimizer: torch.optim.Optimizer | None = None) -> int:
    """Bytes on the model's CUDA device that are neither its own nor the batch's nor the optimizer's: other models,
    workspaces of cuBLAS, the round-up of the caching allocator, as ``max_memory_allocated`` counts them. 0 on the CPU.
    """
    tensors = static_tensors(model, batch, optimizer)
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    if len(devices) != 1:
        return 0
    device = devices.pop()
    have_workspaces(device)
    gc.collect()
    torch.cuda.synchronize(device)
    known = AllocationCounter(tensors, device="cuda").live_bytes
    return max(0, torch.cuda.memory_allocated(device) - known)


def have_workspaces(device: torch.device) -> None:
    """Allocate the workspaces of cuBLAS and cuBLASLt, by matmuls on this thread and on autograd's, which has handles of
    its own and recomputes; and the flag of witnesses.
    """
    if device.type == "cuda":
        have_flag(device)
        with torch.enable_grad(), torch.autocast("cuda", enabled=False):
            _Products.apply(torch.ones(16, 16, device=device, requires_grad=True)).sum().backward()


class _Products(torch.autograd.Function):
    """A matmul with a bias, and one without, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return torch.addmm(a[0], a, a @ a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        return torch.addmm(grad[0], grad, grad @ grad)


# the peak as the allocator reports it: the judge of every prediction --------------------------------------------------


ALLOCATION_EVENT = "[memory]"
_MARK = "jettison.step."
_FREED = "jettison.freed."


@dataclass(frozen=True, kw_only=True)
class PeakReport:
    """Bytes of one step. `peak_bytes` includes `static_bytes`, what was alive before the step.

    `reserved_bytes` and `requested_bytes` are the CUDA caching allocator's (segments it holds, and the peak before it
    rounds blocks up); None on the CPU.
    """

    peak_bytes: int
    static_bytes: int
    after_bytes: int
    source: Literal["profiler", "cuda"]
    reserved_bytes: int | None = None
    requested_bytes: int | None = None
    levels: StepLevels | None = None  # over the marked phases of the step


@dataclass(kw_only=True)
class PhaseMarks:
    """Says to `measured_peak` which phase a step is in. ``device`` is set by it where the step runs on CUDA."""

    device: torch.device | None = None
    peaks: list[tuple[str, int]] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self.device is None:
            with record_function(_MARK + name):
                yield
            return
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        torch.cuda.synchronize(self.device)
        self.peaks.append((name, torch.cuda.max_memory_allocated(self.device)))


def measured_peak(
    step: Callable[[], object], *, static_tensors: Iterable[Tensor], marks: PhaseMarks | None = None
) -> PeakReport:
    """Run `step` once and report its peak of allocated bytes.

    On the CPU: the profiler's allocation events, in time order, on the bytes of the distinct storages that are alive
    before the step (see `static_tensors`; give an iterator if the step frees some). On CUDA (any static tensor there):
    `max_memory_allocated`, whatever else the process has on the device included.
    """
    tensors = tuple(static_tensors)
    del static_tensors
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise ValueError(f"static_tensors lie on several CUDA devices, {names}: measure one at a time")
    gc.collect()
    if devices:
        return _cuda_peak(step, devices.pop(), marks or PhaseMarks())
    static_bytes, watched = unique_bytes(tensors), _watched(tensors)
    del tensors
    return _cpu_peak(step, static_bytes, watched)


def allocation_deltas(step: Callable[[], object]) -> list[int]:
    """Bytes allocated (positive) and freed (negative) on the CPU while `step`, which has no phases, runs, in order."""
    with profiled_phases(0) as phases:
        step()
    return [after - before for before, after in pairwise(phases[0][1])]


def quiet_profiler() -> AbstractContextManager[None]:
    """The profiler does not write the two lines to stderr that it otherwise writes for each step."""
    return by_default("KINETO_LOG_LEVEL", "99")


def _watched(tensors: Iterable[Tensor]) -> list[weakref.ref[UntypedStorage]]:
    """References that mark, in the profiler's events, when memory on the CPU goes that was there before it began: torch
    knows the size of what was allocated under a profiler alone.
    """

    def mark(address: int, nbytes: int) -> Callable[[object], None]:
        def freed(_: object) -> None:
            with record_function(f"{_FREED}{address}.{nbytes}"):
                pass

        return freed

    storages = {s._cdata: s for t in tensors for part in parts_of(t) if (s := part.untyped_storage()).nbytes()}
    return [weakref.ref(s, mark(s.data_ptr(), s.nbytes())) for s in storages.values() if s.device.type == "cpu"]


def _first_freed(profiler: Any) -> dict[int, int]:
    """Bytes by address of what the profiler saw freed, and had been there before: those of whatever was allocated there
    last under a profiler, which may be another size by now.
    """
    left: list[Any] = list(profiler.profiler.kineto_results.experimental_event_tree())
    first: dict[int, tuple[int, int]] = {}  # by address: when its first change was, and by how many bytes
    while left:
        event = left.pop()
        left += event.children
        if event.name == ALLOCATION_EVENT:
            change = event.start_time_ns, event.extra_fields.alloc_size
            first[event.extra_fields.ptr] = min(change, first.get(event.extra_fields.ptr, change))
    return {address: -nbytes for address, (_, nbytes) in first.items() if nbytes < 0}


@contextmanager
def profiled_phases(static_bytes: int) -> Iterator[list[tuple[str, list[int]]]]:
    """Profile the CPU's allocations within the context; when it is left, the list has the bytes after each of them by
    marked phase, in order. The first entry is what comes before any phase, from ``static_bytes`` on.
    """
    found = [("before", [static_bytes])]
    with quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        yield found
    changes, begins, freed = [], [], []
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        if name == ALLOCATION_EVENT:
            if event.device_type() == torch.autograd.DeviceType.CPU:
                changes.append((event.start_ns(), int(event.nbytes())))
        elif name.startswith(_MARK):
            begins.append((event.start_ns(), name.removeprefix(_MARK)))
        elif name.startswith(_FREED):
            freed.append((event.start_ns(), *map(int, name.removeprefix(_FREED).split("."))))
    known = _first_freed(profiler) if freed else {}
    changes += [(time, known.get(address, 0) - nbytes) for time, address, nbytes in freed]
    begins.sort()
    live_bytes = static_bytes
    for time, delta_bytes in sorted(changes, key=lambda change: change[0]):
        while begins and begins[0][0] <= time:
            found.append((begins.pop(0)[1], [live_bytes]))
        live_bytes += delta_bytes
        found[-1][1].append(live_bytes)
    found += [(name, [live_bytes]) for _, name in begins]


def _cpu_peak(step: Callable[[], object], static_bytes: int, watched: list[weakref.ref[UntypedStorage]]) -> PeakReport:
    with profiled_phases(static_bytes) as phases:
        step()
    watched.clear()
    levels = [level for _, found in phases for level in found]
    return PeakReport(
        peak_bytes=max(levels),
        static_bytes=static_bytes,
        after_bytes=levels[-1],
        source="profiler",
        levels=StepLevels.of(phases[1:]),
    )


def _cuda_peak(step: Callable[[], object], device: torch.device, marks: PhaseMarks) -> PeakReport:
    marks.device = device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    static_bytes = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return PeakReport(
        peak_bytes=max(torch.cuda.max_memory_allocated(device), *(peak for _, peak in marks.peaks), 0),
        static_bytes=static_bytes,
        after_bytes=torch.cuda.memory_allocated(device),
        source="cuda",
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        requested_bytes=int(torch.cuda.memory_stats(device).get("requested_bytes.all.peak", 0)) or None,
        levels=StepLevels.of((name, [peak]) for name, peak in marks.peaks),
    )


# levels of a run, cut into intervals: calls of blocks, and what is around them ---------------------------------------
#
# A counter logs levels, marks and last references in order. A storage is watched if several intervals may refer to it:
# what a call is given, returns, or leaves in its arguments. An interval has its levels as if no watched storage died in
# it, and says where it drops its last reference; the storage dies with the last interval that does: `composed_peaks`.

GIVEN, RETURNED, STORED, HELD, VIEWED = range(5)
"""Roles of a call's tensors. `STORED` are left in its arguments; `HELD`, by others too, and `VIEWED` are gradients."""
Place = tuple[str, int, bool]
"""Interval of a step: phase, number of a block's call (-1: before all), and whether inside of it or around."""
Role = tuple[int, ...]
"""Relation of a tensor to a call, as `GIVEN`, and its position; in a step, the call's number comes first."""


class Mark(NamedTuple):
    """An interval begins."""

    place: Place
    live_bytes: int


class LastReference(NamedTuple):
    """The last reference to a watched storage is dropped; ``freed_bytes``: 0 if its bytes stay counted."""

    role: Role
    freed_bytes: int


Event = int | Mark | LastReference
"""Entry of a log; a number is a level, in bytes."""

Summed = frozenset[Role]
"""Gradients that are not a call's alone: (`GIVEN`, position, whether it is the first) of arguments to whose gradient
autograd adds others, and roles of its results' gradients."""


class IntervalLevels(NamedTuple):
    """An interval of a step as if no watched storage died in it: levels above its start, bytes that it leaves, and the
    level before which it drops its last reference to each of them.
    """

    levels: tuple[int, ...]
    left_bytes: int
    last_references: tuple[tuple[Role, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallLevels:
    """A call that was run alone, so that nobody else refers to what it is given and returns. ``cached_bytes`` of what
    its forward leaves are in autocast's cache; ``stores``: it leaves tensors in its arguments, which outlive it.
    """

    forward: IntervalLevels
    backward: IntervalLevels
    watched_bytes: Mapping[Role, int]
    cached_bytes: int
    stores: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RootLevels:
    """A step of stubs that refer to nothing: its intervals, and the role of what each call is given and returns."""

    intervals: tuple[tuple[Place, IntervalLevels], ...]
    touched: Sequence[Mapping[Role, Role]]
    summed: Sequence[Summed]
    watched_bytes: Mapping[Role, int]


def intervals_of(log: Sequence[Event], live_bytes: int) -> list[tuple[Place, IntervalLevels]]:
    """Intervals of a log that ends with so many bytes."""
    found: list[tuple[Place, IntervalLevels]] = []
    levels: list[int] = []
    drops: list[tuple[Role, int]] = []
    mark, freed = Mark(("", -1, False), 0), 0
    for event in [*log, Mark(mark.place, live_bytes)]:
        if isinstance(event, Mark):
            left = event.live_bytes + freed - mark.live_bytes
            found.append((mark.place, IntervalLevels(tuple(levels), left, tuple(drops))))
            mark, freed, levels, drops = event, 0, [], []
        elif isinstance(event, LastReference):
            drops.append((event.role, len(levels)))
            freed += event.freed_bytes
        else:
            levels.append(event + freed - mark.live_bytes)
    return found[1:]  # events before the first mark belong to no interval
