"""Recovery from out-of-memory errors: plan again for less memory, and repeat the step as if it had not begun.

    for attempt in handle.guard():
        with attempt:
            loss = step(model, batch)

A failed attempt is undone: gradients, buffers and random streams are restored. Errors of the second attempt are raised.
If gradients would be added twice, because an attempt does not know their earlier value, it is not repeated.
"""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jettison.capture.randomness import Streams
from jettison.core.errors import UsageError
from jettison.core.units import format_bytes
from jettison.spec.device_allowance import FRAGMENTS

if TYPE_CHECKING:
    from jettison.planner.batches import BatchPlans

_ON_CPU = "can't allocate memory"  # message of torch's CPU allocator, in a RuntimeError
ONE_PLAN = (
    "no other plan can be made here; ranks that share parameters would have to make it together, stages of a pipeline "
    "too, and a policy is what it is"
)
LESS = 0.9
"""Share of the predicted peak to plan for next, if the device's memory is unknown."""


@dataclass(eq=False)
class Attempt:
    """``with attempt:`` around one step. ``failed``: it ran out of memory and is to be repeated.

    Args:
        plans: of the handle; None if no other plan can be made, and no error is caught.
        batch: of the step, if the model does not receive it directly.
        optimizers: that were planned with; other tensors that they train are restored as well.
        why_last: why no other attempt follows the first.
    """

    plans: BatchPlans | None
    models: Sequence[nn.Module]
    batch: Any = None
    optimizers: Sequence[torch.optim.Optimizer] = ()
    why_last: str = ""
    failed: bool = field(default=False, init=False)
    entered: bool = field(default=False, init=False)

    def __enter__(self) -> Attempt:
        if self.entered:
            raise UsageError(
                "got one attempt for two with blocks; expected one around all forwards and backwards of a step: what "
                "the first has added to gradients would stay when the second is repeated"
            )
        self.entered = True
        if self.plans is None:
            return self
        if self.batch is not None:
            self.plans.meet(self.batch)
        self._stepped = False
        self._streams = Streams.now()
        self._gradients = [(p, _aside(p.grad)) for p in self._trained()]
        self._buffers = [
            (module._buffers, name, buffer, _aside(buffer))
            for model in self.models
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        self._elsewhere = {id(leaf): _mark(leaf) for leaf in _known_leaves(self.plans)}
        self._hook = register_optimizer_step_pre_hook(self._note_step)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _where: TracebackType | None
    ) -> bool:
        if self.plans is None:
            if self.why_last and error is not None and is_out_of_memory(error):
                error.add_note(f"not repeated: {self.why_last}")
            return False
        self._hook.remove()
        if error is not None and is_out_of_memory(error):
            if why_not := self._why_not(error):
                error.add_note(f"not repeated: {why_not}")
            else:
                self._undo()
                self.failed = True
                self.plans.restrict(_what_is_left(self.models, self.plans))
        self._gradients, self._buffers = [], []
        return self.failed

    def _trained(self) -> list[Tensor]:
        """Parameters of the models, and other tensors that the optimizers train; each once."""
        of_models = [p for model in self.models for p in model.parameters()]
        groups = [group for one in self.optimizers for group in one.param_groups]
        return list({id(p): p for p in (*of_models, *(p for group in groups for p in group["params"]))}.values())

    def _why_not(self, error: BaseException) -> str:
        """Reason against a second attempt; empty if there is none."""
        if self._stepped:
            return "an optimizer had stepped already"
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            return "other ranks wait inside of this step"
        traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
        gc.collect()
        known = {id(p) for p, _ in self._gradients}
        others = sum(
            leaf.grad is not None and id(leaf) not in known and self._elsewhere.get(id(leaf)) != _mark(leaf)
            for leaf in _leaves()
        )
        if not others:
            return ""
        return (
            f"{others} tensors outside the planned models got gradients, which a second attempt would add to; "
            "plan all that is trained together, with models=, give optimizer= for it, or free those gradients before "
            "the step"
        )

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    def _undo(self) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        with torch.no_grad():
            for table, name, buffer, value in self._buffers:
                table[name] = buffer  # a forward may have replaced it
                if buffer is not None:
                    buffer.copy_(value)
        self._streams.restore()
        self._gradients, self._buffers = [], []
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and _ON_CPU in str(error)
    )


_KNOWN: weakref.WeakKeyDictionary[BatchPlans, list[weakref.ref[Tensor]]] = weakref.WeakKeyDictionary()


def _known_leaves(plans: BatchPlans) -> list[Tensor]:
    """Leaf tensors that existed when the first step of a plan was guarded; a scan of all objects (370,000 of
    a process with transformers) takes 80 ms.

    A later leaf with a gradient is assumed to have got it from this attempt.
    """
    if plans not in _KNOWN:
        _KNOWN[plans] = [weakref.ref(leaf) for leaf in _leaves()]
    return [leaf for leaf in (known() for known in _KNOWN[plans]) if leaf is not None]


def _leaves() -> Iterator[Tensor]:
    """Yield all tensors that can have a gradient."""
    for one in gc.get_objects():
        if issubclass(type(one), Tensor) and not isinstance(one, FakeTensor) and one.is_leaf and one.requires_grad:
            yield one


def _mark(leaf: Tensor) -> tuple[int, int] | None:
    """Identity and version of a gradient, which change once a backward has added to it."""
    return None if leaf.grad is None else (leaf.grad._cdata, leaf.grad._version)


def _aside(tensor: Tensor | None) -> Tensor | None:
    """A copy that uses no accelerator memory."""
    return None if tensor is None else tensor.detach().to("cpu", copy=True)


def _what_is_left(models: Sequence[nn.Module], plans: BatchPlans) -> int:
    """Budget of the second attempt: below the first's, and below the device's memory."""
    assert plans.now is not None
    budget = min(plans.budget_bytes, int(LESS * plans.now.peak_bytes))
    device = next((p.device for model in models for p in model.parameters() if p.device.type == "cuda"), None)
    if device is not None:
        free, _ = torch.cuda.mem_get_info(device)
        budget = min(budget, int((free + torch.cuda.memory_reserved(device)) * (1 - FRAGMENTS[2])))
    plans.progress(f"out of memory; planning for {format_bytes(budget)} instead")
    return budget
