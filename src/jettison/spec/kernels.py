"""How the mathematics of a layer is carried out: which kernels are one piece, and therefore what they leave behind.

The same layer saves different tensors under different code. These choices are the difference between a Hugging Face
model, a Megatron one and plain PyTorch with fused operators, each a named set in `KERNELS`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from jettison.errors import UsageError


class AttentionKernel(StrEnum):
    """How scores become outputs."""

    EAGER = "eager"  # scores, probabilities and masks are tensors
    FLASH = "flash"  # one kernel that keeps query, key, value, output and a log-sum-exp a row (arXiv 2205.14135)


class Loss(StrEnum):
    """From logits to a number."""

    UPCAST = "upcast"  # fp32 copy of the logits, log-softmax, nll: torch.nn.functional.cross_entropy
    VOCAB_PARALLEL = "vocab-parallel"  # Megatron's: fp32 softmax over a shard of the vocabulary, and the target's mask
    FUSED = "fused"  # head and loss together: gradients are made in the forward, logits never kept
    CHUNKED = "chunked"  # the sequence passes the head and the loss in chunks, each computed again in backward


class Device(StrEnum):
    """Whose kernels: they differ in what fused ones save beside the mathematics."""

    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """A set of choices.

    Args:
        scores_float32: the softmax of eager attention runs on an fp32 copy and its result is cast back.
        fused_norm: a norm is one kernel that saves its input and its statistics.
        fused_rotary: rotation is one kernel that saves nothing but its tables.
        fused_gate: activation and product of a gated block are one kernel that saves both halves.
        byte_masks: a dropout mask takes one byte an element; otherwise it has the dtype of what it masks.
        repeat_kv: key-value heads are copied until there are as many as query heads.
        batch_first: activations are b × s × h; otherwise s × b × h.
    """

    name: str
    attention: AttentionKernel
    loss: Loss = Loss.UPCAST
    loss_chunks: int = 8
    scores_float32: bool = True
    fused_norm: bool = True
    fused_rotary: bool = False
    fused_gate: bool = False
    byte_masks: bool = True
    repeat_kv: bool = False
    batch_first: bool = True
    device: Device = Device.CUDA

    def with_attention(self, word: str | None) -> Kernels:
        """The same with another attention; None leaves it.

        Raises:
            UsageError: no such kernel.
        """
        if word is None:
            return self
        word = {"sdpa": "flash"}.get(word, word)
        if word not in set(AttentionKernel):
            raise UsageError(f"got the attention {word!r}; expected one of {', '.join(AttentionKernel)}")
        return replace(self, attention=AttentionKernel(word))

    def on_cpu(self) -> Kernels:
        """The same on PyTorch's CPU kernels."""
        return replace(self, device=Device.CPU, byte_masks=False)


MEGATRON: Final = Kernels(
    name="megatron", attention=AttentionKernel.FLASH, loss=Loss.VOCAB_PARALLEL, scores_float32=False,
    fused_rotary=True, fused_gate=True, batch_first=False,
)  # fmt: skip
"""Fused scale-mask-softmax (16-bit result), norms, rotation and SwiGLU; the form that arXiv 2205.05198 counts."""
PYTORCH: Final = Kernels(name="pytorch", attention=AttentionKernel.FLASH)
"""PyTorch's own fused operators where it has them, the rest written out, as torchtitan's models are."""
HUGGINGFACE: Final = Kernels(name="huggingface", attention=AttentionKernel.FLASH, fused_norm=False, repeat_kv=True)
"""The code of transformers: norms in fp32 op by op (LayerNorm is fused there too), rotation written out."""

KERNELS: Final = MappingProxyType({k.name: k for k in (MEGATRON, PYTORCH, HUGGINGFACE)})


def kernels(name: str) -> Kernels:
    """A set by name.

    Raises:
        UsageError: no such set.
    """
    if name not in KERNELS:
        raise UsageError(f"got the kernels {name!r}; expected one of {', '.join(KERNELS)}")
    return KERNELS[name]
