"""A frame is one call of a planned region: it decides at pack time, and computes again at unpack time."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from jettison.capture.recording import layout, layout_of
from jettison.capture.sharded import whole_now
from jettison.capture.signature import kernel_switches, switched
from jettison.capture.tensor_subclasses import Narrow, arrived, plain, storage_of, version_of, wrapping
from jettison.errors import StaleTensor, WrongValue
from jettison.runtime.handles import Box, Diverged, Handle, Held, NarrowHandle, box_for
from jettison.runtime.offload import Group, stale
from jettison.runtime.recipe import AWAY, Recipe, SlotAction
from jettison.runtime.steps import RecipeStep, get_state, outside_of_vmap, run_step, set_state
from jettison.runtime.views import in_a_copy, view_of
from jettison.runtime.witness import Check, Rounded, Witness, compare

UNWRAPPED: Final = frozenset({Tensor, nn.Parameter})
"""Classes of most saved tensors: nothing is inside them."""
FEW_BYTES: Final = 256
"""Of a buffer that a call takes a copy of, if what it computes again reads it."""
_graph_task = torch._C._current_graph_task_id
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
EMPTY: Final = torch.ops.aten.empty_strided.default
CAME: Final = MappingProxyType({"offload": "came back from the host", "pack": "was unpacked"})


class Frame:
    """See the module docstring. Alive as long as one of its handles is."""

    __slots__ = (
        "__weakref__",
        "block_calls",
        "boxes",
        "counts",
        "group",
        "handed",
        "how",
        "index",
        "keeps_graph",
        "memo",
        "model",
        "name",
        "owners",
        "parameters",
        "recipe",
        "rounded",
        "salt",
        "share",
        "switches",
        "task",
    )

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        owners: dict[str, tuple[dict[str, Any], str]],
        model: nn.Module,
        group: Group | None = None,
        moves: bool = True,
    ) -> None:
        self.recipe = recipe
        self.name = name
        self.model = model
        self.owners = owners
        self.index = 0
        self.group = group  # of what moves; None where nothing can
        goes = group if moves else None
        self.boxes: list[Any] | None = [box_for(recipe, b, goes) for b in recipe.boxes]
        self.memo: dict[int, Tensor] = {}
        self.counts: dict[int, int] | None = None
        # the tensor itself, as autograd would hold it; under FSDP the table has another one at other times
        self.parameters: dict[int, tuple[dict[str, Any], str, Tensor, int]] = {}
        for buffer, dotted in recipe.parameters.items():
            table, leaf = owners[dotted]
            tensor = table[leaf]
            self.parameters[buffer] = (table, leaf, tensor, version_of(tensor))
            if tensor.__class__ is not nn.Parameter and _may_move_on(tensor):
                with torch.no_grad():
                    self.memo[buffer] = tensor.clone()
        self.block_calls = 0
        self.handed: dict[int, Handle] = {}
        self.switches = kernel_switches()
        self.task = -1  # the backward in which these were found as they are here
        self.keeps_graph = True  # whether that one does
        self.how = Check.ALWAYS
        self.share = 1  # one slot in so many leaves a witness
        self.salt = 0
        self.rounded = Rounded()

    # forward ---------------------------------------------------------------------------------------------------------

    def enter(self, leaves: list[Any], before: dict[int, Handle] | None = None) -> None:
        """Box the inputs and the random state that recipes read.

        Args:
            before: by leaf position, handles with which the block before computes its output again.
        """
        boxes = self.boxes
        assert boxes is not None
        for buffer, n in self.recipe.links.items():
            position = self.recipe.trace.inputs[buffer]
            handle = before.get(position) if before else None
            if handle is not None:
                boxes[n] = handle
            else:  # something came between the two blocks: hold the input after all
                self.hold(n, leaves[position])
        for n, position in self.recipe.from_inputs:
            self.hold(n, leaves[position])
        for n, device in self.recipe.state_boxes:
            boxes[n].fill(get_state(device))

    def hold(self, n: int, tensor: Tensor) -> None:
        """Fill a box, if it is not full: what moves has gone by then."""
        assert self.boxes is not None
        box = self.boxes[n]
        if type(box) is Box or box.is_empty:
            box.fill(tensor)

    def pack(self, tensor: Tensor) -> Any:
        """Autograd saves a tensor: keep it, or leave a handle."""
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
        if slot.kind in AWAY:
            if slot.fill is not None:
                self.hold(slot.fill, tensor)
            handle = self.drop(slot, inner if inner is tensor else arrived(tensor), self.index - 1)
            if type(handle) is NarrowHandle:
                handle.wrap = wrapping(tensor)
            return handle
        if slot.kind == "parameter":
            table, leaf = self.owners[slot.parameter]
            if table[leaf] is not tensor and storage_of(table[leaf]) != inner.untyped_storage()._cdata:
                raise Diverged(f"saved tensor {self.index - 1} is not parameter {slot.parameter}")
        elif slot.fill is not None:
            self.hold(slot.fill, tensor)
        return Held(tensor, self)

    def drop(self, slot: SlotAction, tensor: Tensor, index: int) -> Handle:
        """What is left of a plain tensor that arrived."""
        boxes = self.boxes
        assert boxes is not None
        witness = None
        if self.how is not Check.OFF and not slot.hollow and (self.share == 1 or (self.salt + index) % self.share == 0):
            witness = self.witness(slot, tensor, index)
        kind = NarrowHandle if type(slot.ref.wrap) is Narrow else Handle
        return kind(self, slot, tuple([boxes[n] for n in slot.boxes]), witness, index)

    def witness(self, slot: SlotAction, tensor: Tensor, index: int) -> Witness:
        """What a dropped tensor leaves behind."""
        return Witness(tensor, slot.spots, self.salt * 7919 + index, full=self.how is Check.FULL)

    def leave(self) -> None:
        """The forward is over: every slot was met and every box is full. From here on handles own everything."""
        if self.index != len(self.recipe.slots):
            raise Diverged(f"{self.index} saved tensors, recorded were {len(self.recipe.slots)}")
        assert self.boxes is not None
        for n, box in enumerate(self.boxes):
            if type(box) is not Handle and box.is_empty:
                raise Diverged(f"nothing was seen of buffer {self.recipe.boxes[n]}")
        boxes, self.boxes = self.boxes, None
        self.handed = {
            leaf: Handle(self, slot, tuple([boxes[n] for n in slot.boxes])) for leaf, slot in self.recipe.handed.items()
        }

    # backward --------------------------------------------------------------------------------------------------------

    def recompute(self, handle: Handle) -> Tensor:
        """The tensor of a dropped slot, computed at the precision, and by the kernels, of the forward."""
        task = _graph_task()  # -1 outside of a backward
        if task != self.task or task == -1:
            self.keeps_graph = _keeps_graph()
            if kernel_switches() != self.switches:
                with switched(self.switches):
                    return self._recompute(handle)
            self.task = task
        return self._recompute(handle)

    def _recompute(self, handle: Handle) -> Tensor:
        # as a rule a backward runs without gradients and without autocast, and the value is there or one op away
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._recompute(handle)
        if _is_any_autocast_enabled():
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                return self._value(handle)
        return self._value(handle)

    def _value(self, handle: Handle) -> Tensor:
        slot = handle.slot
        buffer = slot.ref.buffer
        tensor = self.memo.get(buffer)
        if tensor is None:
            tensor = self._pull(buffer, handle)
        if not (self.keeps_graph and is_asked_again()):
            self._release(buffer)
        if slot.view is not None:
            tensor = view_of(tensor, slot.view)
        if type(handle) is NarrowHandle:
            tensor = handle.wrap.wrap(plain(tensor))
        witness = handle.witness
        if witness is not None and not witness.is_there(tensor):
            rounded = None if self.how is Check.EXACT else self.rounded
            inner = tensor if tensor.__class__ in UNWRAPPED else plain(tensor)
            compare(witness, inner, rounded, lambda: self.wrong(handle))
        return tensor

    def lost(self, handle: Handle) -> WrongValue:
        """What to raise where something that a tensor is computed from never came by."""
        slot = self.recipe.trace.program.slots[handle.index]
        return WrongValue(
            f"saved tensor {slot.index} of {self.name or 'the model'} cannot be computed again: an exception left its "
            "forward before that had run to its end, and what it had made until then went on. The gradients of this "
            "step must not be used; from the next step on it runs without a recording"
        )

    def stale(self, buffer: int, then: int, now: int | None) -> StaleTensor:
        """Return the error for a kept tensor, parameter or buffer that was written to before backward."""
        name = self.recipe.parameters.get(buffer)
        kind = "parameter" if isinstance(self.parameters.get(buffer, (None,) * 4)[2], nn.Parameter) else "buffer"
        return stale("a kept tensor" if name is None else f"{kind} {name!r}", self.name, then, now)

    def wrong(self, handle: Handle) -> WrongValue:
        """Return the error for a recomputed tensor that differs from forward's."""
        slot = self.recipe.trace.program.slots[handle.index]
        where = ".".join(filter(None, (self.name, slot.path))) or "the model"
        came = CAME.get(handle.slot.kind, "was computed again for backward")
        return WrongValue(
            f"saved tensor {slot.index} of {where} (shape {slot.shape}, {slot.dtype}, after {slot.op or 'the start'}) "
            f"{came} and is not what forward had"
        )

    def _pull(self, buffer: int, handle: Handle) -> Tensor:
        """A buffer that is not in the memo."""
        maker = self.recipe.makers.get(buffer)
        if maker is not None:
            self._make(maker, handle)
            return self.memo[buffer]
        parameter = self.parameters.get(buffer)
        if parameter is not None:
            table, leaf, tensor, version = parameter
            if version_of(tensor) != version:
                raise self.stale(buffer, version, version_of(tensor))
            if table[leaf] is not tensor or (tensor.__class__ not in UNWRAPPED and plain(tensor) is not tensor):
                tensor = plain(whole_now(self.model, table, leaf, tensor))
            return tensor
        box = handle.boxes[handle.slot.boxes.index(self.recipe.box_of[buffer])]
        if isinstance(box, Box):
            held = box.tensor
            if held is None:
                raise self.lost(handle)
            if version_of(held) != box.version:
                raise self.stale(buffer, box.version, version_of(held))
            return held if held.__class__ in UNWRAPPED else arrived(held)
        if isinstance(box, Handle):
            tensor = self.memo[buffer] = plain(box.frame.recompute(box))
            return tensor
        if box.is_empty:
            raise self.lost(handle)
        tensor = self.memo[buffer] = box.open()
        return tensor

    def _make(self, op: int, handle: Handle) -> None:
        """Run an op again, and before it what makes its arguments. Forwards unroll thousands of steps: no recursion."""
        steps, memo = self.recipe.steps, self.memo
        waiting = [op]
        while waiting:
            step = steps[waiting[-1]]
            for buffer, maker in step.needs:
                if buffer not in memo:
                    waiting.append(maker)
                    break
            else:
                waiting.pop()
                self._run(step, handle)

    def _run(self, step: RecipeStep, handle: Handle) -> None:
        memo = self.memo
        leaves = step.leaves.copy()
        for position, buffer, ref in step.tensors:
            tensor = memo.get(buffer)
            if tensor is None:
                tensor = self._pull(buffer, handle)
            leaves[position] = tensor if ref is None else view_of(tensor, ref)
        for positions, old, _new in step.written:
            if not self._last_use(old):
                copies = in_a_copy([leaves[p] for p in positions], [step.leaves[p] for p in positions])
                for position, copy in zip(positions, copies, strict=True):
                    leaves[position] = copy
        if step.into is not None:  # whatever stops the op, nobody finds that half written
            for buffer in step.consumes:
                self._release(buffer)
            out = run_step(step, leaves)
            memo[step.outputs[0][1]] = out[0]
            return
        if step.state_in is not None:
            current = get_state(step.device)
            state = memo.get(step.state_in)
            set_state(step.device, self._pull(step.state_in, handle) if state is None else state)
            with outside_of_vmap():
                out = run_step(step, leaves)
            self._put(step.state_out, get_state(step.device))
            set_state(step.device, current)
        elif step.func is EMPTY and (part := self._imagined()) is not None:
            (size, stride), options = step.arguments(leaves)
            out = [part.new_empty_strided(size, stride, **options)]
        else:
            out = run_step(step, leaves)
        for positions, _old, new in step.written:
            self._put(new, leaves[positions[0]])
        for position, buffer in step.outputs:
            memo[buffer] = out[position]
        for buffer in step.consumes:
            self._release(buffer)

    def _imagined(self) -> Tensor | None:
        """In a dry run, something fake to make empty memory of: a mode above takes bare `empty_strided` for real."""
        part = next((plain(p) for p in self.model.parameters()), None)
        return part if isinstance(part, FakeTensor) else None

    def _put(self, buffer: int | None, tensor: Tensor) -> None:
        if buffer is not None and self.recipe.counts.get(buffer, 0) > 0:
            self.memo[buffer] = tensor

    def _last_use(self, buffer: int) -> bool:
        if buffer not in self.memo:
            return False
        counts = self.counts
        return (counts or self.recipe.counts)[buffer] == 1

    def _release(self, buffer: int) -> None:
        counts = self.counts
        if counts is None:
            counts = self.counts = self.recipe.counts.copy()
        left = counts[buffer] - 1
        if left <= 0:
            self.memo.pop(buffer, None)
            counts[buffer] = self.recipe.counts[buffer]
        else:
            counts[buffer] = left


def _may_move_on(tensor: Tensor) -> bool:
    """Whether it is such a thing as a factor of delayed scaling: a few numbers beside the parameters, which the loop
    moves between forward and backward without asking autograd, to which only what was made of them is known.
    """
    return not isinstance(tensor, nn.Parameter) and plain(tensor) is tensor and tensor.nbytes <= FEW_BYTES


def unpack(packed: Any) -> Tensor:
    """Autograd wants a saved tensor back."""
    if type(packed) is Held:
        frame, tensor, version = packed
        if frame.group is not None:
            frame.group.asked()
        return tensor if tensor._version == version else packed.open()  # which raises
    handle: Handle = packed
    if handle.frame.group is not None:
        handle.frame.group.asked()
    return handle.frame.recompute(handle)


def is_asked_again() -> bool:
    """Whether the node that unpacks will do so a second time, to finish what this pass leaves out of it.

    A backward split in two, as zero-bubble pipelines do, first asks for the gradients of inputs and keeps the graph;
    nodes with a weight run again for its gradient. What such a node is given stays computed until then.
    """
    if not _keeps_graph():
        return False
    node = torch._C._current_autograd_node()
    return node is not None and any(after is not None and not _runs(after) for after, _ in node.next_functions)


def _runs(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf whose gradient was asked for
        return True


def owners_of(module: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Where each parameter and buffer of a module lives, so that it is found again when used."""
    owners: dict[str, tuple[dict[str, Any], str]] = {}
    for path, sub in module.named_modules():
        prefix = f"{path}." if path else ""
        for leaf in sub._parameters:
            owners[prefix + leaf] = (sub._parameters, leaf)
        for leaf in sub._buffers:
            owners[prefix + leaf] = (sub._buffers, leaf)
    return owners
