"""What attention is told of who sees whom: is a mask a tensor, and where do packed documents begin?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from jettison.formula.tape import Value
from jettison.formula.writer import Writer
from jettison.spec.kernels import PYTORCH, PYTORCH_2_8, Documents
from jettison.spec.model import Attention

MASK: Final = "attention mask"
"""What layers are given of who sees whom."""


def has_mask_tensor(w: Writer, spec: Attention) -> bool:
    """Does a fused kernel need to be given a mask? A window as long as the sequence already does."""
    windowed = spec.window is not None and spec.window <= w.run.seq
    both_ways = w.kernels.bidirectional_masks and not spec.causal
    if w.run.packed:
        return w.kernels.documents is Documents.MASK
    return w.kernels.tensor_masks and (windowed or both_ways or w.run.padding or w.kernels.made_masks)


def document_bounds(w: Writer) -> Iterator[Value]:
    """Where documents begin, and the kernel's random state, as `torch.nn.attention.varlen` keeps both.

    transformers makes bounds in each layer (``prepare_fa_kwargs_from_position_ids``), others once for all of them.
    """
    if not w.run.packed or w.kernels.documents is not Documents.VARLEN:
        return
    shape = (w.run.micro_batch * -(-w.run.seq // w.run.packed) + 1,)
    if w.kernels.of_transformers:
        ids = w.table("position ids", w.shape(), "int64")
        yield w.tape.op("aten.nonzero.default", [ids], shape, "int32", ())
        return
    yield w.table("document bounds", shape, "int32")
    if w.kernels.name in (PYTORCH.name, PYTORCH_2_8.name):
        yield w.tape.source("random state of the kernel", (2,), "int64")
