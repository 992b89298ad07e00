"""What cannot be planned is said in one line before anything runs; models without values are traced on fake tensors."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from jettison.capture.dispatch import refuse_scripted
from jettison.capture.fakes import fake_batch, fake_copy, fake_mode
from jettison.capture.model_trace import Loop, LossFn, ModelTrace, expect_module
from jettison.capture.tracer import trace_model
from jettison.core.errors import UnsupportedModule, UsageError
from jettison.planner.compile_blocks import compiled_modules, refuse_compiled_whole, survey_blocks
from jettison.planner.optimizers import Together
from jettison.runtime.callers import FOREIGN_HOOKS, are_hooks_foreign
from jettison.runtime.planned import PlannedForward
from jettison.runtime.structure import refuse_checkpointing

_LOCAL_PARTS: Final = "torch.distributed.tensor.parallel.ddp"
"""Its hooks make DTensors of plain parameters as the outermost forward begins."""


def check_model(model: nn.Module) -> None:
    """Whether there is a Python forward to plan.

    Raises:
        UnsupportedModule: it is planned, compiled, scripted, or checkpoints by itself.
        UsageError: it is no module; it would be planned under saved-tensor hooks of somebody else's.
    """
    expect_module(model)
    if are_hooks_foreign():
        raise UsageError(
            f"{type(model).__name__} would be planned {FOREIGN_HOOKS}, under which models run without a plan. Plan it "
            "outside of them, and train it outside of them"
        )
    for name, module in model.named_modules():
        _check_module(name or "the model", module)


def _check_module(name: str, module: nn.Module) -> None:
    refuse_scripted(name, module)
    refuse_compiled_whole(name, module)
    replicate = sys.modules.get("torch.distributed._composable.replicate")
    if replicate is not None and isinstance(module, replicate.DDP):
        raise UnsupportedModule(
            f"{name} is under torch.distributed._composable.replicate, of which no copy can be made; wrap it in "
            "torch.nn.parallel.DistributedDataParallel, or in replicate of replicate_with_fsdp"
        )
    if any(getattr(hook, "__module__", "") == _LOCAL_PARTS for hook in module._forward_pre_hooks.values()):
        raise UnsupportedModule(
            f"{name} is tensor parallel, and keeps plain parts of its parameters for DistributedDataParallel "
            "(_pre_dp_module_transform), which its blocks do not run with by themselves; use fully_shard or "
            "replicate_with_fsdp's replicate over the other axis of the mesh"
        )
    if isinstance(module.forward, PlannedForward):
        raise UnsupportedModule(
            f"{name} already runs under a plan; call .remove() on its handle first. Half-steps that share networks (a "
            "GAN's) are one step: auto_checkpoint(first, batch, budget, models=(first, second), step=whole_step, "
            "optimizer=(of_first, of_second))"
        )
    refuse_checkpointing(name, module)


def check_optimizer(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> None:
    """Whether a step of it can be dry-run.

    Raises:
        UsageError: it is no optimizer, holds nothing of this model, calls the forward from inside its step, or is
            spread over ranks.
    """
    if isinstance(optimizer, Together):
        for one in optimizer.optimizers:
            check_optimizer(one, model)
        return
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer= is {optimizer!r}; expected a torch.optim.Optimizer over the model's parameters")
    library = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if library is not None and isinstance(optimizer, library.ZeroRedundancyOptimizer):
        raise UsageError(
            "ZeroRedundancyOptimizer keeps other parameters' state on every rank and sends them inside of its step, "
            "which no dry run follows; leave optimizer= out and lower the budget by the bytes of its state, or shard "
            "with FSDP2"
        )
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise UsageError(
            f"the {type(optimizer).__name__} holds no parameter of this model; make it of model.parameters()"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__} runs forward and backward from inside its step, as often as it likes, which "
            "no dry run can follow; leave optimizer= out and lower the budget by the bytes of its state"
        )


def traced(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    regions: Iterable[str] | None = None,
    loop: Loop | None = None,
) -> ModelTrace:
    """The record of one training forward.

    A model on ``meta`` is recorded as if its weights were where the batch is; a batch on ``meta``, as if it were where
    the weights are. Neither is allocated.

    Raises:
        TraceError: the forward cannot run on tensors without values, or there is no scalar loss.
        UsageError: weights have no size yet, or only some of them have values.
    """
    expect_module(model)
    check_states(model)
    return survey_blocks(_traced(model, batch, loss_fn, regions, loop), model)


def _traced(
    model: nn.Module, batch: Any, loss_fn: LossFn | None, regions: Iterable[str] | None, loop: Loop | None
) -> ModelTrace:
    if regions is None and loop is not None and loop.compile is not None:
        regions = list(compiled_modules(model)) or None
    states = [tensor for _, tensor in _states(model)]
    given = [leaf for leaf in tree_leaves(_plain(batch)) if isinstance(leaf, Tensor)]
    model_device = next((t.device for t in states if not t.is_meta), None)
    batch_device = next((t.device for t in given if not t.is_meta), None)
    if (model_device is None) == (batch_device is None) or not states or not given:
        known = batch_device is not None or not given
        return trace_model(model, batch, loss_fn=loss_fn, regions=regions, values_known=known, loop=loop)
    mode = fake_mode(allow_non_fake_inputs=True)
    if model_device is None:
        model = fake_copy(model, mode, batch_device)
    else:
        batch = fake_batch(_plain(batch), mode, model_device)
    return trace_model(model, batch, loss_fn=loss_fn, regions=regions, mode=mode, loop=loop)


def check_states(model: nn.Module) -> None:
    """Whether its tensors have sizes, and are all on meta or none.

    Raises:
        UsageError: they have not.
    """
    for name, tensor in _states(model):
        if is_lazy(tensor):
            raise UsageError(
                f"{name} has no size before the model's first forward (a lazy module); run one batch through the model "
                "first: model(*batch)"
            )
    without = [name for name, tensor in _states(model) if tensor.is_meta]
    if without and len(without) < sum(1 for _ in _states(model)):
        raise UsageError(f"{without[0]} is on meta and other parameters are not; move the model to one device first")


def _plain(batch: Any) -> Any:
    """Mappings of other kinds (Hugging Face's BatchEncoding) as a dict."""
    return dict(batch) if hasattr(batch, "keys") else batch


def _states(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
