"""Checks before planning, with one-line errors for anything that cannot be planned; tracing on fake tensors."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from jettison.capture.dispatch import refuse_scripted
from jettison.capture.fake_copies import fake_batch, fake_copy, fake_mode
from jettison.capture.model_trace import CompileSettings, Loop, LossFn, ModelTrace, expect_module, settings_of
from jettison.capture.tensor_subclasses import plain
from jettison.capture.tracer import trace_model
from jettison.core.errors import TraceError, UnsupportedModule, UsageError
from jettison.dryrun.compiled_blocks import survey
from jettison.runtime.callers import FOREIGN_HOOKS, are_hooks_foreign
from jettison.runtime.compiled_regions import check_compiler
from jettison.runtime.install import refuse_checkpointing
from jettison.runtime.planned_forward import PlannedForward
from jettison.spec.frameworks import named

BLOCKS: Final = "blocks"
Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
"""Types of the argument ``optimizer=``."""
_LOCAL_PARTS: Final = "torch.distributed.tensor.parallel.ddp"
"""Module whose hooks make DTensors of plain parameters at the start of the outermost forward."""


def check_model(model: nn.Module) -> None:
    """Check that there is a Python forward to plan. Raise `UnsupportedModule` if it is planned, compiled, scripted, or
    uses checkpointing; `UsageError` if it is no module, or would be planned under other saved-tensor hooks.
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
    made = isinstance(module, torch._dynamo.OptimizedModule)
    if made or (name == "the model" and module._compiled_call_impl is not None):
        raise UnsupportedModule(
            f"{name} is compiled as a whole; a plan can take part where blocks are compiled one by one. Pass the model "
            'as it was before torch.compile, with compile="blocks", or call block.compile() on each block'
        )
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


def check_states(model: nn.Module) -> None:
    """Raise `UsageError` unless its tensors have sizes, and are all on meta or none."""
    states = list(_states(model))
    for name, tensor in states:
        if is_lazy(tensor):
            raise UsageError(
                f"{name} has no size before the model's first forward (a lazy module); run one batch through the model "
                "first: model(*batch)"
            )
    without = [name for name, tensor in states if tensor.is_meta]
    if without and len(without) < len(states):
        raise UsageError(f"{without[0]} is on meta and other parameters are not; move the model to one device first")


def _states(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


# traces ---------------------------------------------------------------------------------------------------------------


def traced(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    regions: Iterable[str] | None = None,
    loop: Loop | None = None,
    mode: FakeTensorMode | None = None,
) -> ModelTrace:
    """Record one training forward. Raise `TraceError` if it cannot run on tensors without values, or there is no scalar
    loss, `UsageError` for weights without a size (a lazy module), or only some of them on ``meta``.

    A model on ``meta`` is recorded as if its weights were on the batch's device; a batch on ``meta``, as if it were on
    the weights' device. Neither is allocated.
    """
    expect_module(model)
    check_states(model)
    real, known = model, True
    if regions is None and loop is not None and loop.compile is not None:
        regions = list(compiled_modules(model)) or None
    states = [tensor for _, tensor in _states(model)]
    plain_batch = dict(batch) if hasattr(batch, "keys") else batch  # other mappings, as transformers' BatchEncoding
    given = [leaf for leaf in tree_leaves(plain_batch) if isinstance(leaf, Tensor)]
    model_device = next((t.device for t in states if not t.is_meta), None)
    batch_device = next((t.device for t in given if not t.is_meta), None)
    if (model_device is None) == (batch_device is None) or not states or not given:
        known = batch_device is not None or not given
    else:
        mode = mode or fake_mode(allow_non_fake_inputs=True)
        if model_device is None:
            model = fake_copy(model, mode, batch_device)
        else:
            batch = fake_batch(plain_batch, mode, model_device)
    found = trace_model(model, batch, loss_fn=loss_fn, regions=regions, mode=mode, values_known=known, loop=loop)
    return survey_blocks(found, real)


# blocks that run compiled ---------------------------------------------------------------------------------------------


def compile_settings(compile: str | None, models: Sequence[nn.Module]) -> CompileSettings | None:
    """Compile settings of the models' blocks; None if they are not compiled. ``compile``: ``blocks``, or None: compiled
    if ``block.compile()`` was called. Raise `UnsupportedModule` for blocks compiled with different options,
    `UsageError` for another value.
    """
    if compile not in (None, BLOCKS):
        raise UsageError(f'got compile={compile!r}; expected "blocks", or leave it out')
    named = [(name, module) for model in models for name, module in compiled_modules(model).items()]
    told = {name: settings_of(name, module) for name, module in named}
    if len({repr(settings) for settings in told.values()}) > 1:
        first, other = next((a, b) for a in told for b in told if repr(told[a]) != repr(told[b]))
        raise UnsupportedModule(
            f"{first} and {other} are compiled with different options; compile all blocks with the same options"
        )
    if not told:
        return CompileSettings() if compile == BLOCKS else None
    return next(iter(told.values()))


def compiled_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules on which ``.compile()`` was called, or with such a submodule, by name."""
    return {name: module for name, module in model.named_modules() if module._compiled_call_impl is not None}


def survey_blocks(trace: ModelTrace, model: nn.Module) -> ModelTrace:
    """Compile every class of blocks with Inductor, if they are to run compiled. Takes seconds. Raise
    `UnsupportedModule` if a compiled module is no block, or there are no blocks or no compiler.

    A block with graph breaks is planned op by op, with a warning.

    Args:
        model: the traced model, with values.
    """
    settings = trace.loop.compile
    if settings is None:
        return trace
    names = {call.name for call in trace.calls}
    inside = [name for name in compiled_modules(model) if name not in names]
    if inside:
        raise UnsupportedModule(
            f"{inside[0]} is compiled and is no block of the plan; the blocks are {', '.join(sorted(names)[:4])}. "
            "Compile whole blocks, or name what is compiled with regions=[...]"
        )
    if not names:
        raise UnsupportedModule(
            f"{type(model).__name__} has no repeated blocks to compile; name them with regions=[...], or plan without "
            "compile="
        )
    if any(plain(p) is not p for p in trace.fake_model.parameters()):
        raise UnsupportedModule(
            "parameters are DTensors inside of the blocks (tensor parallelism), and what a compiled block takes is "
            "measured on one rank alone; plan without compiling, or use FSDP2 or DistributedDataParallel alone"
        )
    check_compiler(trace.device_type or "cpu")
    for each in (trace, *trace.more):
        for cls in each.classes.values():
            if cls.compiled is not None:
                continue
            problem = cls.problem
            if not problem:
                try:
                    cls.compiled = survey(each, cls, settings)
                    continue
                except TraceError as error:
                    problem = str(error)
            each.warnings.append(f"blocks like {cls.example} do not run compiled: {problem}")
    return trace


# optimizers -----------------------------------------------------------------------------------------------------------


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers that step in order (two networks', or one a kind of parameter). Stateless."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> Any:
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> Any:
        return {parameter: state for one in self.optimizers for parameter, state in one.state.items()}

    def step(self, closure: Any = None) -> None:
        for one in self.optimizers:
            one.step()  # Muon's takes nothing

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def __getstate__(self) -> Any:
        return self.optimizers

    def __setstate__(self, optimizers: Any) -> None:
        self.optimizers = optimizers


def as_one(optimizer: Optimizers) -> torch.optim.Optimizer | None:
    """Return the argument ``optimizer=`` as one optimizer. Raise `UsageError` for an element that is no optimizer."""
    if not isinstance(optimizer, list | tuple):
        return _own(optimizer)  # other objects are refused later, with a clear error
    for one in optimizer:
        if not isinstance(one, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer= has {one!r} among several; expected optimizers, as in optimizer=(first, second)"
            )
    if len(optimizer) < 2:
        return _own(optimizer[0]) if optimizer else None
    return JointOptimizer([_own(one) for one in optimizer])


_WRAP: Final = frozenset(name for name, package in named("packages").items() if package.get("wraps_optimizers"))
"""Libraries whose ``prepare``, ``setup`` or ``optimizers()`` return a wrapper without state. Its step may wait for the
last of several micro-batches (accelerate/optimizer.py), and some cannot be copied (Lightning's ``__getattr__``,
lightning/pytorch/core/optimizer.py).
"""


def _own(optimizer: Any) -> Any:
    """The optimizer inside such a wrapper."""
    wraps = any(cls.__module__.partition(".")[0] in _WRAP for cls in type(optimizer).__mro__)
    inner = getattr(optimizer, "optimizer", None) if wraps else None
    return _own(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def inside_of(optimizer: Any) -> list[Any]:
    """Optimizers inside wrappers (Accelerate's, torchtitan's, ours), or the optimizer itself."""
    several = getattr(optimizer, "optimizers", None)
    return list(several) if several else [getattr(optimizer, "optimizer", optimizer)]


def check_optimizer(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> None:
    """Raise `UsageError` if its step cannot be dry-run: it is no optimizer, has no parameter of this model, runs the
    forward inside its step, or is distributed over ranks.
    """
    if isinstance(optimizer, JointOptimizer):
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
            "ZeroRedundancyOptimizer keeps other parameters' state on every rank and broadcasts them inside its step, "
            "which no dry run can follow; drop optimizer= and lower the budget by the bytes of its state, or shard "
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
            "no dry run can follow; drop optimizer= and lower the budget by the bytes of its state"
        )
