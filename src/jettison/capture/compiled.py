"""What `torch.compile` was told about a module, and what it has made of a block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from jettison.errors import UnsupportedModule
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
