"""Fallback of regions without a recipe: checkpointed by rerunning their Python, if that gives the same, or plain.

NOTE [ Rerunning Python ]
A second run of a forward may differ from the first: its Python may have incremented a counter, drawn numbers, appended
to a list. So before a region without a program is checkpointed, it is tried: its forward runs twice on copies of the
tensors that it writes to, the second time as backward would run it, and every tensor that autograd saves is compared.
If all are equal the region is checkpointed; else it keeps its tensors as plain autograd does. Later runs leave
witnesses as recomputed tensors do (NOTE [ The promise ]), so that a run which differs after all stops the step. Changes
of Python state, buffers and random streams by the second run are undone.

A ``region`` here is its `PlannedForward`, which calls these functions.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

from jettison.capture.dispatch import CALLS_COMPILED, eagerly
from jettison.capture.isolation import WritesUndone, without_gradients, without_our_hooks
from jettison.capture.op_traits import unwritten_results
from jettison.capture.pytrees import op_leaves, tree_flatten, tree_leaves, tree_unflatten
from jettison.capture.randomness import Streams
from jettison.capture.reachable_state import Reach
from jettison.capture.recorder import TensorRef
from jettison.capture.signature import as_signed, global_signature
from jettison.capture.tensor_subclasses import (
    arrived,
    desugars,
    is_dense,
    plain,
    reach_of,
    storage_of,
    version_of,
    wrapping,
)
from jettison.core.errors import StaleTensor, UsageError, WrongValue
from jettison.core.objects import Entry, swapped_entries
from jettison.runtime.callers import of_a_region
from jettison.runtime.checked_run import SequenceCheck, SomeMode
from jettison.runtime.cuda_graphs import is_capturing
from jettison.runtime.graph_fingerprint import next_sequence_number
from jettison.runtime.offload import Group, stale
from jettison.runtime.offloaded_ranges import BufferRange, OffloadableBox
from jettison.runtime.recompute_code import OutsideOfVmap
from jettison.runtime.recordings import WRITTEN_LATER, PlannedRegion, Prepared, Verdict
from jettison.runtime.saved_handles import Held, opened
from jettison.runtime.saved_tensor_hooks import is_unpacked_again, keep_more_after_error
from jettison.runtime.views import Within, view_of
from jettison.runtime.witness import SALT, Check, Witness, compare, is_same, spots_of
from jettison.solve.checkpoint_policy import Offload, keeps_everything

Forward = Callable[..., Any]
MOST_VALUES_A_STEP = 5_000
RAN_BACKWARD = "its forward runs a backward of its own"


def run_without_recipe(region: PlannedRegion, prepared: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one call. The first one that may be recomputed is tried: see NOTE [ Rerunning Python ]."""
    is_kept = region.is_root or keeps_everything(region.plan.policy)
    if not is_kept and region.recordings.differs:
        prepared.verdict = Verdict(rerun=False, why=region.recordings.differs)
    if not is_kept and prepared.verdict is None and prepared.problem == CALLS_COMPILED:
        prepared.verdict = Verdict(rerun=False, why="compiled functions do not run where ops are watched")
    if not is_kept and prepared.verdict is None:
        late = region.recordings.late or region.recordings.late_inside
        prepared.verdict = (
            Verdict(rerun=False, why=WRITTEN_LATER) if late else try_rerun(region.module, region.own(), args, kwargs)
        )
        prepared.told = prepared.told and prepared.verdict.rerun
    if prepared.verdict is not None and prepared.verdict.interrupt is not None:
        interrupt, prepared.verdict = prepared.verdict.interrupt, None
        run_interrupted(region, interrupt, args, kwargs)
    _warn(region, prepared)
    if region.is_root:
        return region.forward(*args, **kwargs)
    if not is_kept and prepared.verdict is not None and prepared.verdict.rerun:
        if is_capturing():
            raise UsageError(
                f"a CUDA graph is being captured, and the Python of {region.name or 'the model'} is rerun in its "
                f"backward: {prepared.problem}. Leave it out with regions=[...]"
            )
        return Rerun(region, prepared.verdict, args, kwargs).run()
    policy = region.plan.policy
    with without_our_hooks(), _without_checks():  # its saved tensors are not the surrounding region's
        if isinstance(policy, Offload) and _may_offload(region, prepared):
            return run_with_offload(region, policy, region.forward, args, kwargs)
        return region.forward(*args, **kwargs)


def run_interrupted(
    region: PlannedRegion, interrupt: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NoReturn:
    """Do the real run, then raise the exception that its recording raised. See NOTE [ Interrupts ]."""
    with without_our_hooks():
        region.forward(*args, **kwargs)
    raise interrupt


def _without_checks() -> contextlib.AbstractContextManager[Any]:
    """Disable the dispatch modes of surrounding regions: compiled functions do not run under any."""
    modes = _get_current_dispatch_mode_stack()
    ours = bool(modes) and all(isinstance(mode, SequenceCheck | SomeMode) for mode in modes)
    return _disable_current_modes() if ours else contextlib.nullcontext()


def _may_offload(region: PlannedRegion, prepared: Prepared) -> bool:
    """Whether autograd gives back the values that it saved, and not later writes to them."""
    late = region.recordings.late or region.recordings.late_inside
    return not late and not (prepared.verdict is not None and prepared.verdict.rerun)


def run_with_offload(
    region: PlannedRegion, policy: Offload, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run one call, and offload its saved tensors as they are saved."""
    group = region.begin_group(moves=True)
    assert group is not None
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    lives = [*region.module.parameters(), *region.module.buffers(), *(leaf for leaf in given if leaf.is_leaf)]
    hooks = OffloadHooks(lives, None if region.stays() else group, policy.smallest_bytes)
    try:
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            return run(*args, **kwargs)
    finally:
        hooks.close()
        group.end()


def _warn(region: PlannedRegion, prepared: Prepared) -> None:
    """Warn that a region is not planned tensor by tensor, once for each reason."""
    if prepared.told:
        return
    prepared.told = True
    verdict = prepared.verdict
    is_kept = region.is_root or keeps_everything(region.plan.policy) or (verdict is not None and not verdict.rerun)
    moves = isinstance(region.plan.policy, Offload) and not region.is_root and _may_offload(region, prepared)
    kept = "offloaded to CPU as it is saved" if moves else "kept as plain autograd keeps it"
    what = kept if is_kept else "checkpointed whole"
    why = f" and not checkpointed, because {verdict.why}" if verdict is not None and verdict.why else ""
    text = f"{region.name or 'the model'} cannot be planned tensor by tensor and is {what}{why}: {prepared.problem}"
    keeps_more = is_kept and not moves and not keeps_everything(region.plan.policy)
    if keeps_more and region.has_assumptions():
        text += ". The plan counts on less, so that the peak may be above the budget (gradients are not affected)"
    region.warn_once(text, text)


# trials -------------------------------------------------------------------------------------------------------------


def try_rerun(module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Verdict:
    """Run a forward on real tensors twice as its checkpoint would, compare, and restore all state."""
    reach = Reach([module], [forward, *tree_leaves((args, kwargs))], most=MOST_VALUES_A_STEP)
    if reach.values > MOST_VALUES_A_STEP:
        return Verdict(
            rerun=False,
            why=f"its code can reach more than {MOST_VALUES_A_STEP} Python objects that may change, so that it takes "
            "too long to see in each step that a second run leaves them alone",
        )
    if reach.has_large_copies:
        return Verdict(rerun=False, why="it takes too long to copy, in each step, an array in its reach")
    elsewhere, originals = WritesUndone(), list(_buffers_of(module).values())
    streams, signature = Streams.now(), global_signature()
    digests = _RunDigests()
    reach.set_aside()
    try:
        # others wrap an array
        copies = _cloned({key: buffer for key, buffer in _buffers_of(module).items() if not reach.sees(buffer)})
        with without_gradients(module), _buffers_as(module, copies):
            before = {key: (version_of(b), _witness(b, 0, Check.FULL)) for key, b in copies.items()}
            again = _cloned(copies)
            given = _copied((args, kwargs))
            elsewhere.undo.adopt(
                [*copies.values(), *again.values(), *(t for t in tree_leaves(given) if isinstance(t, Tensor))]
            )
            elsewhere.undo.note(originals, handed=True)  # a NumPy view may write to the copies' originals
            compiled: list[str] = []
            with eagerly(lambda: compiled.append(CALLS_COMPILED)), elsewhere, digests.unwritten:
                first = _run(forward, given, digests.first, digests.refuse_backward)
                if compiled:
                    return Verdict(rerun=False, why=CALLS_COMPILED)
                if elsewhere.undo.wrote:
                    return Verdict(rerun=False, why="its forward writes to tensors that are no buffers of its")
            now = _tables(module)
            written = tuple(  # kernels that write statistics do not all bump the version counter
                (i, name)
                for (i, name), b in copies.items()
                if now[i].get(name) is not b or version_of(b) != before[i, name][0] or not before[i, name][1].agrees(b)
            )
            streams.restore()
            with as_signed(signature), _buffers_as(module, again):
                second = _run(forward, given, digests.second, digests.refuse_backward)
            if digests.ran_backward:
                return Verdict(rerun=False, why=RAN_BACKWARD)
            if digests.at != len(digests.seen):
                return Verdict(rerun=False, why="a second run of its forward saves other tensors")
            if not _same(first, second):
                return Verdict(rerun=False, why="a second run of its forward returns something else")
            unwritten = frozenset(number for number, witness in enumerate(digests.seen) if witness is None)
            return Verdict(rerun=True, written=written, unwritten=unwritten)
    except WrongValue:
        return Verdict(rerun=False, why="a second run of its forward gives other values")
    except Exception as error:  # the user's own is raised again by the real run
        line = (str(error).splitlines() or [""])[0][:200]
        why = RAN_BACKWARD if digests.ran_backward else f"a run on copies fails ({type(error).__name__}: {line})"
        return Verdict(rerun=False, why=why)
    except BaseException as interrupt:  # Ctrl-C, say
        return Verdict(rerun=False, why=f"its trial was left ({type(interrupt).__name__})", interrupt=interrupt)
    finally:
        streams.restore()
        reach.restore()


@dataclass(kw_only=True)
class _RunDigests:
    """Digests of the tensors of a first run, compared with those of a second."""

    seen: list[Witness | None] = field(default_factory=list)
    unwritten: _UnwrittenTensors = field(default_factory=lambda: _UnwrittenTensors())
    at: int = 0
    ran_backward: bool = False

    def refuse_backward(self, _packed: None) -> Tensor:
        """Refuse a backward inside the forward: its tensor is not kept, and a checkpoint could not recompute it."""
        self.ran_backward = True
        raise RuntimeError(RAN_BACKWARD)

    @of_a_region
    def first(self, tensor: Tensor) -> None:
        unseen = not is_dense(tensor) or self.unwritten.has(tensor)
        self.seen.append(None if unseen else _witness(tensor, 0, Check.FULL))

    @of_a_region
    def second(self, tensor: Tensor) -> None:
        self.at += 1
        if self.at > len(self.seen):
            raise WrongValue("a second run saves more")
        witness, inner = self.seen[self.at - 1], arrived(tensor)
        if witness is not None and not (_is_like(witness, inner) and witness.agrees(inner)):
            raise WrongValue("a second run differs")


class _UnwrittenTensors(TorchDispatchMode):
    """Finds tensors that no kernel writes; see `unwritten_results`."""

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
        self._found += unwritten_results(func, args, kwargs or {}, out)
        return out


def _witness(tensor: Tensor, salt: int, how: Check) -> Witness:
    inner = arrived(tensor)
    spots = spots_of(tuple(inner.shape), tuple(inner.stride()))
    return Witness(inner, spots, salt, full=how is Check.FULL)


def _is_like(witness: Witness, tensor: Tensor) -> bool:
    return witness.dtype is tensor.dtype and witness.spots == spots_of(tuple(tensor.shape), tuple(tensor.stride()))


def _run(
    forward: Forward, call: tuple[Any, Any], pack: Callable[[Tensor], None], asked: Callable[[None], Tensor]
) -> list[Witness]:
    """Run a forward; return witnesses of its results and the values that ``pack`` makes of its saved tensors."""
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, asked):
        output = forward(*call[0], **call[1])
    return [_witness(leaf, 0, Check.FULL) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _same(first: list[Witness], second: list[Witness]) -> bool:
    return len(first) == len(second) and all(
        a.spots == b.spots and a.dtype is b.dtype and is_same(a.seen, b.seen)
        for a, b in zip(first, second, strict=True)
    )


def _copied(call: tuple[Any, Any]) -> tuple[Any, Any]:
    """Copy the arguments, so that they may be written to."""
    leaves, spec = tree_flatten(call)
    with torch.no_grad():
        made = [_argument(leaf.clone(), leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return tree_unflatten(made, spec)


def _argument(tensor: Tensor, like: Tensor) -> Tensor:
    """Give a tensor the other's requires_grad; in a forward it is a leaf only if the other is."""
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


def _buffers_of(module: nn.Module) -> Buffers:
    """Dense buffers; sparse ones are created once, and not written to."""
    named = ((i, name, buffer) for i, table in enumerate(_tables(module)) for name, buffer in table.items())
    return {(i, name): buffer for i, name, buffer in named if buffer is not None and is_dense(buffer)}


def _cloned(buffers: Buffers) -> Buffers:
    with torch.no_grad():
        return {key: buffer.clone() for key, buffer in buffers.items()}


def _buffers_as(module: nn.Module, buffers: Buffers) -> contextlib.AbstractContextManager[None]:
    """Put these into the module's tables: writes to them are discarded afterwards."""
    tables = _tables(module)
    return swapped_entries((tables[i], name, buffer) for (i, name), buffer in buffers.items())


def _parameters_of(module: nn.Module) -> list[Entry]:
    tables = [sub._parameters for sub in module.modules()]
    return [(table, name, tensor) for table in tables for name, tensor in table.items() if tensor is not None]


def _parameters_as(parameters: Iterable[Entry]) -> contextlib.AbstractContextManager[None]:
    """Restore earlier parameters where modules have others now. FSDP refills those that it has emptied."""
    return swapped_entries(
        (table, name, tensor)
        for table, name, tensor in parameters
        if table.get(name) is not tensor and is_dense(tensor) and plain(tensor).untyped_storage().nbytes()
    )


def _named(module: nn.Module, without: set[tuple[int, str]]) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, except these buffers."""
    for i, (path, sub) in enumerate(module.named_modules()):
        prefix = f"{path}." if path else ""
        for name, tensor in (*sub._parameters.items(), *sub._buffers.items()):
            if tensor is not None and (i, name) not in without:
                yield prefix + name, tensor


class _Reads(TorchDispatchMode):
    """Refuses reads of tensors that were written to since the forward: by storage, name and versions then and now."""

    supports_higher_order_operators = True

    def __init__(
        self, moved: Mapping[int, tuple[str, int | None, int | None]], stale: Callable[..., StaleTensor]
    ) -> None:
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


# checkpointing --------------------------------------------------------------------------------------------------------


class Dropped:
    """A tensor that autograd saved in a region that will be rerun."""

    __slots__ = ("index", "rerun")

    def __init__(self, rerun: Rerun, index: int) -> None:
        self.rerun, self.index = rerun, index

    def open(self) -> Tensor:
        return self.rerun.value(self.index)


class Rerun:
    """One call of a region whose forward is rerun when backward unpacks a tensor that it saved."""

    def __init__(self, region: PlannedRegion, verdict: Verdict, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.region, self.module, self.forward = region, region.module, region.own()
        self.call, self.number, self.how = (args, kwargs), region.calls, region.how
        module = region.module
        self.versions = [(leaf, version_of(leaf)) for leaf in tree_leaves(self.call) if isinstance(leaf, Tensor)]
        self.free = {storage_of(t) for t in (*module.parameters(), *module.buffers()) if is_dense(t)}
        self.free |= {storage_of(leaf) for leaf, _ in self.versions}
        self.streams = Streams.now()
        self.signature = global_signature()
        self.buffers = _cloned({key: b for key, b in _buffers_of(module).items() if key in verdict.written})
        self.also: Buffers = {}  # further ones that this call wrote to
        self.parameters = _parameters_of(module)  # under functional_call others than the module's own
        self.left: dict[str, tuple[Tensor, int | None]] = {}  # named tensors that it read, and later versions
        self.count = 0
        self.unwritten, self.known = verdict.unwritten, verdict.known
        self.wanted: dict[int, Witness | None] = {}
        self.values: dict[int, Tensor] = {}

    def run(self) -> Any:
        before = {(key, b, version_of(b)) for key, b in _buffers_of(self.module).items()}  # tensors hash by identity
        with torch.autograd.graph.saved_tensors_hooks(self.pack, opened):
            output = self.forward(*self.call[0], **self.call[1])
        now = {key: b for key, b in _buffers_of(self.module).items() if key not in self.buffers}
        self.also = {key: b for key, b in now.items() if (key, b, version_of(b)) not in before}
        self.left = {n: (t, version_of(t)) for n, t in _named(self.module, {*self.buffers, *self.also}) if is_dense(t)}
        return output

    @of_a_region
    def pack(self, tensor: Tensor) -> Any:
        """Keep tensors that are alive anyway; leave a witness of all others."""
        index = self.count
        self.count += 1
        if not is_dense(tensor) or storage_of(tensor) in self.free:
            return Held(tensor)
        unseen = self.how is Check.OFF or index in self.unwritten
        self.wanted[index] = None if unseen else _witness(tensor, self.number * SALT + index, self.how)
        return Dropped(self, index)

    def value(self, index: int) -> Tensor:
        """The tensor of that number, as the forward saved it."""
        if index not in self.values:
            self._again()
        return self.values[index] if is_unpacked_again() else self.values.pop(index)

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
        # copies, so that another backward finds them as they were at the start of the forward
        buffers, also, elsewhere = _cloned(self.buffers), _cloned(self.also), WritesUndone()
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
                    raise self.wrong("it saves a tensor that it also writes to, and that is not one of its buffers")
            if reach.moved():
                raise self.wrong("it took from an iterator, which nothing puts back")
        finally:
            now.restore()
            reach.restore()
        if at != self.count:
            raise self.wrong(f"its forward saved {at} tensors when it was rerun, and {self.count} before")

    def wrong(self, what: str) -> WrongValue:
        """Return the error for a rerun that differed from the first run."""
        keep_more_after_error(self.region, what)
        return WrongValue(
            f"{self.region.name or 'the model'} was checkpointed and its forward rerun in backward, and {what} (call "
            f"{self.number} of this region). Its forward depends on state that changed between the two runs. The "
            "gradients of this step must not be used; from the next step on it is kept as plain autograd keeps it"
        )

    def stale(self, name: str, then: int | None, now: int | None) -> StaleTensor:
        """Return the error for a parameter, a buffer or, without a name, an argument that was written to."""
        parameters = (one for one, _ in self.module.named_parameters(remove_duplicate=False))
        what = f"{'parameter' if name in parameters else 'buffer'} {name!r}" if name else "an argument"
        keep_more_after_error(self.region, f"{what} was written to between forward and backward", {name} - {""})
        return StaleTensor(
            f"{what} of {self.region.name or 'the model'}, whose forward was checkpointed and rerun in backward, was "
            f"modified by an inplace operation between forward and backward: it is at version {now}; expected version "
            f"{then}. From the next step on it is kept as plain autograd keeps it"
        )

    def _take(self, index: int, tensor: Tensor) -> None:
        witness = self.wanted[index]
        if witness is not None:
            inner = arrived(tensor)
            if not _is_like(witness, inner):
                raise self.wrong(f"saved tensor {index} came back with another shape, {tuple(inner.shape)}")
            rounded = None if self.how is Check.EXACT else self.region.rounded
            compare(witness, inner, rounded, lambda: self.wrong(f"saved tensor {index} is not what forward had"))
        self.values[index] = tensor.detach() if not plain(tensor).is_leaf or not tensor.requires_grad else tensor


# offload hooks --------------------------------------------------------------------------------------------------------
#
# Offloading of a region without a recording: every tensor as it is saved, in whatever wrapper
#
# NOTE [ Saved before it is written ]
# Autograd saves the arguments of an op before its kernel runs, and `rrelu` draws into one of them. So a tensor is
# offloaded when the next op saves something, or the call ends: until then it may be uninitialized memory. A write in
# between is reported in backward, as autograd does.


@dataclass(eq=False, slots=True)
class _MovableTensor:
    """A tensor that may be offloaded, for autograd to hold. All on one storage share the box."""

    ref: TensorRef
    shared: _SharedRange
    group: Group

    def open(self) -> Tensor:
        self.group.asked()
        with torch.no_grad():
            return view_of(self.shared.open(), self.ref)


class _SharedRange:
    """One range of a storage, and the number of saved tensors on it: fetched bytes live until the last is unpacked."""

    __slots__ = ("box", "count", "flat", "left", "lock", "waiting", "written")

    def __init__(self, box: OffloadableBox, part: Tensor) -> None:
        self.box = box
        self.waiting: tuple[Tensor, int] | None = part, part._version  # until it is sent
        self.written: tuple[int, int] | None = None  # versions when it was saved and when its offload began
        self.count = self.left = 0
        self.flat: Tensor | None = None
        self.lock = threading.Lock()

    def send(self) -> None:
        if self.waiting is None:  # a backward inside of the call has read it, and it is sent
            return
        (part, version), self.waiting = self.waiting, None
        if part._version == version:
            self.box.fill(part)
        else:
            self.written = version, part._version

    def open(self) -> Tensor:
        self.send()
        if self.written is not None:
            raise stale("a saved tensor", "a planned region", *self.written)
        with self.lock:
            flat = self.box.open() if self.flat is None else self.flat
            self.left -= 1
            if self.left <= 0:
                self.flat, self.left = None, self.count
            else:
                self.flat = flat
            return flat


class _Wrapped:
    """A tensor subclass taken apart: the tensors inside are offloaded by themselves."""

    __slots__ = ("cls", "context", "inner", "size", "stride")

    def __init__(self, tensor: Any, inner: dict[str, Any], context: Any) -> None:
        self.cls, self.inner, self.context = type(tensor), inner, context
        self.size, self.stride = tensor.size(), tensor.stride()

    def open(self) -> Tensor:
        inner = {name: packed.open() for name, packed in self.inner.items()}
        return self.cls.__tensor_unflatten__(inner, self.context, self.size, self.stride)


class OffloadHooks:
    """Hooks of one call. ``lives`` are tensors that stay alive anyway: parameters, buffers, the caller's. Nothing is
    offloaded without a group, nor below ``smallest_bytes``.
    """

    def __init__(self, lives: Iterable[Tensor], group: Group | None, smallest_bytes: int) -> None:
        self.lives = {storage_of(part) for tensor in lives for part in _parts(tensor)}
        self.group = group
        self.smallest_bytes = smallest_bytes
        self.boxes: dict[tuple[int, int, int, int], _SharedRange] = {}
        self.waiting: list[_SharedRange] = []
        self.number = -1  # sequence number after the node of the op that is saving

    @of_a_region
    def sent(self, tensor: Tensor) -> Any:
        """Pack hook: offload a tensor that autograd saves, if it may move."""
        if self.group is None:
            return Held(tensor)
        if self.number != (number := next_sequence_number()):
            self._send()
            self.number = number
        if wrapping(tensor) is None and is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            return _Wrapped(tensor, {name: self.sent(getattr(tensor, name)) for name in names}, context)
        if not is_dense(tensor) or storage_of(tensor) in self.lives or tensor.is_inference():
            return Held(tensor)
        part = arrived(tensor)
        nbytes = reach_of(part.shape, part.stride()) * part.element_size()
        if nbytes < self.smallest_bytes or part.device != self.group.engine.place:
            return Held(tensor)
        begin, nbytes = self.range_of(part, nbytes)
        key = (part.untyped_storage()._cdata, part._version, begin, nbytes)
        shared = self.boxes.get(key)
        if shared is None:
            box = OffloadableBox(BufferRange(seen=TensorRef.of(0, part), begin=begin, nbytes=nbytes), self.group)
            shared = self.boxes[key] = _SharedRange(box, part)
            self.waiting.append(shared)
        shared.count += 1
        shared.left += 1
        return _MovableTensor(Within.since(begin, TensorRef.of(0, tensor)), shared, self.group)

    def _send(self) -> None:
        for shared in self.waiting:
            shared.send()
        self.waiting.clear()

    def range_of(self, part: Tensor, reach_bytes: int) -> tuple[int, int]:
        """Range of a tensor's storage to offload: its start, and bytes."""
        return part.storage_offset() * part.element_size(), reach_bytes

    def close(self) -> None:
        """End the call: the graph alone owns its offloaded tensors."""
        self._send()
        self.boxes.clear()

    pack, unpack = sent, opened


def _parts(tensor: Tensor) -> list[Tensor]:
    if wrapping(tensor) is None and is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _parts(getattr(tensor, name))]
    return [tensor]
