"""Settings of `torch.compile` on a module, the code it made of a block, and runs without that code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from jettison.core.errors import UnsupportedModule
from jettison.ledger.program import Program


@dataclass(frozen=True, kw_only=True)
class CompileSettings:
    """How blocks are compiled: Inductor's options, sorted by name."""

    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """A block's forward as Inductor has it, before it decides what to save.

    Args:
        default: buffers that Inductor saves where it is told nothing.
    """

    program: Program
    default: frozenset[int] = field(default_factory=frozenset)
    settings: CompileSettings


def settings_of(name: str, module: nn.Module) -> CompileSettings:
    """What ``module.compile(...)`` was told.

    Raises:
        UnsupportedModule: it was compiled in a way that no plan can take part in.
    """
    from torch._inductor import config  # loaded where something is compiled

    config_of = getattr(module._compiled_call_impl, "get_compiler_config", None)
    patched = config_of() if config_of is not None else None  # all of Inductor's settings, with what was told
    if not isinstance(patched, dict):
        raise UnsupportedModule(
            f"{name} is compiled by another backend than Inductor, which alone asks somebody else what to save for "
            "backward; call block.compile() without backend=, or leave the blocks uncompiled"
        )
    usual = config.get_config_copy()
    told = {key: value for key, value in patched.items() if key not in usual or usual[key] != value}
    if patched.get("triton.cudagraphs"):
        raise UnsupportedModule(
            f"{name} is compiled with CUDA graphs, whose memory lies in pools of their own that no plan can count; "
            'use mode="max-autotune-no-cudagraphs", or no mode'
        )
    if patched.get("custom_partitioner_fn") is not None:
        raise UnsupportedModule(
            f"{name} is compiled with a custom_partitioner_fn of its own, which decides what a plan has to decide; "
            "leave it out"
        )
    return CompileSettings(options=tuple(sorted(told.items())))


CALLS_COMPILED = "it calls a function that torch.compile has made, whose ops are others than those of its Python"


@contextlib.contextmanager
def eagerly(called: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Functions that `torch.compile` has made run op by op. Where anything watches the ops, torch runs them so by
    itself: it never compiles them again then, and with ``fullgraph=True`` it fails.

    Args:
        called: is told when one is called.
    """
    if "torch._dynamo" not in sys.modules:  # which takes a second to import
        yield
        return
    from torch._dynamo import eval_frame

    own = eval_frame._callback_from_stance

    def noting(callback: Any) -> Any:
        if callback is not None and callback is not False:
            called()
        return own(callback)

    with torch.compiler.set_stance("force_eager"):
        eval_frame._callback_from_stance = noting
        try:
            yield
        finally:
            eval_frame._callback_from_stance = own
