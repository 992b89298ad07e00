"""Which described runs can be asked about compiled layers."""

from __future__ import annotations

from typing import Final

from jettison.core.errors import UsageError
from jettison.spec.kernels import Kernels
from jettison.spec.model import ModelSpec

MODES: Final = ("none", "full", "every", "block", "interval", "selective-op", "selective-op-alternate")
"""Recompute modes that say nothing about single tensors of a layer, or that torch's partitioner is told of."""


def check_compiled(model: ModelSpec, kernels: Kernels, *, mode: str, tuned: bool) -> None:
    """Is it known what a compiled layer keeps? See NOTE [ What torch's partitioner keeps ] in `solve.compiled`.

    Raises:
        UsageError: no.
    """
    why = ""
    if kernels.name == "megatron":
        why = "with --kernels megatron, whose layers nobody compiles; give --kernels pytorch, huggingface or torchtune"
    elif kernels.name == "liger":
        why = "with --kernels liger, whose own kernels the compiler leaves as they are; give --kernels huggingface"
    elif model.recorder is not None:
        why = f"and {model.name}, whose blocks are recorded as they are built"
    elif any(layer.scan is not None for layer in model.described):
        why = f"and {model.name}, of whose scans no compiled form was looked at"
    elif any(layer.experts for layer in model.kinds):
        why = f"and {model.name}, whose experts' layers are more than one graph"
    elif tuned:
        why = "with --lora; no compiled adapters were looked at"
    elif mode not in MODES:
        modes = ", ".join(MODES)
        why = f"with --recompute {mode}, which decides within a layer as the compiler does; give one of {modes}"
    if why:
        raise UsageError(f"got --compile {why}")
