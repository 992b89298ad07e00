"""What Jettison is compared with. A rival changes a model in place and returns a handle that undoes it."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.models import Batch, blocks_of, loss_of

_aten = torch.ops.aten
SAVED_OPERATORS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
}


class Handle(Protocol):
    """What `apply` returns."""

    def remove(self) -> None:
        """Put the model back as it was."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """One way to train: its name in the tables, and how to apply it to a model."""

    name: str
    apply: Callable[[nn.Module, Batch], Handle]


@dataclass(frozen=True, kw_only=True)
class Undo:
    """A handle made of functions."""

    functions: tuple[Callable[[], None], ...] = ()

    def remove(self) -> None:
        """Run them, last first."""
        for function in reversed(self.functions):
            function()


def plain(_model: nn.Module, _batch: Batch) -> Undo:
    """Autograd as it is."""
    return Undo()


def full_checkpoint(every: int) -> Callable[[nn.Module, Batch], Undo]:
    """`torch.utils.checkpoint` (not reentrant) around every `every`-th layer, the first included."""
    return lambda model, _batch: _wrap(model, every, functools.partial(checkpoint, use_reentrant=False))


def selective_checkpoint(model: nn.Module, _batch: Batch) -> Undo:
    """Every layer checkpointed, with the outputs of matmuls and fused attention saved."""
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    return _wrap(model, 1, functools.partial(checkpoint, use_reentrant=False, context_fn=contexts))


def compiled(budget: float | None) -> Callable[[nn.Module, Batch], Undo]:
    """`torch.compile`, with the partitioner's activation memory budget (None leaves it at its default, 1).

    Dynamo keeps compiled code by code object, and would hand one model's to the next, budget and all: so each model is
    compiled behind a code object of its own, as one graph.
    """

    def apply(model: nn.Module, batch: Batch) -> Undo:
        with activation_memory_budget(budget):
            model.forward = torch.compile(_own_code(model.forward), fullgraph=True)
            loss_of(model, batch).backward()  # compiles here, forward and backward, under this budget
        model.zero_grad(set_to_none=True)
        return Undo(functions=(lambda: _restore_forward(model),))

    return apply


def compiled_blocks(budget: float) -> Callable[[nn.Module, Batch], Undo]:
    """Every layer compiled by itself, by one compilation, under the partitioner's activation memory budget."""

    def apply(model: nn.Module, batch: Batch) -> Undo:
        blocks = list(blocks_of(model))
        forward: Any = torch.compile(_own_code(type(blocks[0]).forward), fullgraph=True, dynamic=False)
        for block in blocks:
            block.forward = forward.__get__(block)
        with activation_memory_budget(budget):
            loss_of(model, batch).backward()
        model.zero_grad(set_to_none=True)
        return Undo(functions=tuple(functools.partial(_restore_forward, block) for block in blocks))

    return apply


def save_on_cpu(model: nn.Module, _batch: Batch) -> Undo:
    """torch's own offloading: all that layers save waits in pinned memory, their parameters too."""
    pins = torch.cuda.is_available()

    def call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=pins):
            return forward(*args, **kwargs)

    return _wrap(model, 1, call)


@contextlib.contextmanager
def activation_memory_budget(budget: float | None) -> Iterator[None]:
    """Set `torch._functorch.config.activation_memory_budget` for what is compiled inside."""
    import torch._functorch.config as config

    previous = config.activation_memory_budget
    config.activation_memory_budget = 1.0 if budget is None else budget
    try:
        yield
    finally:
        config.activation_memory_budget = previous


EAGER = (
    Rival(name="plain autograd", apply=plain),
    Rival(name="checkpoint, every layer", apply=full_checkpoint(1)),
    Rival(name="checkpoint, every 2nd layer", apply=full_checkpoint(2)),
    Rival(name="selective contexts, save matmuls", apply=selective_checkpoint),
)

COMPILED = (
    Rival(name="compiled, plain", apply=compiled(None)),
    *(Rival(name=f"compiled, budget {budget}", apply=compiled(budget)) for budget in (0.75, 0.5, 0.25)),
)


def _own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


def _policy(_context: Any, func: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if func in SAVED_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


def _wrap(model: nn.Module, every: int, call: Callable[..., Any]) -> Undo:
    chosen = list(blocks_of(model))[::every]
    for block in chosen:
        block.forward = functools.partial(call, block.forward)
    return Undo(functions=tuple(functools.partial(_restore_forward, block) for block in chosen))


def _restore_forward(module: nn.Module) -> None:
    del module.forward
