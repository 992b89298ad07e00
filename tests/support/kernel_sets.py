"""Named sets of kernels, as frameworks' files have them."""

from __future__ import annotations

from jettison.spec.frameworks import named
from jettison.spec.kernels import kernels

KERNELS = {name: kernels(name) for name in named("kernels")}
MEGATRON, PYTORCH, HUGGINGFACE = KERNELS["megatron"], KERNELS["pytorch"], KERNELS["huggingface"]
