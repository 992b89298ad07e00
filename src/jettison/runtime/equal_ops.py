"""Faster ops for recomputation that give the same bits.

NOTE [ Rows of nothing ]
Attention by matmuls ends in ``_safe_softmax`` (aten/src/ATen/native/transformers/attention.cpp): a softmax, in which
rows that are minus infinity all over become zeros. torch finds these by looking at every score, and copies the result
to put zeros in: on a CPU more than half of what the op takes. A softmax of such a row is NaN in every place, so that
where its first column has no NaN there is no such row, and the softmax is the result. Where one has, the rows are
looked for and zeros are written in place. On an accelerator the question would have to wait for the device: there the
op runs as it is.

NOTE [ In its place ]
What an elementwise op reads last, and nobody saved, has the memory that its result needs. torch has kernels for most
of these that write where they are told, element by element as they read: the bits are those of a result apart, without
its memory, and a third of what goes through memory less (a result's lines are fetched before they are written).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from jettison.capture.recording import Call, TensorRef
from jettison.ledger.program import Buffer

aten = torch.ops.aten


def runs_as(call: Call) -> Callable[..., Any]:
    """Return the function that recomputes the outputs of a recorded call."""
    return safe_softmax if costs_like(call) is not None else call.func


def costs_like(call: Call) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """The op, and its arguments, that takes nearly all of that where it is another one; None where it is not."""
    if call.func is not aten._safe_softmax.default or len(call.args) != 2 or call.kwargs or call.device != "cpu":
        return None
    scores, dim = call.args
    if not scores.dtype.is_floating_point or any(
        ref is None or not _is_contiguous(ref) for ref in (scores, *call.outputs)
    ):
        return None
    return aten._softmax.default, (scores, dim, False)


def in_place(call: Call, buffers: Sequence[Buffer], spare: Mapping[int, Call]) -> tuple[int, Callable[..., Any]] | None:
    """Find the argument that a call's result may overwrite, and the function that does so. ``spare`` has the recomputed
    buffers that only this call reads, each with the call that made it.
    """
    out = call.outputs[0] if len(call.outputs) == 1 else None
    if out is None or call.written or call.state_in is not None:
        return None
    for position, leaf in enumerate(call.args):
        maker = spare.get(leaf.buffer) if isinstance(leaf, TensorRef) else None
        if maker is None or getattr(maker.func, "namespace", "") != "aten":  # others may give what they keep
            continue
        if any(isinstance(a, TensorRef) and a.buffer == leaf.buffer and a != leaf for a in call.args):
            continue  # another view of it is read as well
        is_like = replace(leaf, buffer=out.buffer) == out
        whole = prod(out.size) * out.dtype.itemsize
        if is_like and whole == buffers[leaf.buffer].nbytes == buffers[out.buffer].nbytes:
            func = _writes_to(call.func, call.device)
            return None if func is None else (position, func)
    return None


@functools.cache
def _writes_to(func: Any, device: str) -> Callable[..., Any] | None:
    """The overload of an elementwise op that takes its result's memory, where it has a kernel of its own."""
    if not isinstance(func, torch._ops.OpOverload) or torch.Tag.pointwise not in func.tags:
        return None
    wanted = [*((a.name, str(a.type)) for a in func._schema.arguments), ("out", "Tensor")]
    packet, key = func.overloadpacket, "CUDA" if device == "cuda" else "CPU"
    for name in packet.overloads():
        other: Any = getattr(packet, name)
        given = other._schema.arguments
        if given and given[-1].is_out and [(a.name, str(a.type)) for a in given] == wanted:
            is_own = torch._C._dispatch_has_kernel_for_dispatch_key(other.name(), key)
            return other if is_own else None
    return None


def _is_contiguous(ref: TensorRef) -> bool:
    expected = 1
    for n, step in zip(reversed(ref.size), reversed(ref.stride), strict=True):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True


def safe_softmax(scores: Tensor, dim: int) -> Tensor:
    """``_safe_softmax`` of floating-point numbers on a CPU; see NOTE [ Rows of nothing ]."""
    found: Tensor = aten._softmax(scores, dim, False)
    may_have = found.select(dim, 0).isnan().any() if found.shape[dim] else None
    # a dry run cannot know, and counts what may be needed
    if may_have is not None and (isinstance(may_have, FakeTensor) or may_have):
        found.masked_fill_(scores.amax(dim, keepdim=True).eq(-torch.inf), 0.0)
    return found
