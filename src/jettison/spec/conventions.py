"""Where the code of transformers differs from family to family, beyond what a configuration says."""

from __future__ import annotations

from jettison.spec.kernels import Kernels, kernels
from jettison.spec.model import ModelSpec


def kernels_for(model: ModelSpec, name: str) -> Kernels:
    """The named set, as the code of this model's family has it.

    Raises:
        UsageError: no such set.
    """
    return kernels(name)
