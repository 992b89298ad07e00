"""Assumptions of a plan about the training loop, and warnings when the loop breaks one.

A plan covers one step: one forward on a batch of known shapes, one complete backward that frees the graph, outside of
autocast, with gradients allocated or not when it begins. Gradients stay right whatever the loop does; bytes do not. So
whatever may cost more than planned is warned about, once, when it happens. Checks at the start of a forward cost a few
microseconds a step; checks of the backward run when it unpacks its first tensor.
"""

from __future__ import annotations

import copy
import gc
import math
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import _engine_run_backward, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import SUPPORTED_NODES

from jettison.capture.fsdp2 import states, stay_unsharded
from jettison.capture.pytrees import tree_leaves
from jettison.capture.tensor_subclasses import plain
from jettison.core.errors import warn
from jettison.core.units import format_bytes
from jettison.runtime.callers import argument_of
from jettison.runtime.cuda_graphs import is_capturing
from jettison.runtime.graph_fingerprint import nodes_behind

Unpack = Callable[[Any], Tensor]
RETAINED: Final = "retained"
_LEAF: Final = 2**64 - 1  # sequence number of nodes that accumulate gradients
MOST_SCALE_BYTES: Final = 1024  # of a parameter that scales a loss: a temperature, weights of several losses
AUTOCAST: Final = "autocast"
PARTIAL: Final = "partial"
_OTHER_BACKWARDS: Final = {
    RETAINED: (
        "backward keeps the graph (retain_graph=True, or create_graph=True)",
        "that backward frees each saved tensor after its last use",
        "leave retain_graph out, or plan the step as it is: auto_checkpoint(..., step=your_forward_and_backward)",
    ),
    AUTOCAST: (
        "backward runs inside autocast",
        "that it runs outside, where nothing is cast and cached once more",
        "leave the autocast block before calling backward",
    ),
    PARTIAL: (
        "backward stops before all parameters are reached (backward(inputs=...) or autograd.grad)",
        "that one backward runs through the whole model",
        "run one whole backward, freeze what is not trained before planning, or plan with step=",
    ),
}
"""By kind of backward: a description, the plan's assumption, and advice."""


class Assumptions:
    """Watches the assumptions of a plan (see the module docstring); one for the root of a planned model.

    Args:
        batches: the planned arguments of every call in a step, as (args, kwargs).
        signature: the root's signature of the first of them.
        gradients_preallocated: the plan counts gradients from the start of the forward on.
        in_flight: most calls between forward and backward at a time.
        backwards: the kinds of backward that the plan knows of, see `backward_kinds`.
        room_bytes: budget left for outputs that the loop references during backward; None: the plan counts them.
        returns_loss: the model itself returns the loss at which backward begins.
        replicated: the plan counts the buckets of a DistributedDataParallel around the model.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
        signature: Any,
        *,
        budget_bytes: int,
        gradients_preallocated: bool,
        in_flight: int = 1,
        backwards: Iterable[str] = (),
        room_bytes: int | None = None,
        returns_loss: bool = False,
        replicated: bool = False,
    ) -> None:
        self.model, self.replicated = model, replicated
        self.room_bytes, self.returns_loss = room_bytes, returns_loss
        self.follow()
        self.planned = [BatchShape.of(*batch) for batch in batches]
        self.in_flight = in_flight
        self.known = {signature}
        self.budget_bytes = budget_bytes
        self.gradients_preallocated = gradients_preallocated
        self.said = set(backwards)
        self.expects = False  # the handle plans for batches that are announced to it
        self.thaws = False  # and for parameters that are unfrozen by then
        self.looked = False  # whether the backward of the latest forward was checked
        self.collected = False  # whether garbage was collected before the first warning about pending forwards
        self.is_larger = False  # whether a batch was larger than planned, which was warned about
        self.counts_gradients = False  # whether the plan of this forward counts those that are there
        self.has_loss = True  # whether the latest forward returned a loss
        self.losses: set[int] = set()  # sequence numbers of the nodes of numbers that the latest forward returned
        self.last_node = 0  # the largest of all of its outputs

    def follow(self) -> None:
        """Take the model's current parameters as the planned ones."""
        self.parameters = list(self.model.parameters())
        trained = [p for p in self.parameters if p.requires_grad]
        self.frozen = [p for p in self.parameters if not p.requires_grad]
        self.ends = [trained[0], trained[-1]] if trained else []
        self.outputs: list[weakref.ref[Tensor]] = []  # outputs of the latest forward
        self.gradient_bytes = sum(plain(p).nbytes for p in trained)
        self.states = states(self.model)
        self.unsharded = stay_unsharded(self.states)

    def trained(self) -> bytes:
        """A byte for each parameter, 1 if it requires gradients now, and each of FSDP's modules: `stay_unsharded`."""
        return bytes([p.requires_grad for p in self.parameters]) + stay_unsharded(self.states)

    def has_gradients(self) -> bool:
        """Whether gradients are there that the first plan did not count. The caller takes a plan that does."""
        self.counts_gradients = True
        return not self.gradients_preallocated and any(p.grad is not None for p in self.parameters)

    def forward_begins(self, signature: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], graphs: Sized) -> None:
        """Check the start of a step: its arguments, and graphs of earlier forwards that are still alive."""
        self.looked = False
        self.losses = set()
        if signature not in self.known:
            self.known.add(signature)
            self._compare(args, kwargs)
        counted, self.counts_gradients = self.counts_gradients or self.gradients_preallocated, False
        if not counted and any(p.grad is not None for p in self.ends):
            self._warn(
                "gradients",
                f"gradients ({format_bytes(self.gradient_bytes)}) are there already when the forward begins, as they "
                "are when several backwards add up or after zero_grad(set_to_none=False)",
                "that the first backward makes them, one by one",
                "plan with gradients_preallocated=True, or zero_grad(set_to_none=True) before each forward",
            )
        replica = None if self.replicated else DistributedDataParallel._get_active_ddp_module()
        if replica is not None and replica.module is self.model:
            self._warn(
                "replica",
                f"the model is inside of DistributedDataParallel, whose buckets ({format_bytes(self.gradient_bytes)}) "
                "stay from step to step",
                "gradients alone",
                "plan what the loop calls: auto_checkpoint(DistributedDataParallel(model), ...)",
            )
        again = "call handle.expect(batch) before each step" if self.thaws else "remove() the plan, and plan again"
        if thawed := [plain(p).nbytes for p in self.frozen if p.requires_grad]:
            self._warn(
                "thawed",
                f"{len(thawed)} parameters ({format_bytes(sum(thawed))}) are trained that were frozen",
                "that they have no gradients, no optimizer's state, and that their matmuls save no inputs",
                again,
            )
        if self.states and any(map(operator.gt, stay_unsharded(self.states), self.unsharded)):
            self._warn(
                "unsharded",
                "FSDP keeps parameters unsharded between forward and backward (set_reshard_after_forward)",
                "that they are resharded, as when it was made",
                again,
            )
        if not self.ends and not any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves((args, kwargs))):
            return  # a frozen model, of which autograd saves nothing here
        if len(graphs) >= self.in_flight and not self.collected:
            self.collected = True  # once: no backward will come for graphs that only reference cycles keep alive
            gc.collect()
        if (waiting := len(graphs)) >= self.in_flight:
            self._warn(
                "waiting",
                f"a forward begins while {waiting} earlier one{'s' if waiting > 1 else ''} still "
                f"wait{'' if waiting > 1 else 's'} for backward",
                "that each forward is followed by its backward"
                if self.in_flight == 1
                else f"that {self.in_flight - 1} at most wait when one begins",
                "run backward after each forward, run forwards that need none under torch.no_grad(), or plan the step "
                "as it is: auto_checkpoint(..., step=your_forward_and_backward)",
            )

    def forward_ends(self, leaves: Iterable[Any]) -> None:
        found = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
        self.outputs = [weakref.ref(t) for t in found]
        self.has_loss = not found or any(t.numel() == 1 for t in found)
        replica = DistributedDataParallel._get_active_ddp_module()
        adds_nodes = replica is not None and (replica.find_unused_parameters or replica.static_graph)
        if self.returns_loss and not adds_nodes:
            nodes = [(t, node._sequence_nr()) for t in found if (node := t.grad_fn) is not None]
            self.last_node = max((number for _, number in nodes), default=0)
            self.losses = {number for t, number in nodes if t.numel() == 1}

    def watched(self, unpack: Unpack) -> Unpack:
        """Wrap an unpack hook: the first tensor that a backward unpacks triggers the check of that backward."""

        def unpacked(packed: Any) -> Tensor:
            if not self.looked:
                self.looked = True
                self.backward_begins()
            return unpack(packed)

        return unpacked

    def backward_begins(self) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.looked = False  # a saved tensor was read outside of a backward
            return
        self._look_at_outputs()
        if self.returns_loss and "loss" not in self.said and (where := self._beyond_loss()):
            self._warn(
                "loss",
                f"backward begins {where}",
                "the loss that the model makes, and no other",
                "plan with the loss as it is: auto_checkpoint(..., loss_fn=...), or step=",
            )
        kinds = backward_kinds(self.ends) - self.said
        for kind, words in _OTHER_BACKWARDS.items():
            if kind in kinds and (kind != PARTIAL or self._is_partial()):
                self._warn(kind, *words)

    def _beyond_loss(self) -> str:
        """Place at which backward begins, if not at the model's own loss, scaled (by a trained number, say) or added to
        other numbers that it returned.
        """
        if not self.has_loss:
            return "outside of the model, which returned no loss"
        roots = argument_of(_engine_run_backward, 0) if self.losses and "waiting" not in self.said else None
        tensors = [t for t in roots or () if isinstance(t, Tensor)]
        reached = {t.grad_fn for t in tensors}
        for node in nodes_behind(tensors, self.last_node + 1):
            reached.update(after for after, _ in node.next_functions)
        factors = {
            node for node in reached if getattr(getattr(node, "variable", None), "nbytes", _LEAF) < MOST_SCALE_BYTES
        }
        numbers = {node._sequence_nr() for node in reached - factors - {None}}
        if all(self.last_node < number < _LEAF or number in self.losses for number in numbers):
            return ""
        return "at a loss made of more than the model's (logits, hidden states, weights)"

    def _look_at_outputs(self) -> None:
        """Check whether the loop still references the model's outputs, such as logits."""
        if self.room_bytes is None:
            return
        held = [plain(t).untyped_storage() for ref in self.outputs if (t := ref()) is not None and t.dim() > 0]
        nbytes = sum({storage._cdata: storage.nbytes() for storage in held}.values())
        if nbytes > self.room_bytes:
            self._warn(
                "outputs",
                f"the loop still holds what the model returned ({format_bytes(nbytes)}) when backward begins",
                "that it does not (keep_output=False)",
                "plan with keep_output=True, or write model(**batch).loss.backward()",
            )

    def _is_partial(self) -> bool:
        """Whether the unreached parameters are part of the graph, neither unused nor of another model by now."""
        graph = set(nodes_behind(t for ref in self.outputs if (t := ref()) is not None))
        self.ends = [p for p in self.model.parameters() if p.requires_grad and get_gradient_edge(p).node in graph]
        del self.ends[1:-1]
        return not all(map(_is_reached, self.ends))

    def _compare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Warn about arguments that are larger than planned, or new."""
        now = BatchShape.of(args, kwargs)
        if any(planned.covers(now) for planned in self.planned):
            return
        self.is_larger = True
        changes = f"{now}, planned was {' or '.join(dict.fromkeys(map(str, self.planned)))}"
        self._warn(
            f"batch {changes}",
            f"the batch is larger than the one that was planned for: {changes}",
            "the batch it was given",
            "call handle.expect(batch) before each step"
            if self.expects
            else "plan with the largest batch of the run, and with every argument that it will have",
        )

    def _warn(self, key: str, what: str, assumed: str, advice: str) -> None:
        if key in self.said:
            return
        self.said.add(key)
        warn(
            f"{what}; the plan for {format_bytes(self.budget_bytes)} assumed {assumed}, so that the peak may be above "
            f"the budget (gradients are not affected). To have it held: {advice}"
        )


def backward_kinds(ends: Iterable[Tensor]) -> set[str]:
    """Kinds of the running backward: in autocast, with a retained graph, or past some of ``ends``."""
    found = {
        RETAINED: torch._C._autograd._get_current_graph_task_keep_graph(),
        AUTOCAST: torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
        PARTIAL: not all(map(_is_reached, ends)),
    }
    return {kind for kind, holds in found.items() if holds}


def _is_reached(parameter: Tensor) -> bool:
    """Whether the running backward reaches a parameter, if its graph does."""
    if not parameter.requires_grad:
        return True
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
    except RuntimeError:  # its gradient was requested explicitly
        return False


# shapes of a batch or of a call's arguments: the planned ones, and those that arrive ----------------------------------


@dataclass(frozen=True, slots=True)
class Size:
    """Dims and bytes of one tensor; ``uniform``: all its values are equal; None: they do not decide which ops run."""

    dims: tuple[int, ...]
    nbytes: int
    uniform: bool | None = None

    @property
    def element_bytes(self) -> int:
        """Bytes of one element; 0 for an empty tensor."""
        return self.nbytes // max(1, math.prod(self.dims))

    def around(self, other: Size) -> Size:
        """Return the elementwise maximum of both sizes."""
        if len(self.dims) != len(other.dims):
            return max(self, other, key=lambda size: size.nbytes)
        dims = tuple(map(max, self.dims, other.dims))
        return Size(dims, math.prod(dims) * max(self.element_bytes, other.element_bytes))

    def __str__(self) -> str:
        return (" x ".join(map(str, self.dims)) or "a scalar") + " of one value" * bool(self.uniform)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Sizes of a batch's tensors by path: ``0.input_ids`` is a tensor of the first argument, a mapping."""

    sizes: tuple[tuple[str, Size], ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Any = (), decisive: Collection[str] = ()) -> BatchShape:
        """Return the shape of these arguments. ``decisive``: last keys of tensors whose values decide which ops run."""
        found = tensors_by_path(args, kwargs).items()
        return cls(tuple((path, _size(plain(tensor), path.rpartition(".")[2] in decisive)) for path, tensor in found))

    @property
    def nbytes(self) -> int:
        return sum(size.nbytes for _, size in self.sizes)

    def covers(self, other: BatchShape) -> bool:
        """Whether the other has these tensors, none of them longer: a step on it takes no more memory."""
        known = dict(self.sizes)
        return all(where in known and _within(size, known[where]) for where, size in other.sizes)

    def around(self, other: BatchShape) -> BatchShape:
        """Return the elementwise maximum of both shapes."""
        found = dict(self.sizes)
        for where, size in other.sizes:
            found[where] = found[where].around(size) if where in found else size
        return BatchShape(tuple(found.items()))

    def can_become(self, other: BatchShape) -> bool:
        """Whether the other has the same tensors with other lengths."""
        return [where for where, _ in self.sizes] == [where for where, _ in other.sizes] and all(
            len(size.dims) == len(wanted.dims) and size.element_bytes == wanted.element_bytes
            for (_, size), (_, wanted) in zip(self.sizes, other.sizes, strict=True)
        )

    def __str__(self) -> str:
        """List equal shapes once, under the part of their names in which they differ."""
        paths = [where.split(".") for where, _ in self.sizes]
        while all(len(path) > 1 for path in paths) and len({path[0] for path in paths}) == 1:
            paths = [path[1:] for path in paths]
        found: dict[str, list[str]] = {}
        for path, (_, size) in zip(paths, self.sizes, strict=True):
            found.setdefault(str(size), []).append(".".join(path))
        return ", ".join(f"{size} ({', '.join(wheres)})" for size, wheres in found.items()) or "no tensors"


def _size(tensor: Tensor, is_decisive: bool) -> Size:
    uniform = is_uniform(tensor) if is_decisive else None
    return Size(tuple(tensor.shape), tensor.numel() * tensor.element_size(), uniform)


def is_uniform(tensor: Tensor) -> bool:
    """Whether all values are known to be equal."""
    hidden = tensor.is_meta or isinstance(tensor, FakeTensor) or is_capturing()
    return not hidden and bool((tensor == tensor.reshape(-1)[:1]).all())


def tensors_by_path(args: tuple[Any, ...], kwargs: Any = ()) -> dict[str, Tensor]:
    """Tensors of a call's arguments, by their paths in its `BatchShape`."""
    return {".".join(path): tensor for tree in (args, dict(kwargs)) for path, tensor in _tensors(tree, ())}


def _tensors(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Tensors of a tree, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for key, one in _inside(value):
        yield from _tensors(one, (*path, str(key)))


def _inside(value: Any) -> Iterable[tuple[Any, Any]]:
    """Items, by key, of a list, a mapping, a pytree node, or an object with tensors (a dataclass)."""
    if isinstance(value, list | tuple):
        return enumerate(value)
    if isinstance(value, Mapping):
        return value.items()
    if type(value) in SUPPORTED_NODES:
        return enumerate(SUPPORTED_NODES[type(value)].flatten_fn(value)[0])
    held = {} if isinstance(value, type | nn.Module) else getattr(value, "__dict__", {})
    return held.items() if any(isinstance(one, Tensor) for one in held.values()) else ()


def map_tensors(change: Callable[[str, Tensor], Tensor], value: Any, *path: str) -> Any:
    """Map the tensors of a tree; ``change`` gets each one's name, as in `BatchShape.sizes`, and the tensor."""
    if isinstance(value, Tensor):
        return change(".".join(path), value)
    changed = {key: map_tensors(change, one, *path, str(key)) for key, one in _inside(value)}
    if isinstance(value, list | tuple):
        return value._make(changed.values()) if hasattr(value, "_make") else type(value)(changed.values())
    if isinstance(value, Mapping):
        made: Any = copy.copy(value)
        for key, one in changed.items():
            made[key] = one
        return made
    if type(value) in SUPPORTED_NODES:
        node = SUPPORTED_NODES[type(value)]
        return node.unflatten_fn(changed.values(), node.flatten_fn(value)[1])
    if changed:
        made = copy.copy(value)
        vars(made).update(changed)
        return made
    return value


def _within(size: Size, most: Size) -> bool:
    return (
        len(size.dims) == len(most.dims)
        and size.uniform == most.uniform
        and size.nbytes <= most.nbytes
        and all(a <= b for a, b in zip(size.dims, most.dims, strict=True))
    )
