"""Named sets of kernels, as frameworks' files have them."""

from __future__ import annotations

from jettison.spec.kernels import kernel_names, kernels

KERNELS = {name: kernels(name) for name in kernel_names()}
MEGATRON, PYTORCH, HUGGINGFACE = KERNELS["megatron"], KERNELS["pytorch"], KERNELS["huggingface"]
