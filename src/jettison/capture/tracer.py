"""Trace a whole model: one program per class of blocks, one for the root around them, and the order of the calls."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.multiprocessing.reductions import StorageWeakRef

from jettison.capture.block_stand_ins import forwards, is_real, observed_trace, stub_outputs
from jettison.capture.blocks import find_blocks, structural_keys
from jettison.capture.dispatch import CaptureMode, tracing
from jettison.capture.fake_copies import StepFakeMode, fake_batch, fake_copy, fake_mode, guessing
from jettison.capture.fsdp2 import cast_batch, sharded_modules
from jettison.capture.isolation import Isolation, forward_of, leaving_nothing
from jettison.capture.model_trace import BlockCall, BlockClass, Loop, LossFn, ModelTrace, as_batch, as_call, loss_of
from jettison.capture.pytrees import tree_flatten, tree_leaves, tree_unflatten
from jettison.capture.randomness import default_stream
from jettison.capture.recorder import OpRecorder, Place, RegionTrace, TensorRef
from jettison.capture.signature import call_signature, global_signature, opaque_copy
from jettison.capture.state_kinds import StreamState
from jettison.capture.tensor_subclasses import arrived, has_gradients, plain, stepped_in_backward, storage_of, wrapping
from jettison.core.errors import JettisonError, RecordingLeft, TraceError
from jettison.core.objects import set_to, swapped
from jettison.ledger.program import Op

MOST_CHANGES = 32  # of the set of regions, before a trace fails


def trace_model(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    regions: Iterable[str] | None = None,
    values_known: bool = True,
    mode: FakeTensorMode | None = None,
    loop: Loop | None = None,
) -> ModelTrace:
    """Record one training forward without allocating model memory.

    Args:
        model: any module; its tensors may be real, fake (then ``mode`` is theirs) or on ``meta``.
        values_known: the batch holds real values that the forward may read.
        loop: the training loop.

    Raises:
        TraceError: the root itself cannot be recorded, or there is no scalar loss.
    """
    mode = mode or fake_mode(allow_non_fake_inputs=True)
    changes: list[str] = []
    for _ in range(MOST_CHANGES):
        try:
            trace = _traced(model, batch, loss_fn, regions, values_known, mode, loop or Loop())
        except OtherRegions as other:
            regions = other.regions
            changes.append(str(other))
            if other.guesses and isinstance(mode, StepFakeMode):
                mode.guesses = True
        else:
            trace.warnings[:0] = changes
            return trace
    raise TraceError(f"no way to divide {type(model).__name__} into regions was found: {'; '.join(changes[-2:])}")


def _traced(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None,
    regions: Iterable[str] | None,
    values_known: bool,
    mode: FakeTensorMode,
    loop: Loop,
) -> ModelTrace:
    """See `trace_model`. Raises `OtherRegions` if it can be traced with others."""
    started = time.perf_counter()
    is_sharded = bool(sharded_modules(model))
    with torch.random.fork_rng(devices=[]):
        fake_model = fake_copy(model, mode)
        held = batch if values_known else fake_batch(batch, mode)
        if is_sharded:
            held = as_batch(*cast_batch(model, *as_call(held)))
    tracer = Tracer(fake_model, mode, regions, model if values_known and is_real(model) and not is_sharded else None)
    root_signature = (call_signature(*as_call(held))[1], global_signature())
    given = as_batch(*opaque_copy(as_call(held)))
    with (
        tracing(mode, values_known=values_known),
        tracer.installed(),
        uncached_autocast(),
        torch.enable_grad(),
        leaving_nothing([fake_model], [loss_fn, *tree_leaves(given)]) as state,
    ):
        with unseen_outputs(tracer.classes):
            root, outside = tracer.run(given, loss_fn)
        _note_draws(root, state)
    trace = ModelTrace(
        calls=tracer.calls,
        classes=tracer.classes,
        root=root,
        fake_model=fake_model,
        mode=mode,
        batch=held,
        loss_fn=loss_fn,
        values_known=values_known,
        real=tracer.real,
        seconds=time.perf_counter() - started,
        root_signature=root_signature,
        outside=outside,
        loop=loop,
    )
    if root.problem:
        trace.warnings.append(
            f"what {type(model).__name__} does around its blocks is kept as plain autograd keeps it: {root.problem}"
            f"{_about_skipped(tracer)}"
        )
    for cls in trace.classes.values():
        if cls.problem:
            trace.warnings.append(
                f"blocks like {cls.example} cannot be recorded: they are checkpointed whole where a second run of "
                f"their Python gives the same values, and kept where not: {cls.problem}"
            )
    shared: dict[str, set[int]] = {}  # rotary tables, masks, encoder output: they cost no single block a byte
    for call, storages in zip(trace.calls, tracer.memory.given, strict=True):
        call.shared = shared.setdefault(call.class_key, set())  # one set for all calls of a class
        call.shared |= {p for p, storage in storages.items() if len(tracer.uses.get(storage, ())) > 1}
    for key, positions in shared.items():
        trace.classes[key].trace.share(positions)
    assert tracer.root is not None
    mark_overwritten(trace, tracer.memory, tracer.root)
    for call in trace.calls:
        trace.classes[call.class_key].trace.anchor_detached(stepped_in_backward(model.get_submodule(call.name)))
    trace.root.anchor_detached(stepped_in_backward(model))
    return trace


def uncached_autocast() -> contextlib.AbstractContextManager[None]:
    """Make autocast cast a weight at every use: of its cache no recorded op would have made the copies."""
    return set_to(False, torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled)


@contextlib.contextmanager
def on_fakes(mode: FakeTensorMode) -> Iterator[None]:
    """Record a region on fake tensors, from the arguments of a real call."""
    with warnings.catch_warnings(), recording_errors(), tracing(mode, values_known=True), uncached_autocast():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # by faking
        with torch.enable_grad():
            yield


def trace_root(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], blocks: Iterable[str]) -> RegionTrace:
    """Record a model's ops around its blocks, for arguments like these; a `TraceError` if it needs values."""
    mode = mode_of(module, args, kwargs)
    fake_model = fake_copy(module, mode)
    tracer = Tracer(fake_model, mode, blocks, module if is_real(module) and not sharded_modules(module) else None)
    args, kwargs = opaque_copy((args, kwargs))
    with on_fakes(mode), tracer.installed(), leaving_nothing([fake_model], tree_leaves((args, kwargs))) as state:
        output, root = tracer.forward(args, kwargs)
        trace = root.finish(output)
        anchor_root(trace, tracer.memory.in_the_root(root))
        _note_draws(trace, state)
    return trace


@contextlib.contextmanager
def unseen_outputs(classes: dict[str, BlockClass]) -> Iterator[None]:
    """Raise `TraceError` if code around a block that was only observed fails without more of it than its outputs."""
    try:
        yield
    except (LookupError, AttributeError, TypeError) as error:
        cls = next((cls for cls in classes.values() if cls.problem), None)
        if cls is None:
            raise
        raise TraceError(
            f"blocks like {cls.example} cannot be recorded ({cls.problem}), and the code around them failed without "
            f"what they do besides returning their outputs ({type(error).__name__}: {error}); switch that off (outputs "
            "that hooks collect, auxiliary losses), or train this model without a plan"
        ) from error


def _about_skipped(tracer: Tracer) -> str:
    """Describe blocks that this forward skipped while others of their list ran: the next one may run them."""
    ran = {call.name for call in tracer.calls}
    lists = {name.rpartition(".")[0] for name in ran}
    left = [name for name in tracer.names if name not in ran and name.rpartition(".")[0] in lists]
    if not left:
        return ""
    return (
        f". {len(left)} of {len(tracer.names)} blocks ({', '.join(left[:3])}{', ...' if left[3:] else ''}) did not run "
        "in the forward that was planned for, and one that runs them may take more than the budget (gradients are not "
        "affected). To have it held: plan with a rate at which none is left out, and set the rate afterwards"
    )


def _note_draws(root: RegionTrace, state: Isolation) -> None:
    """Allow the root, which is never recomputed, to draw from unknown streams, and NumPy's writes."""
    try:
        state.refuse_unseen()
    except TraceError as error:
        root.problem = root.problem or str(error)


def mode_of(module: nn.Module, args: Any, kwargs: Any) -> FakeTensorMode:
    """The fake mode that these tensors belong to, or a new one."""
    tensors = map(plain, [*tree_leaves((args, kwargs)), *module.parameters()])
    found = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
    return found or fake_mode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def recording_errors() -> Iterator[None]:
    """Turn errors of a forward on fake tensors into `TraceError`."""
    try:
        yield
    except JettisonError:
        raise
    except Exception as error:
        _raise_refused(error)
        first = str(error).splitlines()[0][:200] if str(error) else ""
        kinds = (RuntimeError, NotImplementedError, TypeError, ValueError, LookupError, AssertionError, *VALUES_WANTED)
        kind = TraceError if isinstance(error, kinds) else RecordingLeft
        raise kind(f"{type(error).__name__}: {first}") from error


def _raise_refused(error: Exception) -> None:
    """Raise the `TraceError` that a forward raised inside of `Module.to`, which raises another from it."""
    if not isinstance(error, TraceError) and isinstance(error.__cause__, TraceError):
        raise error.__cause__ from None


class Tracer:
    """Runs the fake copy once: blocks are recorded on the first call of their class, later calls are stubbed."""

    def __init__(
        self, fake_model: nn.Module, mode: FakeTensorMode, regions: Iterable[str] | None, real: nn.Module | None = None
    ) -> None:
        self.fake_model = fake_model
        self.mode = mode
        self.real = real  # the model itself, if it has values
        self.names = find_blocks(fake_model, regions)
        self.capture = CaptureMode()
        self.calls: list[BlockCall] = []
        self.classes: dict[str, BlockClass] = {}
        self.root: OpRecorder | None = None
        self.uses: dict[int, set[int]] = {}  # storage -> block calls that got it, and do not just return it
        self.memory = MemoryUses()
        self._keys: dict[str, Any] = {}
        self.stream = default_stream()  # nothing draws during a trace
        self._likenesses: dict[Any, BlockClass] = {}
        self._held: list[Any] = []
        self._last_output: dict[int, int] = {}

    def installed(self) -> contextlib.AbstractContextManager[None]:
        modules = {name: self.fake_model.get_submodule(name) for name in self.names}
        self._keys = structural_keys(modules)
        return forwards({m: partial(self._block, name, m, m.forward) for name, m in modules.items()})

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpRecorder]:
        leaves, _ = call_signature(args, kwargs)
        self.root = root = OpRecorder(self.fake_model, leaves, strict=False, stream=self.stream)
        with self._recording(root):
            output = forward_of(self.fake_model, self.fake_model)(*args, **kwargs)
        return output, root

    @contextlib.contextmanager
    def _recording(self, root: OpRecorder) -> Iterator[None]:
        """Record code around the blocks. If it reads values of fake tensors, raise `OtherRegions` if the module that
        reads them can be a region (there is a real one to observe), or values can be made up; else a `TraceError`.
        """
        try:
            with self.capture, self.capture.recording(root):
                yield
        except VALUES_WANTED as error:
            path = root.where
            got = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            apart = not any(f"{name}.".startswith(f"{path}.") or path.startswith(f"{name}.") for name in self.names)
            if path and apart and self.real is not None:
                why = f"what {path} does depends on values ({got}), so that it is a region of its own"
                raise OtherRegions([*self.names, path], why) from error
            if isinstance(self.mode, StepFakeMode) and not self.mode.guesses:
                why = (
                    f"what {path or 'the model'} does around its blocks depends on values that are not known when it "
                    f"is planned ({got}): conditions count as true, numbers as 1 and masks as choosing everything; "
                    "where they are not, a step may need more or less than was planned (gradients are not affected)"
                )
                raise OtherRegions(self.names, why, guesses=True) from error
            raise TraceError(
                f"{path or 'the model'} itself, around its blocks, decides by values that are not known when it is "
                f"planned ({got}); put that code into a module of its own and name it with regions=[...], or compute "
                "it from the output with loss_fn=..."
            ) from error
        except RuntimeError as error:
            _raise_refused(error)
            raise

    def run(self, batch: Any, loss_fn: LossFn | None) -> tuple[RegionTrace, list[TensorRef]]:
        output, root = self.forward(*as_call(batch))
        inside, calls = len(root.slots), len(root.sequence)
        with self._recording(root):
            loss = loss_of(output, loss_fn)
        if not loss.requires_grad:
            why = "expected a training forward with trainable parameters"
            if any(parameter.requires_grad for parameter in self.fake_model.parameters()):
                why += (
                    ", and no parameter of this one has a part in it. Where draws decide which layers run, one "
                    "of torch.rand counts as just below 1 while it is planned: plan so that all layers run then"
                )
            raise TraceError(f"the loss does not require gradients; {why}")
        outside = [saved.ref for saved in root.slots[inside:]]
        del root.slots[inside:], root.sequence[calls:]
        return root.finish(output), outside

    def _block(self, name: str, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self.root is None:
            return forward(*args, **kwargs)
        leaves, signature = call_signature(args, kwargs)
        call, depth = len(self.calls), len(self.root.path)
        found = self._record(name, module, forward, args, kwargs, leaves)
        signature = (signature, global_signature())
        cls = self._class_of(found, module, signature)
        del self.root.path[depth:]  # modules of an aborted forward were not left
        last, current = self._last_output, self.root._current
        known = ((p, last[id(leaf)]) for p, leaf in enumerate(leaves) if id(leaf) in last)
        links = tuple(link for link in known if link[0] not in cls.trace.asked)
        storages = {p: storage_of(leaf) for p, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        given = {p: current[storage] for p, storage in storages.items() if storage in current}
        self.calls.append(
            BlockCall(name=name, class_key=cls.key, links=links, problem=cls.problem, signature=signature, given=given)
        )
        self._held += [plain(leaf).untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]
        for storage in storages.values() if cls.problem or cls.trace.program.ops else ():
            self.uses.setdefault(storage, set()).add(call)
        self.memory.given.append(storages)
        with swapped(self.capture, recorders=[]):
            output = stub_outputs(cls.trace, leaves)
        self.root.nested_at.append(len(self.root.ops))
        self._last_output = {}
        for position, leaf in enumerate(tree_leaves(output)):
            if isinstance(leaf, Tensor):
                self.root.block_output(leaf, call, position)
                self._last_output[id(leaf)] = position
                self._held.append(leaf)
                self.memory.made.setdefault(storage_of(leaf), []).append((call, position))
        return output

    def _class_of(self, found: BlockClass, module: nn.Module, signature: Any) -> BlockClass:
        """The class of a recorded call; two are of one class if their programs are equal."""
        kind, name = type(module), found.example
        of_opaque = (kind, signature, found.problem, self._keys[name])
        likeness: Any = of_opaque if found.problem else found.trace.likeness()
        if (known := self._likenesses.get(likeness)) is not None:
            return known
        alike = [n for n in self.names if type(self.fake_model.get_submodule(n)) is kind]
        _refuse_unfit(name, found.trace, alike, self.names)
        found.key = f"{kind.__name__}.{len(self.classes)}"
        found.signature = signature
        self.classes[found.key] = self._likenesses[likeness] = found
        return found

    def _record(
        self, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, leaves: list[Any]
    ) -> BlockClass:
        recorder = OpRecorder(module, leaves, stream=self.stream)
        inside: dict[int, Tensor] = {}
        problem = ""
        before = (args, kwargs)
        tables = [(m._modules, dict(m._modules)) for m in module.modules()]
        tables += [(vars(m), {k: v for k, v in vars(m).items() if isinstance(v, str | int)}) for m in module.modules()]
        state = Isolation([module], leaves)
        try:
            before = opaque_copy((args, kwargs), lambda tensor: inside.setdefault(id(tensor), tensor))
            recorder.inside = set(map(storage_of, inside.values()))
            with recording_errors(), guessing(self.mode, False), self.capture.recording(recorder):
                output = forward(*args, **kwargs)
            trace = recorder.finish(output)
            # later dry runs are on fake tensors, and on numbers that another block computed
            floats = {p for p, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()}
            of_floats = {b for b, position in trace.inputs.items() if position in floats}
            for op in trace.program.ops:
                if not of_floats.isdisjoint(op.inputs):
                    of_floats.update(op.outputs)
            if (read := next((read for read in trace.reads if read.ref.buffer in of_floats), None)) is not None:
                what = "shapes in it hang" if read.shape_only else "its Python goes by numbers that hang"
                raise TraceError(f"{what} on the values of what the batch gives it")
            state.refuse_unseen()
            self.memory.trails.append(RecordingMemory(recorder))
        except TraceError as error:
            for stream in state.of(StreamState):
                if not stream.is_unchanged():
                    stream.put_back()
            problem = str(error)
            real = self.real.get_submodule(name) if self.real is not None else nn.Identity()
            if [*map(type, real.modules())] != [*map(type, module.modules())]:
                raise TraceError(
                    f"block {name!r} cannot be recorded ({problem}), and there is no real one like it to watch "
                    "instead; trace a model with real weights and a real batch (after a forward, if that replaces "
                    "modules of its blocks), or leave the block out with regions=[...]"
                ) from error
            trace = observed_trace(real, *before)
            self.memory.trails.append(None)
        args, kwargs = before
        return BlockClass(key="", trace=trace, example=name, args=args, kwargs=kwargs, tables=tables, problem=problem)


# memory that is written to after a block has used it, and before its backward -----------------------------------------
#
# Autograd holds memory, not values. After a counted write, plain autograd refuses to use a saved tensor; an uncounted
# one (``.data``, a piece with its own counter) changes the value that backward gets; a write to unsaved memory changes
# nothing. A recording has to know of all: a buffer with a later write differs from what its op recomputes, and is not
# available for recomputation.


@dataclass(kw_only=True)
class LaterWrites:
    """Later writes to memory of one block call: arguments and outputs, and buffers of its recording."""

    places: set[Place] = field(default_factory=set)
    inside: set[int] = field(default_factory=set)


class RecordingMemory:
    """Memory of a finished recording. Storages are known by their addresses, which are not reused as long as they are
    referenced. Fake ones cost nothing to keep; real ones (masks, positions) would add up over the blocks, and are
    referenced weakly: freed memory cannot be written to.
    """

    def __init__(self, recorder: OpRecorder) -> None:
        tensors = recorder.tensors()
        self.alive = [t if isinstance(t, FakeTensor) else StorageWeakRef(t.untyped_storage()) for t in tensors]
        known = {storage_of(tensor) for tensor in tensors}
        self.versions = {storage: found for storage, found in recorder.versions.items() if storage in known}
        self.writes = {storage for storage, _ in recorder.writes if storage in known}


@dataclass(kw_only=True)
class MemoryUses:
    """Users of each memory, call by call."""

    given: list[dict[int, int]] = field(default_factory=list)  # leaf position of an argument -> storage
    made: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # storage -> (call, output leaf)
    trails: list[RecordingMemory | None] = field(default_factory=list)  # None: unknown

    def late(self, root: OpRecorder) -> list[LaterWrites]:
        """By call, its memory that the root or another block writes to later."""
        found = [LaterWrites() for _ in self.given]
        writes = dict.fromkeys(root.writes)  # (storage, number of calls before)
        for call, trail in enumerate(self.trails):
            writes.update(dict.fromkeys((storage, call) for storage in (trail.writes if trail else ())))
        for storage, before in writes:
            for late, given, trail in zip(found[:before], self.given, self.trails, strict=False):
                late.places.update((False, position) for position, one in given.items() if one == storage)
                late.inside.update(trail.versions.get(storage, ()) if trail else ())
            for call, leaf in self.made.get(storage, ()):
                if call < before:
                    found[call].places.add((True, leaf))
        return found

    def in_the_root(self, root: OpRecorder) -> dict[int, int]:
        """Buffers of the root's recording that blocks write to, and the number of its ops before the first of them."""
        found: dict[int, int] = {}
        for call, trail in enumerate(self.trails):
            for storage in trail.writes if trail else ():
                registered = root.registered.get(storage)
                for b in (*root.versions.get(storage, ()), *([] if registered is None else [registered])):
                    found.setdefault(b, root.nested_at[call])
        return found


def mark_overwritten(trace: ModelTrace, memory: MemoryUses, root: OpRecorder) -> None:
    """Mark memory of a block that others write to before backward."""
    late: dict[str, LaterWrites] = {}
    for call, found in zip(trace.calls, memory.late(root), strict=True):
        of_class = late.setdefault(call.class_key, LaterWrites())
        of_class.places |= found.places
        of_class.inside |= found.inside
    for key, found in late.items():
        if found.places or found.inside:
            trace.classes[key].trace.anchor(frozenset(found.places), frozenset(found.inside))
    for before, call in zip([None, *trace.calls], trace.calls, strict=False):
        made = late[before.class_key].places if before is not None else set()
        given = late[call.class_key].places
        call.links = tuple(
            (position, leaf)
            for position, leaf in call.links
            if (False, position) not in given and (True, leaf) not in made
        )
    anchor_root(trace.root, memory.in_the_root(root))


def anchor_root(root: RegionTrace, written: Mapping[int, int]) -> None:
    """Anchor saved buffers of the root that a block writes to (see `MemoryUses.in_the_root`): they are not recomputed,
    nor read for recomputation. A buffer that the root reads after such a write is not the one that it made.
    """
    saved = root.program.needed_buffers() & written.keys()

    def is_other(op: Op) -> bool:
        return bool(saved.intersection((*op.inputs, *op.outputs))) or any(
            op.index >= written.get(b, len(root.program.ops)) for b in op.inputs
        )

    root.anchor_ops({op.index for op in root.program.ops if is_other(op)})


# one region, from the arguments of a call that is about to happen -----------------------------------------------------


def trace_region(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    shared: frozenset[int] = frozenset(),
    copy: bool = True,
    runs: Iterable[Any] = (),
) -> RegionTrace:
    """Record a module's forward for arguments like these, on fake tensors. Raise `TraceError` if it cannot run on
    tensors without values, or returns something that cannot be recorded.

    Args:
        copy: run a fake copy of the module; without, itself on its real parameters, if it runs foreign code.
        runs: objects that the module's forward runs, if that is not its own code.
        shared: leaf positions of arguments that are alive anyway and cost this region nothing.
    """
    leaves, spec = tree_flatten((args, kwargs))
    mode = mode_of(module, args, kwargs)
    fake_model = fake_copy(module, mode) if copy else module  # its blocks and itself run their classes' own forward
    capture = CaptureMode()
    with on_fakes(mode):
        faked = tree_leaves(opaque_copy([_like(leaf, mode) for leaf in leaves], lambda t: _like(t, mode)))
        fake_args, fake_kwargs = tree_unflatten(faked, spec)
        with leaving_nothing([fake_model], (*runs, *faked)) as state:
            recorder = OpRecorder(fake_model, faked)
            with capture, capture.recording(recorder):
                output = forward_of(module, fake_model)(*fake_args, **fake_kwargs)
            trace = recorder.finish(output)
            state.refuse_unseen()
    if copy:  # its own forward makes a cycle, in which what its hooks hold would outlive the user's forward
        vars(fake_model).pop("forward", None)
    trace.share(shared)
    return trace


def _like(leaf: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(leaf, Tensor) or isinstance(plain(leaf), FakeTensor):
        return leaf
    if not has_gradients(leaf.dtype):
        return leaf  # ids and masks keep their values: a forward may read them
    wrap = wrapping(leaf)
    fake = mode.from_tensor(arrived(leaf.detach()))
    if wrap is not None:
        fake = wrap.wrap(fake)
    if leaf.requires_grad:
        fake = fake.requires_grad_()
        fake = fake if leaf.is_leaf else fake.view_as(fake)
    return fake


# blocks that cannot be regions, and what to plan instead --------------------------------------------------------------
#
# A region is known by its arguments and results. A block that returns a generator has not run when it returns; one that
# reads a tensor of another block's graph from a side store cannot be run alone (out of a cache among its arguments it
# can: there it is a leaf). Their ops belong to the surrounding region. If the code around the blocks decides by values,
# the smallest module that does so becomes a region itself.

VALUES_WANTED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class OtherRegions(TraceError):
    """Raised while a model is traced: it can be, with these ``regions``, or by ``guesses``. The message says why."""

    def __init__(self, regions: Sequence[str], why: str, *, guesses: bool = False) -> None:
        super().__init__(why)
        self.regions = tuple(regions)
        self.guesses = guesses


def _refuse_unfit(name: str, trace: RegionTrace, alike: Sequence[str], names: Sequence[str]) -> None:
    """Raise `OtherRegions` if a block cannot be a region; ``alike``: blocks of its class, of all ``names``."""
    if trace.entangled:
        raise OtherRegions(
            (),
            f"{name} reads a tensor that another block computed and that is none of its arguments (out of a side "
            "store, say), so that the model is planned as one region instead of block by block",
        )
    if any(isinstance(leaf, Iterator) for leaf in trace.output_leaves):
        raise OtherRegions(
            [n for n in names if n not in alike],
            f"{name} returns a generator, which runs later: blocks of its class belong to the region around them",
        )
