"""Blocks that run compiled: which ones, how, and what Inductor has of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from jettison.capture.model_trace import CompileSettings, ModelTrace, settings_of
from jettison.capture.tensor_subclasses import plain
from jettison.core.errors import TraceError, UnsupportedModule, UsageError
from jettison.dryrun.compiled import survey
from jettison.runtime.compiled import check_compiler

BLOCKS = "blocks"


def compile_settings(compile: str | None, models: Sequence[nn.Module]) -> CompileSettings | None:
    """How the blocks of these models are compiled; None where they are not.

    Args:
        compile: ``blocks``, or nothing; then they are if somebody has called ``block.compile()``.

    Raises:
        UnsupportedModule: a compiler that no plan can take part in; blocks that were compiled in different ways.
        UsageError: another word.
    """
    if compile not in (None, BLOCKS):
        raise UsageError(f'got compile={compile!r}; expected "blocks", or leave it out')
    named = [(name, module) for model in models for name, module in compiled_modules(model).items()]
    told = {name: settings_of(name, module) for name, module in named}
    if len({repr(settings) for settings in told.values()}) > 1:
        first, other = next((a, b) for a in told for b in told if repr(told[a]) != repr(told[b]))
        raise UnsupportedModule(
            f"{first} and {other} are compiled with different options; compile all blocks in one way"
        )
    if not told:
        return CompileSettings() if compile == BLOCKS else None
    return next(iter(told.values()))


def compiled_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules inside of which somebody has called ``.compile()``, by name."""
    return {name: module for name, module in model.named_modules() if module._compiled_call_impl is not None}


def survey_blocks(trace: ModelTrace, model: nn.Module) -> ModelTrace:
    """Ask Inductor what it has of every class of blocks, where they are to run compiled. Takes seconds.

    A block that torch cannot make one graph of is planned op by op, with a warning.

    Args:
        model: what was traced, with its values.

    Raises:
        UnsupportedModule: a module is compiled that is no block; there is no compiler; there are no blocks.
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
            if cls.compiled is None:
                _survey(each, cls.key, settings)
    return trace


def _survey(trace: ModelTrace, key: str, settings: CompileSettings) -> None:
    cls = trace.classes[key]
    problem = cls.problem
    if not problem:
        try:
            cls.compiled = survey(trace, cls, settings)
            return
        except TraceError as error:
            problem = str(error)
    trace.warnings.append(f"blocks like {cls.example} do not run compiled: {problem}")


def refuse_compiled_whole(name: str, module: nn.Module) -> None:
    """A plan takes part in what blocks compile to, not in one graph of everything.

    Raises:
        UnsupportedModule: the module was made by ``torch.compile(module)``, or is a model that was compiled whole.
    """
    made = isinstance(module, torch._dynamo.OptimizedModule)
    if made or (name == "the model" and module._compiled_call_impl is not None):
        raise UnsupportedModule(
            f"{name} is compiled as a whole; a plan can take part where blocks are compiled one by one. Pass the model "
            'as it was before torch.compile, with compile="blocks", or call block.compile() on each block'
        )
