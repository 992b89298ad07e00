"""Numbers that a forward reads out of tensors: whether it would read the recorded ones out of these arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from jettison.capture.recording import Call, Read, RegionTrace, TensorRef
from jettison.capture.rejected_blocks import VALUES_WANTED
from jettison.capture.tensor_subclasses import plain
from jettison.runtime.views import view_of, whole_copy, within


def reads_hold(trace: RegionTrace, leaves: list[Any]) -> bool:
    """Whether the forward would find in these arguments what the recording found in its own.

    False also where that cannot be known before it runs.
    """
    if not trace.reads:
        return True
    if any(read.calls is None for read in trace.reads):
        return False
    values = trace.made | {b: plain(leaves[position]) for b, position in trace.inputs.items()}
    done: set[int] = set()
    with torch.no_grad():
        try:
            for read in trace.reads:
                for index in read.calls or ():
                    if index not in done:
                        done.add(index)
                        _run(trace, trace.calls[index], values)
                if not _found_again(trace, read, values):
                    return False
        except VALUES_WANTED:  # a dry run has none
            return False
    return True


def _run(trace: RegionTrace, call: Call, values: dict[int, Tensor]) -> None:
    def value(leaf: Any) -> Any:
        return view_of(values[leaf.buffer], within(trace, leaf)) if isinstance(leaf, TensorRef) else leaf

    before = {old: values[old] for old, _new in call.written}
    for old in before:
        values[old] = whole_copy(values[old])
    args, kwargs = tree_map(value, (call.args, call.kwargs))
    out = tree_leaves(call.func(*args, **kwargs))
    for ref, tensor in zip(call.outputs, out, strict=False):
        if ref is not None:
            values[ref.buffer] = tensor
    for old, new in call.written:
        values[new] = values[old]
        values[old] = before[old]


def _found_again(trace: RegionTrace, read: Read, values: dict[int, Tensor]) -> bool:
    tensor = values[read.ref.buffer]
    if read.shape_only:
        return tuple(tensor.shape) == tuple(read.found)
    return torch.equal(view_of(tensor, within(trace, read.ref)), read.found)
