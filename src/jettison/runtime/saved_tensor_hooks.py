"""A frame is one call of a planned region: its hooks keep or drop tensors at pack, and recompute them at unpack."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from jettison.capture.dispatch import CaptureMode
from jettison.capture.fsdp2 import whole_now
from jettison.capture.pytrees import tree_leaves
from jettison.capture.recorder import Place, TensorRef, layout, layout_of
from jettison.capture.signature import Switches, kernel_switches, switched
from jettison.capture.tensor_subclasses import QuantizedWrapping, arrived, plain, storage_of, version_of, wrapping
from jettison.core.errors import StaleTensor, WrongValue
from jettison.runtime import witness as witnesses
from jettison.runtime.callers import of_a_region
from jettison.runtime.checked_run import SequenceCheck
from jettison.runtime.graph_fingerprint import next_sequence_number
from jettison.runtime.offload import Group, stale
from jettison.runtime.offloaded_ranges import Away
from jettison.runtime.recipe import AWAY, Expected, Recipe, SlotAction, expected_of
from jettison.runtime.recompute_code import UNWRAPPED, code_of, get_state
from jettison.runtime.recordings import PlannedRegion
from jettison.runtime.saved_handles import HELD, Box, Diverged, Handle, Held, box_for
from jettison.runtime.views import view_of
from jettison.runtime.witness import MEMORY, SALT, Check, Witness, _ndarray, compare, peek

FEW_BYTES: Final = 256  # most bytes of a parameter or buffer that a call copies if its recomputation reads it
_graph_task = torch._C._current_graph_task_id
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_is_grad_enabled = torch.is_grad_enabled
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_is_function_mode_enabled = torch._C._is_torch_function_mode_enabled
CAME: Final = MappingProxyType({"offload": "came back from the host", "pack": "was unpacked"})


class Frame:
    """See the module docstring. Alive as long as one of its handles is."""

    # class attributes for the common case: fewer to set in each call
    broken = ""  # reason why the run left the recording
    check: SequenceCheck | None = None
    fake = False  # its arguments are fake tensors
    looked = True  # its graph was compared
    sees = False  # each dropped buffer leaves a witness of some elements
    given: Set[int] = frozenset()  # storages given to the outermost running call
    group: Group | None = None  # of offloaded tensors; None if nothing can be offloaded
    handed: Mapping[int, Handle] = MappingProxyType({})
    block_calls = index = 0
    task = -1  # the backward for which the global switches were checked
    keeps_graph = True  # whether that backward keeps its graph
    share = 1  # one in this many slots leaves a witness

    def __init__(
        self, recipe: Recipe, region: PlannedRegion, group: Group | None, switches: Switches, *, moves: bool = True
    ) -> None:
        self.recipe, self.region, self.moves = recipe, region, moves
        self.name, self.model, self.owners = region.name, region.model, region.recordings.owners
        self.number, self.how, self.rounded = region.calls, region.how, region.rounded
        self.salt = region.calls * SALT  # varies the sampled positions
        if group is not None:
            self.group = group
        goes = group if moves else None
        self.boxes: list[Any] = (
            [box_for(recipe, b, goes) for b in recipe.boxes]
            if recipe.moved or recipe.packed
            else [Box() for _ in recipe.boxes]
        )
        self.closures: list[tuple[Any, ...] | None] = [None] * len(recipe.closures)
        self.lock = threading.Lock()
        self.code = code_of(recipe)
        self.state = self.code.start
        # by cell (`Recipe.cells`): values that later unpacks read, their versions, and the forward's witnesses
        self.values: list[Tensor | None] = [None] * len(recipe.counts)
        self.versions = [0] * len(recipe.counts)
        self.seen: list[Witness | bytes | None] = [None] * len(recipe.counts)
        self.parameters = [_parameter(*self.owners[dotted]) for dotted in recipe.parameters.values()]
        self.switches = switches
        self.expected: Sequence[Expected | None] = recipe.expected  # quick path of `pack`; empty if calls are checked
        self.start = next_sequence_number()
        self.nested: list[tuple[int, int]] = []  # sequence numbers of the nodes of nested regions
        self.taps_seen: dict[tuple[str, bool], int] = {}

    @property
    def held_bytes(self) -> int:
        return self.recipe.held_bytes(moves=self.moves)

    # forward ---------------------------------------------------------------------------------------------------------

    def enter(self, leaves: list[Any], before: dict[int, Handle] | None = None) -> None:
        """Box the inputs and random states that recipes read, or handles of the block before, by leaf position."""
        if FakeTensor in map(type, leaves):
            self.fake = True
        if self.group is not None and running()[0] is self:
            self.given = {storage_of(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_leaf}
        boxes = self.boxes
        for buffer, n in self.recipe.links.items():
            position = self.recipe.trace.inputs[buffer]
            handle = before.get(position) if before else None
            if handle is not None:
                boxes[n] = handle
            else:  # something came between the two blocks: hold the input after all
                self.hold(n, leaves[position])
        for n, position in self.recipe.from_inputs:
            box, leaf = boxes[n], leaves[position]
            if box.__class__ is Box:
                box.fill(leaf)
            else:
                self.hold(n, leaf)
        for n, device in self.recipe.state_boxes:
            boxes[n].fill(get_state(device))

    def hold(self, n: int, tensor: Tensor) -> None:
        """Fill a box, if it is empty. The model's inputs stay alive anyway, and are not offloaded."""
        box = self.boxes[n]
        if type(box) is not Box:
            if isinstance(box, Away) and storage_of(tensor) in running()[0].given:
                box.stay()
            if not box.is_empty:
                return
        with nullcontext() if self.check is None else self.check.apart():  # not an op of the model
            box.fill(tensor)

    @of_a_region
    def pack(self, tensor: Tensor) -> Any:
        """Pack hook: keep a tensor or return a handle. Everything is kept once a run has left the recording."""
        index, expected = self.index, self.expected
        if index < len(expected) and (wanted := expected[index]) is not None:
            like, cut, parameter, dropped, fill, cell = wanted
            if like(tensor) and (parameter is None or self._is_parameter(parameter, tensor)):
                self.index = index + 1
                if fill is not None:
                    self.hold(fill, tensor)
                if dropped is None:
                    kept = tensor if tensor.is_leaf else tensor.detach()
                    return self, kept, tensor._version
                if cell is not None:
                    if cut is None or not self.sees:
                        return self.drop(dropped, tensor, index)
                    size, word, strides, itemsize, places, step = cut  # inlined `peek`
                    at = tensor.data_ptr() + (self.salt + index) % places * step * itemsize
                    self.seen[cell] = _ndarray(size, word, MEMORY, at - 1, strides).tobytes()
                boxes = self.closures[dropped.closure] or self._closure(dropped)
                return self, dropped, boxes, index, None
        return self._pack(tensor)

    def _is_parameter(self, name: str, tensor: Tensor) -> bool:
        table, leaf = self.owners[name]
        there = table[leaf]
        return tensor is there or tensor._base is there

    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) is FakeTensor and not self.fake:
            self.region.refuse_fake("saves")
        if self.check is not None:
            self.broken = self.broken or self.check.diverged
        if not self.broken:
            try:
                return self._packed(tensor)
            except Diverged as divergence:
                self.broken = str(divergence)
                self.expected = ()
                self.index -= 1
        return Held(tensor, self)

    def _packed(self, tensor: Tensor) -> Any:
        """Value that `pack` saves for the next slot. Raises `Diverged` for another tensor than was recorded."""
        recipe = self.recipe
        try:
            slot = recipe.slots[self.index]
        except IndexError:
            raise Diverged(f"more than {len(recipe.slots)} saved tensors") from None
        self.index += 1
        ref = slot.ref
        inner = tensor if tensor.__class__ in UNWRAPPED else plain(tensor)
        if (
            inner.shape != ref.size
            or inner.dtype is not ref.dtype
            or (inner.stride() != ref.stride and layout(inner) != layout_of(ref.size, ref.stride))
            or (inner is not tensor and wrapping(tensor) != ref.wrap)
        ):
            raise Diverged(
                f"saved tensor {self.index - 1} is {tuple(inner.shape)} {inner.dtype}, "
                f"recorded was {ref.size} {ref.dtype}"
            )
        if self.expected and tensor.__class__ in UNWRAPPED:
            recipe.expected[self.index - 1] = expected_of(slot, tensor)
        if slot.kind in AWAY:
            if slot.fill is not None:
                self.hold(slot.fill, tensor)
            wrap = wrapping(tensor) if type(ref.wrap) is QuantizedWrapping else None
            return self.drop(slot, inner if inner is tensor else arrived(tensor), self.index - 1, wrap)
        if slot.kind == "parameter":
            table, leaf = self.owners[slot.parameter]
            if table[leaf] is not tensor and storage_of(table[leaf]) != inner.untyped_storage()._cdata:
                raise Diverged(f"saved tensor {self.index - 1} is not parameter {slot.parameter}")
        elif slot.fill is not None:
            self.hold(slot.fill, tensor)
        return Held(tensor, self)

    def drop(self, slot: SlotAction, tensor: Tensor, index: int, wrap: Any = None) -> tuple[Any, ...]:
        """Return the handle of a dropped tensor; ``wrap`` is the FP8 or FP4 tensor around it, with its factor."""
        if slot.cast and not self.fake:
            self.region.recordings.note_cast(slot.cast, tensor)
        boxes = self.closures[slot.closure] or self._closure(slot)
        if slot.cell is not None and self.how is not Check.OFF and (self.salt + index) % self.share == 0:
            self.seen[slot.cell] = self.witness(slot, tensor, index)
        return self, slot, boxes, index, wrap

    def _closure(self, slot: SlotAction) -> tuple[Any, ...]:
        found = self.closures[slot.closure] = tuple([self.boxes[n] for n in slot.boxes])
        return found

    def witness(self, slot: SlotAction, tensor: Tensor, index: int) -> Witness | bytes:
        is_plain = tensor.__class__ in UNWRAPPED and witnesses.is_told_at_once(tensor) and not tensor.is_neg()
        found = peek(tensor, slot.spots, self.salt + index) if is_plain and self.how is not Check.FULL else None
        if found:
            return found
        with nullcontext() if self.check is None else self.check.apart():  # not an op of the model
            return Witness(tensor, slot.spots, self.salt + index, full=self.how is Check.FULL)

    def leave(self) -> bool:
        """Fill the handles, and return whether the run was the recorded one. Raises `Diverged` if it was not and
        dropped tensors cannot be recomputed from the boxed values.
        """
        if self.check is not None:
            self.broken = self.broken or self.check.diverged
            self.check = None  # it references the arguments, and the frame lives until backward
        self.broken = self.broken or self._missing()
        if self.broken:
            wanted = {n for slot in self.recipe.slots[: self.index] if slot.kind in AWAY for n in slot.boxes}
            if any(type(box := self.boxes[n]) is not Handle and box.is_empty for n in wanted):
                raise Diverged(self.broken)
        else:
            self.handed = {
                leaf: Handle((self, slot, self.closures[slot.closure] or self._closure(slot), -1, None))
                for leaf, slot in self.recipe.handed.items()
            }
        self.boxes, self.closures = [], []
        return not self.broken

    def _missing(self) -> str:
        """Describe a slot that was not saved, or a box that is empty."""
        if self.index != len(self.recipe.slots):
            return f"{self.index} saved tensors, recorded were {len(self.recipe.slots)}"
        for buffer, name in self.recipe.trace.casts.items():
            n = self.recipe.box_of.get(buffer)
            if n is not None and isinstance(box := self.boxes[n], Box) and box.tensor is not None and not self.fake:
                self.region.recordings.note_cast(name, box.tensor)
        for n, box in enumerate(self.boxes):
            if type(box) is not Handle and box.is_empty:
                return f"nothing was seen of buffer {self.recipe.boxes[n]}"
        return ""

    def tap(self, path: str, is_output: bool, call: int, tree: Any) -> None:
        """Box the tensors that recipes need from a module boundary."""
        leaves: list[Any] | None = None
        for n, tap in self.recipe.from_taps:
            if tap.path == path and tap.is_output is is_output and tap.call == call:
                leaves = tree_leaves(tree) if leaves is None else leaves
                if tap.leaf < len(leaves) and _is(leaves[tap.leaf], tap.ref):
                    self.hold(n, leaves[tap.leaf])

    def block_done(self, output: Any) -> None:
        """Box the outputs of a nested region if this region's recipes read them."""
        call = self.block_calls
        self.block_calls += 1
        wanted = self.recipe.from_blocks
        if wanted and self.boxes:
            for leaf, tensor in enumerate(tree_leaves(output)):
                n = wanted.get((call, leaf))
                if n is not None and _is(tensor, self.recipe.trace.given[self.recipe.boxes[n]]):
                    self.hold(n, tensor)

    # backward --------------------------------------------------------------------------------------------------------

    def recompute(self, handle: tuple[Any, ...]) -> Tensor:
        """Return the tensor of a dropped slot, recomputed with the forward's precision and kernels. Other kernels have
        evicted the CPU caches, so this code touches little memory.
        """
        task = _graph_task()  # -1 outside of a backward
        if task != self.task or task == -1:
            self.keeps_graph = _keeps_graph()
            if kernel_switches() != self.switches:
                with switched(self.switches):
                    return self.recompute(handle)
            self.task = task
        if _is_grad_enabled() or _is_any_autocast_enabled() or _is_function_mode_enabled():  # seldom in a backward
            with (
                torch.no_grad(),
                torch.autocast("cpu", enabled=False),
                torch.autocast("cuda", enabled=False),
                torch._C.DisableTorchFunction(),
            ):
                return self.recompute(handle)
        _, slot, _, _, wrap = handle
        with self.lock:  # a graph on several devices runs its backward in several threads
            if self.keeps_graph:
                function, after = self.code.function(self.state, slot, keeps=is_unpacked_again())
            else:
                function, after = self.state.next.get(slot) or self.code.function(self.state, slot, keeps=False)
            try:
                tensor = function(self, handle)
            except BaseException:
                self.state, self.values = self.code.start, [None] * len(self.values)  # some may be half written
                raise
            self.state = after
        return tensor if wrap is None else wrap.wrap(plain(tensor))

    def compare(self, cell: int, tensor: Tensor) -> None:
        """Compare a recomputed value with the witness of its buffer. Raises `WrongValue`, perhaps later."""
        index, seen = self.recipe.witnessed[cell], self.seen[cell]
        slot = self.recipe.slots[index]
        inner = tensor if slot.view is None else view_of(tensor, slot.view)
        if seen.__class__ is bytes:
            seen = Witness.of_bytes(seen, slot.spots, self.salt + index, slot.ref.dtype)
        assert isinstance(seen, Witness)
        rounded = None if self.how is Check.EXACT else self.rounded
        inner = inner if inner.__class__ in UNWRAPPED else plain(inner)
        compare(seen, inner, rounded, lambda: self.wrong(index))  # may be deferred, and a handle would hold tensors

    def lost(self, handle: tuple[Any, ...]) -> WrongValue:
        """Return the error for a tensor whose inputs were never seen. The region loses its recording."""
        slot = self.recipe.trace.program.slots[handle[3]]
        error = WrongValue(
            f"saved tensor {slot.index} of {self.name or 'the model'} cannot be recomputed: an exception left its "
            "forward before that had run to its end, and its tensors were used all the same. The gradients of this "
            "step must not be used; from the next step on it runs without a recording"
        )
        self.region.recordings.distrust(self.recipe, str(error))
        return error

    def stale(self, buffer: int, then: int, now: int | None) -> StaleTensor:
        """Return the error for a tensor that was written to before backward, and stop recomputing from it."""
        recordings, name = self.region.recordings, self.recipe.parameters.get(buffer)
        what = "a kept tensor"
        if name is not None:
            tensor = self.parameters[self.code.parameters[buffer]][2]
            what = f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {name!r}"
        error = stale(what, self.name, then, now)
        if name is None and buffer not in self.recipe.trace.inputs:
            recordings.distrust(self.recipe, str(error))
            return StaleTensor(f"{error}; from the next step on this region runs without a recording")
        names = set() if name is None else {name}
        places = {(False, self.recipe.trace.inputs[buffer])} if name is None else set()
        keep_more_after_error(self.region, str(error), names, places)
        return StaleTensor(f"{error}. From the next step on the plan keeps what is computed of it")

    def written(self) -> set[str]:
        """Names of parameters and buffers that were written to since this forward."""
        found = zip(self.recipe.parameters.values(), self.parameters, strict=True)
        return {name for name, (_, _, tensor, version) in found if version_of(tensor) != version}

    def wrong(self, index: int) -> WrongValue:
        """Return the error for a recomputed tensor that differs from forward's. Recordings lose their trust."""
        slot = self.recipe.trace.program.slots[index]
        where = ".".join(filter(None, (self.name, slot.path))) or "the model"
        came = CAME.get(self.recipe.slots[index].kind, "was recomputed for backward")
        words = (
            f"saved tensor {slot.index} of {where} (shape {slot.shape}, {slot.dtype}, after {slot.op or 'the start'}) "
            f"{came} and is not what forward had"
        )
        kind = likely_kind(self.recipe, index, self.region)
        after = self.region.recordings.wrong(self.recipe, f"{words}. {kind}", looked=self.looked)
        for region in regions_of(self.region):  # the same change may affect others, a step later
            region.recordings.forget()
        return WrongValue(
            f"{words} (call {self.number} of this region). {kind} The gradients of this step must not be used; "
            f"from the next step on this region {after}"
        )

    # called by recomputation code ------------------------------------------------------------------------------------

    def parameter(self, n: int) -> Tensor:
        """Return a parameter or buffer, unsharded and unwrapped. Raises `StaleTensor` if it was written to."""
        table, leaf, tensor, version = self.parameters[n]
        if version_of(tensor) != version:
            raise self.stale(list(self.recipe.parameters)[n], version, version_of(tensor))
        if table[leaf] is not tensor or (tensor.__class__ not in UNWRAPPED and plain(tensor) is not tensor):
            return plain(whole_now(self.model, table, leaf, tensor))
        return tensor

    def opened(self, box: Any, buffer: int, handle: tuple[Any, ...]) -> Tensor:
        """Return the value of a box. Raises `StaleTensor` after a write, `WrongValue` if it was never filled."""
        if isinstance(box, Handle):
            return plain(box[0].recompute(box))
        if box.is_empty:
            raise self.lost(handle)
        if not isinstance(box, Box):
            if box.flat is not None:  # it never moved, and kernels (LSTM) may write to their workspace in backward
                self.seen[self.recipe.cells[buffer]] = None
            return box.open()
        held = box.tensor
        assert held is not None
        if version_of(held) != box.version:
            raise self.stale(buffer, box.version, version_of(held))
        return held if held.__class__ in UNWRAPPED else arrived(held)


def _is(found: Any, recorded: TensorRef) -> bool:
    """Whether a value can be the recorded one. If a hook has changed it, its box stays empty, which `leave` notices."""
    if not isinstance(found, Tensor):
        return False
    inner = plain(found)
    return inner.shape == recorded.size and inner.dtype is recorded.dtype and wrapping(found) == recorded.wrap


_PACK: Final = Frame.pack


def is_pack_listened_to() -> bool:
    """Whether `Frame.pack` was replaced by a function that observes it."""
    return Frame.pack is not _PACK


def _parameter(table: dict[str, Any], leaf: str) -> tuple[dict[str, Any], str, Tensor, int]:
    """Return a parameter or buffer as autograd would save it; under FSDP the table has another one at other times.

    The loop may update a small buffer (a factor of delayed scaling) between forward and backward without telling
    autograd, which only knows the values computed from it: such a buffer is copied.
    """
    tensor = table[leaf]
    if tensor.__class__ is nn.Parameter:
        return table, leaf, tensor, version_of(tensor)
    if not isinstance(tensor, nn.Parameter) and plain(tensor) is tensor and tensor.nbytes <= FEW_BYTES:
        with torch.no_grad():
            tensor = tensor.clone()
        table = {leaf: tensor}
    return table, leaf, tensor, version_of(tensor)


def unpack(packed: Any) -> Tensor:
    """Unpack hook: return a saved tensor to autograd."""
    frame = packed[0]
    if frame.group is not None:
        frame.group.asked()
    if len(packed) == HELD:
        tensor: Tensor = packed[1]
        return tensor if tensor._version == packed[2] else Held.open(packed)  # raises
    return frame.recompute(packed)


def is_unpacked_again() -> bool:
    """Whether the unpacking node will unpack a second time, for the half of its backward that this pass skips.

    A backward split in two, as zero-bubble pipelines do, first computes the gradients of inputs and keeps the graph; a
    second pass computes those of weights. Until then recomputed inputs of such nodes are kept.
    """
    if not _keeps_graph():
        return False
    node = torch._C._current_autograd_node()
    return node is not None and any(after is not None and not _runs(after) for after, _ in node.next_functions)


def _runs(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf whose gradient was requested explicitly
        return True


# frames whose forward is running, on this thread ----------------------------------------------------------------------

_running = threading.local()


def current_frame() -> Frame | None:
    """The innermost region that is running its forward on this thread."""
    stack = running()
    return stack[-1] if stack else None


def is_inside() -> bool:
    """Whether a region is running its forward, or being recorded, on this thread."""
    return bool(running()) or any(isinstance(mode, CaptureMode) for mode in _get_current_dispatch_mode_stack())


def running() -> list[Frame]:
    if not hasattr(_running, "stack"):
        _running.stack = []
    return _running.stack


class BoundaryHook:
    """A module hook that passes a boundary's tensors to the running frame; inert in a copy of the module."""

    def __init__(self, region: PlannedRegion | None, module: nn.Module | None, path: str, is_output: bool) -> None:
        self.region = region
        self.module = module
        self.path = path
        self.is_output = is_output

    of_a_region = True

    def __call__(self, module: nn.Module, args: Any, result: Any) -> None:
        frame = current_frame()
        if frame is None or frame.region is not self.region or module is not self.module:  # a shallow copy has it too
            return
        where = (self.path, self.is_output)
        call = frame.taps_seen.get(where, 0)
        frame.taps_seen[where] = call + 1
        frame.tap(self.path, self.is_output, call, result if self.is_output else (args, result))

    def __reduce__(self) -> Any:
        return BoundaryHook, (None, None, self.path, self.is_output)


# after an error -------------------------------------------------------------------------------------------------------


def regions_of(region: PlannedRegion) -> list[PlannedRegion]:
    """All regions of its model that are planned now."""
    found = [vars(module).get("forward") for module in region.model.modules()]
    return [one for one in found if getattr(one, "recordings", None) is not None]


def keep_more_after_error(
    region: PlannedRegion, why: str, names: Set[str] = frozenset(), places: Set[Place] = frozenset()
) -> None:
    """Keep more after an error: this region's recomputation read something that was written to after its forward
    (parameters, buffers, arguments). From now on it and regions of its class keep whatever is computed from them;
    without a recording, all saved tensors.
    """
    for one in regions_of(region):
        written = {name for frame in one.frames for name in frame.written()}
        if type(one.module) is type(region.module):
            one.recordings.differs = why
            one.recordings.moves(written | names, places=places)
        else:
            one.recordings.moves(written)


def likely_kind(recipe: Recipe, slot: int, region: PlannedRegion) -> str:
    """A guess at what a recording took as constant and was not."""
    if recipe.slots[slot].kind == "offload":
        return "Something wrote to it, past autograd's version counters, before it had arrived there."
    program = recipe.trace.program
    changed = region.recordings.guard.words() if region.recordings.guard is not None else ""
    if changed:
        return f"Since it was recorded, {changed} changed."
    closure = program.closure(program.slots[slot].buffer)
    if any(recipe.trace.calls[i].state_in is not None for i in closure.ops):
        return "Its values come from a random stream that something moved between forward and its recompute."
    if recipe.trace.reads:
        return "Its forward reads numbers out of tensors."
    return "Its forward depends on Python state or on values that have changed since it was recorded."
