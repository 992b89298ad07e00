"""Assumptions of a plan about the training loop, and warnings when the loop breaks one.

A plan covers one step: one forward on a batch of known shapes, one complete backward that frees the graph, outside of
autocast, with gradients allocated or not when it begins. Gradients stay right whatever the loop does; bytes do not. So
whatever may cost more than planned is warned about, once, when it happens. Checks at the start of a forward cost a few
microseconds a step; checks of the backward run when it unpacks its first tensor.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from jettison.capture.tensor_subclasses import plain
from jettison.capture.trees import tree_leaves
from jettison.core.errors import warn
from jettison.core.units import format_bytes
from jettison.runtime.batch_shape import BatchShape
from jettison.runtime.graph_fingerprint import nodes_behind

Unpack = Callable[[Any], Tensor]
RETAINED: Final = "retained"
AUTOCAST: Final = "autocast"
PARTIAL: Final = "partial"
_OTHER_BACKWARDS: Final = {
    RETAINED: (
        "backward keeps the graph (retain_graph=True, or create_graph=True)",
        "that backward frees each saved tensor after its last use",
        "leave retain_graph out, or add the losses and run one backward",
    ),
    AUTOCAST: (
        "backward runs inside autocast",
        "that it runs outside, where nothing is cast and cached once more",
        "leave the autocast block before calling backward",
    ),
    PARTIAL: (
        "backward stops before all parameters are reached (backward(inputs=...) or autograd.grad)",
        "that one backward runs through the whole model",
        "run one whole backward, or freeze what is not trained before planning",
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
        self.has_loss = True  # whether the latest forward returned a loss

    def follow(self) -> None:
        """Take the model's current parameters as the planned ones."""
        self.parameters = list(self.model.parameters())
        trained = [p for p in self.parameters if p.requires_grad]
        self.frozen = [p for p in self.parameters if not p.requires_grad]
        self.ends = [trained[0], trained[-1]] if trained else []
        self.outputs: list[weakref.ref[Tensor]] = []  # outputs of the latest forward
        self.gradient_bytes = sum(plain(p).nbytes for p in trained)

    def trained(self) -> bytes:
        """A byte for each parameter, 1 if it requires gradients now."""
        return bytes([p.requires_grad for p in self.parameters])

    def forward_begins(self, signature: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], graphs: Sized) -> None:
        """Check the start of a step: its arguments, and graphs of earlier forwards that are still alive."""
        self.looked = False
        if signature not in self.known:
            self.known.add(signature)
            self._compare(args, kwargs)
        if not self.gradients_preallocated and any(p.grad is not None for p in self.ends):
            self._say(
                "gradients",
                f"gradients ({format_bytes(self.gradient_bytes)}) are there already when the forward begins, as they "
                "are when several backwards add up or after zero_grad(set_to_none=False)",
                "that the first backward makes them, one by one",
                "plan with gradients_preallocated=True, or zero_grad(set_to_none=True) before each forward",
            )
        replica = None if self.replicated else DistributedDataParallel._get_active_ddp_module()
        if replica is not None and replica.module is self.model:
            self._say(
                "replica",
                f"the model is inside of DistributedDataParallel, whose buckets ({format_bytes(self.gradient_bytes)}) "
                "stay from step to step",
                "gradients alone",
                "plan what the loop calls: auto_checkpoint(DistributedDataParallel(model), ...)",
            )
        if any(p.requires_grad for p in self.frozen):
            thawed = [p for p in self.frozen if p.requires_grad]
            nbytes = sum(plain(p).nbytes for p in thawed)
            self.frozen = []  # warn once
            self._say(
                "thawed",
                f"{len(thawed)} parameters ({format_bytes(nbytes)}) are trained that were frozen",
                "that they have no gradients, no optimizer's state, and that their matmuls save no inputs",
                "call handle.expect(batch) before each step"
                if self.thaws
                else "remove() the plan, and plan again as the model is trained now",
            )
        if not self.ends and not any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves((args, kwargs))):
            return  # a frozen model, of which autograd saves nothing here
        if len(graphs) >= self.in_flight and not self.collected:
            self.collected = True  # once: no backward will come for graphs that only reference cycles keep alive
            gc.collect()
        if (waiting := len(graphs)) >= self.in_flight:
            self._say(
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
        if self.returns_loss and not self.has_loss:
            self._say(
                "loss",
                "backward begins outside of the model, which returned no loss",
                "the loss that the model makes, and no other",
                "plan with the loss as it is: auto_checkpoint(..., loss_fn=...), or step=",
            )
        kinds = backward_kinds(self.ends) - self.said
        for kind, words in _OTHER_BACKWARDS.items():
            if kind in kinds and (kind != PARTIAL or self._is_partial()):
                self._say(kind, *words)

    def _look_at_outputs(self) -> None:
        """Check whether the loop still references the model's outputs, such as logits."""
        if self.room_bytes is None:
            return
        held = [plain(t).untyped_storage() for ref in self.outputs if (t := ref()) is not None and t.dim() > 0]
        nbytes = sum({storage._cdata: storage.nbytes() for storage in held}.values())
        if nbytes > self.room_bytes:
            self._say(
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
        nearest = min(self.planned, key=lambda planned: len(now.beyond(planned)))
        changes = "; ".join(now.beyond(nearest))
        self._say(
            f"batch {changes}",
            f"the batch is larger than the one that was planned for: {changes}",
            "the batch it was given",
            "call handle.expect(batch) before each step"
            if self.expects
            else "plan with the largest batch of the run, and with every argument that it will have",
        )

    def _say(self, key: str, what: str, assumed: str, advice: str) -> None:
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
