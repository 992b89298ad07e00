"""A region while its forward runs: what its frame hears at module boundaries, and what undoing the run would take."""

from __future__ import annotations

import threading
from collections.abc import Set
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from jettison.capture.dispatch import CaptureMode
from jettison.capture.recording import Place, TensorRef
from jettison.capture.signature import Switches
from jettison.capture.tensor_subclasses import plain, storage_of, version_of, wrapping
from jettison.capture.trees import tree_leaves
from jettison.errors import StaleTensor, WrongValue
from jettison.runtime.callers import of_a_region
from jettison.runtime.checked_run import SequenceCheck
from jettison.runtime.frame import Frame
from jettison.runtime.graph_fingerprint import next_sequence_number
from jettison.runtime.handles import Box, Diverged, Handle, Held
from jettison.runtime.moves import Transit
from jettison.runtime.offload import Group
from jettison.runtime.packing import Packed
from jettison.runtime.recipe import AWAY, Recipe, SlotAction
from jettison.runtime.recompute_code import UNWRAPPED
from jettison.runtime.witness import Witness, _ndarray

_PACK: Final = Frame.pack
_new_tuple: Any = tuple.__new__
_running = threading.local()


class ActiveFrame(Frame):
    """A frame while its forward runs: it also listens at module boundaries."""

    broken = ""
    """Reason why the run left the recording."""
    check: SequenceCheck | None = None
    fake = False
    """Its arguments are."""
    looked = True
    """Whether its graph was compared."""
    sees = False
    """Whether each dropped slot leaves a witness of some elements."""
    given: Set[int] = frozenset()
    """Storages that the outermost of the running calls was given."""

    def __init__(
        self,
        recipe: Recipe,
        region: Any,
        group: Group | None = None,
        *,
        moves: bool = True,
        switches: Switches | None = None,
    ) -> None:
        super().__init__(recipe, region.name, region.recordings.owners, region.model, group, moves, switches)
        self.region = region
        self.moves = moves
        self.number = region.calls
        # by slot, what can be kept at a glance; nothing where calls are compared, or somebody listens to a frame's pack
        self.expected = () if is_pack_listened_to() else recipe.expected
        self.start = next_sequence_number()
        self.nested: list[tuple[int, int]] = []  # sequence numbers of the nodes that nested regions made
        self.taps_seen: dict[tuple[str, bool], int] = {}

    @property
    def held_bytes(self) -> int:
        """On the device until its backward."""
        return self.recipe.held_bytes(moves=self.moves)

    def enter(self, leaves: list[Any], before: dict[int, Handle] | None = None) -> None:
        """As any frame's."""
        if FakeTensor in map(type, leaves):
            self.fake = True
        if self.group is not None and running()[0] is self:
            self.given = {storage_of(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_leaf}
        super().enter(leaves, before)

    @of_a_region
    def pack(self, tensor: Tensor) -> Any:
        """As any frame's, as long as the run is the recorded one; what comes after that is kept.

        A training step comes by here for every tensor that autograd saves, and most of them are kept: those take one
        look and one tuple.
        """
        index, expected = self.index, self.expected
        if index < len(expected) and (wanted := expected[index]) is not None and tensor.__class__ in UNWRAPPED:
            (size, stride, dtype, spots, cut), parameter, dropped, fill, cell = wanted
            if (
                tensor.shape == size
                and tensor.dtype is dtype
                and tensor.stride() == stride
                and (parameter is None or self._is_parameter(parameter, tensor))
            ):
                self.index = index + 1
                if fill is not None:
                    self.hold(fill, tensor)
                if dropped is None:
                    kept = tensor if tensor.is_leaf else tensor.detach()
                    return _new_tuple(Held, (self, kept, tensor._version))
                if cell is not None:
                    if cut is None or not self.sees or not tensor.is_cpu or tensor.is_neg():
                        return self.drop(dropped, tensor, index)
                    kind, word, strides, itemsize, places, step = cut  # as `peek` does
                    at = tensor.data_ptr() + (self.salt + index) % places * step * itemsize
                    self.seen[cell] = _ndarray(spots, word, kind.from_address(at), 0, strides).tobytes()
                boxes = self.closures[dropped.closure] or self._closure(dropped)
                return _new_tuple(Handle, (self, dropped, boxes, index, None))
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
                return Frame.pack(self, tensor)
            except Diverged as divergence:
                self.broken = str(divergence)
                self.expected = ()
                self.index -= 1
        return Held(tensor, self)

    def leave_broken(self) -> None:
        """The run has left the recording: what was dropped before must be computable from what it came by.

        Raises:
            Diverged: it is not.
        """
        assert self.boxes is not None
        wanted = {n for slot in self.recipe.slots[: self.index] if slot.kind in AWAY for n in slot.boxes}
        if any(type(box := self.boxes[n]) is not Handle and box.is_empty for n in wanted):
            raise Diverged(self.broken)
        self.boxes = None

    def hold(self, n: int, tensor: Tensor) -> None:
        """As any frame's, and no op of the model's. What the model was given lives anyway, and does not move."""
        assert self.boxes is not None
        box = self.boxes[n]
        if type(box) in (Transit, Packed) and storage_of(tensor) in running()[0].given:
            box.stay()
        if self.check is not None:
            with self.check.apart():
                super().hold(n, tensor)
        elif type(box) is Box:
            box.fill(tensor)
        else:
            super().hold(n, tensor)

    def witness(self, slot: SlotAction, tensor: Tensor, index: int) -> Witness | bytes:
        """As any frame's, and no op of the model's."""
        if self.check is None:
            return super().witness(slot, tensor, index)
        with self.check.apart():
            return super().witness(slot, tensor, index)

    def wrong(self, index: int) -> WrongValue:
        """As any frame's, and what this region and others have recorded is not trusted as before."""
        plain_words = str(super().wrong(index))
        kind = likely_kind(self.recipe, index, self.region)
        after = self.region.recordings.wrong(self.recipe, f"{plain_words}. {kind}", looked=self.looked)
        for region in regions_of(self.region):  # what has changed for one may have for others, a step later
            region.recordings.forget()
        return WrongValue(
            f"{plain_words} (call {self.number} of this region). {kind} The gradients of this step must not be used; "
            f"from the next step on this region {after}"
        )

    def lost(self, handle: Handle) -> WrongValue:
        """As any frame's, and the region is not trusted again."""
        error = super().lost(handle)
        self.region.recordings.distrust(self.recipe, str(error))
        return error

    def stale(self, buffer: int, then: int, now: int | None) -> StaleTensor:
        """As any frame's. From the next step on nothing that was written to in this one is computed with again."""
        error = super().stale(buffer, then, now)
        recordings = self.region.recordings
        name = self.recipe.parameters.get(buffer)
        if name is None and buffer not in self.recipe.trace.inputs:
            recordings.distrust(self.recipe, str(error))
            return StaleTensor(f"{error}; from the next step on this region runs without a recording")
        names = set() if name is None else {name}
        places = {(False, self.recipe.trace.inputs[buffer])} if name is None else set()
        compute_less_again(self.region, str(error), names, places)
        return StaleTensor(f"{error}. From the next step on the plan keeps what is computed of it")

    def drop(self, slot: SlotAction, tensor: Tensor, index: int, wrap: Any = None) -> Handle:
        """As any frame's."""
        if slot.cast and not self.fake:
            self.region.recordings.note_cast(slot.cast, tensor)
        return Frame.drop(self, slot, tensor, index, wrap)

    def leave(self) -> None:
        """As any frame's."""
        boxes = self.boxes or ()
        for buffer, name in self.recipe.trace.casts.items():
            n = self.recipe.box_of.get(buffer)
            if n is not None and isinstance(box := boxes[n], Box) and box.tensor is not None and not self.fake:
                self.region.recordings.note_cast(name, box.tensor)
        super().leave()

    def written(self) -> set[str]:
        """Names of parameters and buffers that somebody wrote to since this forward."""
        found = zip(self.recipe.parameters.values(), self.parameters, strict=True)
        return {name for name, (_, _, tensor, version) in found if version_of(tensor) != version}

    def tap(self, path: str, is_output: bool, call: int, tree: Any) -> None:
        """A module boundary was crossed; box what recipes want of it."""
        assert self.boxes is not None
        leaves: list[Any] | None = None
        for n, tap in self.recipe.from_taps:
            if tap.path == path and tap.is_output is is_output and tap.call == call:
                leaves = tree_leaves(tree) if leaves is None else leaves
                if tap.leaf < len(leaves) and _is(leaves[tap.leaf], tap.ref):
                    self.hold(n, leaves[tap.leaf])

    def block_done(self, output: Any) -> None:
        """A nested region has run; box its outputs if this region's recipes read them."""
        call = self.block_calls
        self.block_calls += 1
        wanted = self.recipe.from_blocks
        if wanted and self.boxes is not None:
            for leaf, tensor in enumerate(tree_leaves(output)):
                n = wanted.get((call, leaf))
                if n is not None and _is(tensor, self.recipe.trace.given[self.recipe.boxes[n]]):
                    self.hold(n, tensor)


def is_pack_listened_to() -> bool:
    """Whether somebody who measures has put a function of its own in the place of `Frame.pack`."""
    return Frame.pack is not _PACK


def regions_of(region: Any) -> list[Any]:
    """All regions of its model that are planned now."""
    found = [vars(module).get("forward") for module in region.model.modules()]
    return [one for one in found if getattr(one, "recordings", None) is not None]


def compute_less_again(region: Any, why: str, names: Set[str] = frozenset(), places: Set[Place] = frozenset()) -> None:
    """A step has stopped, since what this region computes with in backward is not what its forward had. From now on it
    and those of its class, which do alike things, keep what is computed of it; without a recording, all that they save.

    Args:
        names: parameters and buffers of the region that somebody wrote to.
        places: arguments that somebody wrote to.
    """
    for one in regions_of(region):
        written = {name for frame in one.frames for name in frame.written()}
        if type(one.module) is type(region.module):
            one.recordings.differs = why
            one.recordings.moves(written | names, places=places)
        else:
            one.recordings.moves(written)


def named(module: nn.Module, name: str) -> str:
    """A parameter or a buffer, in words."""
    parameter = any(name == one for one, _ in module.named_parameters(remove_duplicate=False))
    return f"{'parameter' if parameter else 'buffer'} {name!r}"


def likely_kind(recipe: Recipe, slot: int, region: Any) -> str:
    """A guess at what a recording took as fixed and was not."""
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
    return "Its forward hangs on Python state, or on values, that were other ones when it was recorded."


def _is(found: Any, recorded: TensorRef) -> bool:
    """Whether a value can be the recorded one. Where a hook has changed it, its box stays empty, which `leave` sees."""
    if not isinstance(found, Tensor):
        return False
    inner = plain(found)
    return inner.shape == recorded.size and inner.dtype is recorded.dtype and wrapping(found) == recorded.wrap


def current_frame() -> ActiveFrame | None:
    """The innermost region that is running its forward on this thread."""
    stack = running()
    return stack[-1] if stack else None


def is_inside() -> bool:
    """Whether a region is running its forward, or being recorded, on this thread."""
    return bool(running()) or any(isinstance(mode, CaptureMode) for mode in _get_current_dispatch_mode_stack())


def running() -> list[ActiveFrame]:
    if not hasattr(_running, "stack"):
        _running.stack = []
    return _running.stack


class Listener:
    """A module hook that hands what crosses a boundary to the running frame. In a copy of the module it is deaf."""

    def __init__(self, region: Any, module: nn.Module | None, path: str, is_output: bool) -> None:
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
        return Listener, (None, None, self.path, self.is_output)


class ViewsReplayed:
    """Backward goes back through a view that was written to view by view, as it does for the fake tensors that plans
    are made on. By itself autograd takes one ``as_strided`` for real ones, whose backward fills memory of its own.
    """

    __slots__ = ("before",)

    def __enter__(self) -> None:
        self.before = torch._C._is_view_replay_enabled()
        torch._C._set_view_replay_enabled(True)

    def __exit__(self, *_: object) -> None:
        torch._C._set_view_replay_enabled(self.before)
