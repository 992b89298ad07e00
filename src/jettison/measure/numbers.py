"""Tensors that numbers become beside tensors, as in ``x * 0.5``: 8 bytes on the CPU, that no operator makes and no
saved-tensor hook is asked about. A factor stays until its node of autograd has run; where a graph goes without a
backward, nobody says so, and its factors stay counted.
"""

from __future__ import annotations

from typing import Any

import torch

NO_NODE = -2
_KEPT = (torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor)  # for the gradient of the other factor


def current_node() -> int:
    """A number for the autograd node being evaluated; `NO_NODE` outside of backward."""
    if torch._C._current_graph_task_id() == -1:
        return NO_NODE
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


class KeptNumbers:
    """Those that nodes keep, by the number of their node; told of every op in turn."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self._node = NO_NODE

    def freed_by(self, node: int) -> int:
        """Bytes that are let go of, now that an op of another node runs."""
        if node == self._node:
            return 0
        last, self._node = self._node, node
        return self._bytes.pop(last, 0)

    def kept_by(self, func: Any, args: tuple[Any, ...], nbytes: int) -> int:
        """Of the bytes of an op's number, those that stay with the node which was just made for it."""
        if not nbytes or func not in _KEPT or not torch.is_grad_enabled() or not args[0].requires_grad:
            return 0
        self._bytes[torch._C._autograd._get_sequence_nr() - 1] = nbytes
        return nbytes


def number_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes of the tensor that an op's second operand becomes; 0 where it is a tensor, or stays a number."""
    if len(args) < 2 or not isinstance(args[1], int | float | complex):
        return 0
    if not isinstance(func._schema.arguments[1].type, torch.TensorType):
        return 0
    return 1 if isinstance(args[1], bool) else 16 if isinstance(args[1], complex) else 8
