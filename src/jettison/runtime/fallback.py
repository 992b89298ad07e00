"""Regions that have no program: checkpointed by running their Python again, where that gives the same values.

NOTE [ Running Python again ]
A second run of a forward may differ from the first: its Python may have counted on, drawn numbers, left something in a
list. So before a region without a program is checkpointed, it is tried: its forward runs twice on copies of what it
writes to, the second time as backward would run it, and every tensor that autograd saves is compared. If all are equal
the region is checkpointed; else it is kept as plain autograd keeps it. Later runs leave witnesses as recomputed tensors
do (NOTE [ The promise ]), so that a run which differs after all stops the step. What the second run does to Python
state, buffers and random streams is undone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from jettison.capture.compiled import CALLS_COMPILED, eagerly
from jettison.capture.op_traits import hollow_results
from jettison.capture.python_state import Known, Reach
from jettison.capture.signature import as_signed, global_signature
from jettison.capture.streams import Streams
from jettison.capture.tensor_subclasses import arrived, desugars, is_dense, plain, storage_of, version_of
from jettison.capture.trees import op_leaves, tree_flatten, tree_leaves, tree_unflatten
from jettison.capture.undo import WritesUndone
from jettison.errors import StaleTensor, WrongValue
from jettison.runtime.callers import of_a_region
from jettison.runtime.frame import is_asked_again
from jettison.runtime.handles import Held
from jettison.runtime.steps import OutsideOfVmap
from jettison.runtime.witness import Check, Rounded, Witness, compare, is_same, spots_of

Forward = Callable[..., Any]
Stale = Callable[[str, int | None, int | None], StaleTensor]
"""Makes the error for a tensor that was written to since the forward, from its name (of an argument none) and both
versions."""
MOST_VALUES_A_STEP = 5_000
RAN_BACKWARD = "its forward runs a backward of its own"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a trial found: whether the forward may run ``again`` in backward, and if not, why."""

    again: bool
    why: str = ""
    written: tuple[tuple[int, str], ...] = ()  # buffers that the forward writes to: (number of the module, name)
    hollow: frozenset[int] = frozenset()  # numbers of saved tensors that no kernel writes
    interrupt: BaseException | None = None  # left the trial; the run that counts comes first
    known: Known = field(default_factory=dict)  # large containers that it reaches


def trial(module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Verdict:
    """Run a forward twice as its checkpoint would, compare, and leave nothing behind.

    Args:
        forward: of ``module``, on real tensors.
    """
    reach = Reach([module], [forward, *tree_leaves((args, kwargs))], most=MOST_VALUES_A_STEP)
    if reach.values > MOST_VALUES_A_STEP:
        return Verdict(
            again=False,
            why=f"its code can reach more than {MOST_VALUES_A_STEP} Python objects that may change, so that it takes "
            "too long to see in each step that a second run leaves them alone",
        )
    if reach.has_large_copies:
        return Verdict(again=False, why="it takes too long to copy, in each step, an array in its reach")
    elsewhere, originals = WritesUndone(), [buffer for _, buffer in _buffers_of(module)]
    streams, signature = Streams.now(), global_signature()
    looks = _Looks()
    reach.set_aside()
    try:
        own = tuple(
            key for key, buffer in _buffers_of(module) if not reach.sees(buffer)
        )  # others have an array in them
        with _without_gradients(module), _buffers_as(module, _copies(module, own)) as copies:
            before = {key: (version_of(b), _witness(b, 0, Check.FULL)) for key, b in copies.items()}
            again = _cloned(copies)
            given = _copied((args, kwargs))
            elsewhere.undo.adopt(
                [*copies.values(), *again.values(), *(t for t in tree_leaves(given) if isinstance(t, Tensor))]
            )
            elsewhere.undo.note(originals, handed=True)  # a view of numpy's may write to what the copies stand in for
            compiled: list[str] = []
            with eagerly(lambda: compiled.append(CALLS_COMPILED)), elsewhere, looks.hollow:
                first = _run(forward, given, looks.first, looks.asked)
                if compiled:
                    return Verdict(again=False, why=CALLS_COMPILED)
                if elsewhere.undo.wrote:
                    return Verdict(again=False, why="its forward writes to tensors that are no buffers of its")
            now = _tables(module)
            written = tuple(  # kernels that write statistics do not all tell the version counter
                (i, name)
                for (i, name), b in copies.items()
                if now[i].get(name) is not b or version_of(b) != before[i, name][0] or not before[i, name][1].agrees(b)
            )
            streams.restore()
            with as_signed(signature), _buffers_as(module, again):
                second = _run(forward, given, looks.second, looks.asked)
            if looks.ran_backward:
                return Verdict(again=False, why=RAN_BACKWARD)
            if looks.at != len(looks.seen):
                return Verdict(again=False, why="a second run of its forward saves other tensors")
            if not _same(first, second):
                return Verdict(again=False, why="a second run of its forward returns something else")
            return Verdict(again=True, written=written, hollow=looks.skipped)
    except WrongValue:
        return Verdict(again=False, why="a second run of its forward gives other values")
    except Exception as error:  # one of the user's own comes again where the forward runs as it is
        line = (str(error).splitlines() or [""])[0][:200]
        why = RAN_BACKWARD if looks.ran_backward else f"a run on copies fails ({type(error).__name__}: {line})"
        return Verdict(again=False, why=why)
    except BaseException as interrupt:  # Ctrl-C, say
        return Verdict(again=False, why=f"its trial was left ({type(interrupt).__name__})", interrupt=interrupt)
    finally:
        streams.restore()
        reach.restore()


@dataclass(kw_only=True)
class _Looks:
    """Digests of the tensors of a first run, held against those of a second."""

    seen: list[Witness | None] = field(default_factory=list)
    hollow: _Hollow = field(default_factory=lambda: _Hollow())
    at: int = 0
    ran_backward: bool = False

    def asked(self, _packed: None) -> Tensor:
        """Only a backward inside the forward asks: what it wants is not held, and a checkpoint could not give it."""
        self.ran_backward = True
        raise RuntimeError(RAN_BACKWARD)

    @property
    def skipped(self) -> frozenset[int]:
        """Numbers of saved tensors that have no values."""
        return frozenset(number for number, witness in enumerate(self.seen) if witness is None)

    def first(self, tensor: Tensor) -> None:
        unseen = not is_dense(tensor) or self.hollow.has(tensor)
        self.seen.append(None if unseen else _witness(tensor, 0, Check.FULL))

    def second(self, tensor: Tensor) -> None:
        self.at += 1
        if self.at > len(self.seen):
            raise WrongValue("a second run saves more")
        witness, inner = self.seen[self.at - 1], arrived(tensor)
        if witness is not None and not (_is_like(witness, inner) and witness.agrees(inner)):
            raise WrongValue("a second run differs")


class _Hollow(TorchDispatchMode):
    """Knows tensors that no kernel writes; see `hollow_results`."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._found: list[Tensor] = []

    def has(self, tensor: Tensor) -> bool:
        return any(storage_of(tensor) == storage_of(found) for found in self._found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if desugars(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        self._found += hollow_results(func, args, kwargs or {}, out)
        return out


def _witness(tensor: Tensor, salt: int, how: Check) -> Witness:
    inner = arrived(tensor)
    spots = spots_of(tuple(inner.shape), tuple(inner.stride()))
    return Witness(inner, spots, salt, full=how is Check.FULL)


def _is_like(witness: Witness, tensor: Tensor) -> bool:
    return witness.dtype is tensor.dtype and witness.spots == spots_of(tuple(tensor.shape), tuple(tensor.stride()))


def _run(
    forward: Forward, call: tuple[Any, Any], saved: Callable[[Tensor], None], asked: Callable[[None], Tensor]
) -> list[Witness]:
    """A forward of which only what ``saved`` makes of its saved tensors stays."""

    @of_a_region
    def pack(tensor: Tensor) -> None:
        saved(tensor)

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, asked):
        output = forward(*call[0], **call[1])
    return [_witness(leaf, 0, Check.FULL) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _same(first: list[Witness], second: list[Witness]) -> bool:
    return len(first) == len(second) and all(
        a.spots == b.spots and a.dtype is b.dtype and is_same(a.seen, b.seen)
        for a, b in zip(first, second, strict=True)
    )


def _copied(call: tuple[Any, Any]) -> tuple[Any, Any]:
    """Arguments whose tensors may be written to."""
    leaves, spec = tree_flatten(call)
    with torch.no_grad():
        made = [_argument(leaf.clone(), leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return tree_unflatten(made, spec)


def _argument(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that wants gradients as the other one does, and in a forward is no leaf where that is none."""
    tensor = tensor.detach()
    if not like.requires_grad:
        return tensor
    tensor.requires_grad_()
    if like.is_leaf:
        return tensor
    with torch.enable_grad():
        return tensor.view_as(tensor)


# buffers --------------------------------------------------------------------------------------------------------------

Buffers = dict[tuple[int, str], Tensor]


def _tables(module: nn.Module) -> list[dict[str, Any]]:
    return [sub._buffers for sub in module.modules()]


def _buffers_of(module: nn.Module) -> Iterator[tuple[tuple[int, str], Tensor]]:
    for i, table in enumerate(_tables(module)):
        for name, buffer in table.items():
            if buffer is not None and is_dense(buffer):  # sparse ones are made once, and not written to
                yield (i, name), buffer


def _cloned(buffers: Buffers) -> Buffers:
    with torch.no_grad():
        return {key: buffer.clone() for key, buffer in buffers.items()}


def _copies(module: nn.Module, only: tuple[tuple[int, str], ...] | None = None) -> Buffers:
    return _cloned({key: buffer for key, buffer in _buffers_of(module) if only is None or key in only})


def _is_as_before(buffer: Tensor, before: tuple[Tensor, int | None] | None) -> bool:
    """Whether a buffer is the same tensor, at the same version. A forward may put another tensor in its place."""
    return before is not None and before[0] is buffer and before[1] == version_of(buffer)


@contextlib.contextmanager
def _buffers_as(module: nn.Module, buffers: Buffers) -> Iterator[Buffers]:
    """The module has other tensors for buffers meanwhile: what is written to them is gone afterwards."""
    tables = _tables(module)
    before = {(i, name): tables[i][name] for i, name in buffers}
    for (i, name), buffer in buffers.items():
        tables[i][name] = buffer
    try:
        yield buffers
    finally:
        for (i, name), buffer in before.items():
            tables[i][name] = buffer


Parameters = list[tuple[dict[str, Any], str, Tensor]]


def _parameters_of(module: nn.Module) -> Parameters:
    tables = [sub._parameters for sub in module.modules()]
    return [(table, name, tensor) for table in tables for name, tensor in table.items() if tensor is not None]


@contextlib.contextmanager
def _parameters_as(parameters: Parameters) -> Iterator[None]:
    """Modules have these meanwhile, where they have others by now. What FSDP has emptied it fills again by itself."""
    before = [
        (table, name, table.get(name))
        for table, name, tensor in parameters
        if table.get(name) is not tensor and is_dense(tensor) and plain(tensor).untyped_storage().nbytes()
    ]
    others = {(id(table), name) for table, name, _ in before}
    for table, name, tensor in parameters:
        if (id(table), name) in others:
            table[name] = tensor
    try:
        yield
    finally:
        for table, name, own in before:
            if own is None:
                del table[name]
            else:
                table[name] = own


def _named(module: nn.Module, without: set[tuple[int, str]]) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, but for these buffers."""
    for i, (path, sub) in enumerate(module.named_modules()):
        prefix = f"{path}." if path else ""
        for name, tensor in (*sub._parameters.items(), *sub._buffers.items()):
            if tensor is not None and (i, name) not in without:
                yield prefix + name, tensor


class _Reads(TorchDispatchMode):
    """Refuses to read what was written to since the forward.

    Args:
        moved: by storage, its name, and its version then and now.
    """

    supports_higher_order_operators = True

    def __init__(self, moved: Mapping[int, tuple[str, int | None, int | None]], stale: Stale) -> None:
        super().__init__()
        self.moved, self.stale = moved, stale

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if desugars(types):
            return NotImplemented
        if isinstance(func, HigherOrderOperator) or not func.is_view:
            for tensor in op_leaves(args, kwargs or {}):
                if isinstance(tensor, Tensor) and is_dense(tensor) and storage_of(tensor) in self.moved:
                    raise self.stale(*self.moved[storage_of(tensor)])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _without_gradients(module: nn.Module) -> Iterator[None]:
    """What a forward adds to gradients of the module's parameters is gone afterwards."""
    before = [(parameter, parameter.grad) for parameter in module.parameters()]
    try:
        for parameter, _ in before:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


# checkpointing --------------------------------------------------------------------------------------------------------


class Dropped:
    """A tensor that autograd saved in a region that will run again."""

    __slots__ = ("index", "rerun", "witness")

    def __init__(self, rerun: Rerun, index: int, witness: Witness | None) -> None:
        self.rerun = rerun
        self.index = index
        self.witness = witness


class Rerun:
    """One call of a region whose forward runs again when backward asks for what it saved.

    Args:
        wrong: makes the error for a tensor that came back as another one, from what is wrong with it.
        stale: see `Stale`.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        verdict: Verdict,
        how: Check,
        salt: int,
        wrong: Callable[[str], WrongValue],
        stale: Stale,
        rounded: Rounded,
    ) -> None:
        self.module = module
        self.forward = forward
        self.call = (args, kwargs)
        self.how = how
        self.salt = salt
        self.wrong, self.stale = wrong, stale
        self.rounded = None if how is Check.EXACT else rounded
        self.versions = [(leaf, version_of(leaf)) for leaf in tree_leaves(self.call) if isinstance(leaf, Tensor)]
        self.free = {storage_of(t) for t in (*module.parameters(), *module.buffers()) if is_dense(t)}
        self.free |= {storage_of(leaf) for leaf, _ in self.versions}
        self.streams = Streams.now()
        self.signature = global_signature()
        self.buffers = _copies(module, verdict.written)
        self.also: Buffers = {}  # written to as well, this time
        self.parameters = _parameters_of(module)  # under functional_call others than the module's own
        self.left: dict[str, tuple[Tensor, int | None]] = {}  # what it read by name, and the versions after the forward
        self.count = 0
        self.hollow = verdict.hollow
        self.known = verdict.known
        self.wanted: dict[int, Witness | None] = {}
        self.values: dict[int, Tensor] = {}

    def run(self) -> Any:
        """The forward itself."""
        before = {key: (b, version_of(b)) for key, b in _buffers_of(self.module)}
        with torch.autograd.graph.saved_tensors_hooks(self.pack, unpack_dropped):
            output = self.forward(*self.call[0], **self.call[1])
        written = {key: b for key, b in _buffers_of(self.module) if not _is_as_before(b, before.get(key))}
        self.also = {key: b for key, b in written.items() if key not in self.buffers}
        self.left = {n: (t, version_of(t)) for n, t in _named(self.module, {*self.buffers, *self.also}) if is_dense(t)}
        return output

    @of_a_region
    def pack(self, tensor: Tensor) -> Any:
        """What is there anyway is kept; everything else leaves a witness."""
        index = self.count
        self.count += 1
        if not is_dense(tensor) or storage_of(tensor) in self.free:
            return Held(tensor)
        unseen = self.how is Check.OFF or index in self.hollow
        witness = None if unseen else _witness(tensor, self.salt + index, self.how)
        self.wanted[index] = witness
        return Dropped(self, index, witness)

    def value(self, index: int) -> Tensor:
        """The tensor of that number, as the forward saved it."""
        if index not in self.values:
            self._again()
        return self.values[index] if is_asked_again() else self.values.pop(index)

    def _again(self) -> None:
        for leaf, version in self.versions:
            if version_of(leaf) != version:
                raise self.stale("", version, version_of(leaf))
        moved = {storage_of(t): (n, v, version_of(t)) for n, (t, v) in self.left.items() if version_of(t) != v}
        leaves, spec = tree_flatten(self.call)
        with torch.no_grad():
            given = [_argument(leaf, leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(given, spec)
        at = 0

        @of_a_region
        def pack(tensor: Tensor) -> None:
            nonlocal at
            if at in self.wanted:
                self._take(at, tensor)
            at += 1

        def unpack(_packed: None) -> Tensor:
            raise self.wrong(RAN_BACKWARD)

        now, reach = Streams.now(), Reach([self.module], [self.forward, *leaves], known=self.known)
        buffers, also, elsewhere = self._buffers(), _cloned(self.also), WritesUndone()
        elsewhere.undo.adopt([*buffers.values(), *also.values()])
        self.streams.restore()
        reach.set_aside()
        try:
            with (
                elsewhere,
                torch.enable_grad(),
                OutsideOfVmap(),
                as_signed(self.signature),
                _buffers_as(self.module, buffers),
                _buffers_as(self.module, also),
                _parameters_as(self.parameters),
                _Reads(moved, self.stale) if moved else contextlib.nullcontext(),
                torch.autograd.graph.saved_tensors_hooks(pack, unpack),
            ):
                self.forward(*args, **kwargs)
                if any(elsewhere.undo.has_written(value) for value in self.values.values()):
                    raise self.wrong("it saves a tensor that it writes to as well, and that is no buffer of its")
            if reach.moved():
                raise self.wrong("it took from an iterator, which nothing puts back")
        finally:
            now.restore()
            reach.restore()
        if at != self.count:
            raise self.wrong(f"its forward saved {at} tensors when it ran again, and {self.count} before")

    def _buffers(self) -> Buffers:
        """As they were when the forward began; copies, so that another backward finds them so again."""
        return _cloned(self.buffers)

    def _take(self, index: int, tensor: Tensor) -> None:
        witness = self.wanted[index]
        if witness is not None:
            inner = arrived(tensor)
            if not _is_like(witness, inner):
                raise self.wrong(f"saved tensor {index} came back with another shape, {tuple(inner.shape)}")
            compare(witness, inner, self.rounded, lambda: self.wrong(f"saved tensor {index} is not what forward had"))
        self.values[index] = tensor.detach() if not plain(tensor).is_leaf or not tensor.requires_grad else tensor


def unpack_dropped(packed: Any) -> Tensor:
    """Autograd wants a saved tensor of a region that runs again, or one that it held."""
    if type(packed) is Dropped:
        return packed.rerun.value(packed.index)
    return packed.open()
