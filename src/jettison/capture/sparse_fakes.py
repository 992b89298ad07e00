"""Sparse gradients (`torch.nn.Embedding(sparse=True)`) on fake tensors: their parts, and memory of ops on them.

Torch's fake kernels make sparse results without entries. Here they have as many as the real kernels allocate room for.
The number of table rows in a batch depends on its values: coalesced gradients count with their maximum, the number of
entries or of the table's rows, whichever is smaller. Sources: aten/src/ATen/native/sparse/SparseTensor.cpp
(``_coalesce_sparse_cpu``, ``sparse_mask``), SparseTensorMath.cpp (``add_out_sparse_cpu``).
"""

from __future__ import annotations

import weakref
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

from jettison.capture.trees import op_leaves, op_map
from jettison.core.errors import TraceError

aten = torch.ops.aten
_ADDS: Final = (aten.add.Tensor, aten.add_.Tensor)
_CLONES: Final = (aten.clone.default, aten.detach.default)
_ROW_BY_ROW: Final = frozenset({"mul", "div", "neg", "pow", "sqrt", "abs", "sign", "zeros_like"})
"""Elementwise with a number: the number of entries stays."""
_LOOKS: Final = frozenset(
    {"_indices", "_values", "_nnz", "_dimI", "_dimV", "is_coalesced", "_coalesced_", "dense_dim", "sparse_dim"}
)
"""Views of parts, and queries."""
_FROM_PARTS: Final = "aten::_sparse_coo_tensor"
SCALAR_BYTES: Final = 4


def is_sparse(value: Any) -> bool:
    """Whether a value is a sparse tensor of coordinates."""
    return isinstance(value, Tensor) and value.layout is torch.sparse_coo


def sparse_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Result of an op on fake sparse tensors; None where torch's own fake kernel is right.

    Raises:
        TraceError: the result is unknown.
    """
    name = func._schema.name.removeprefix("aten::")
    given: Tensor = args[0]
    if name in _LOOKS or func.namespace != "aten":
        return None
    if func in _ADDS and is_sparse(given) and is_sparse(args[1]):
        return _sum(func, given, args[1])
    if func in _ADDS and not is_sparse(given):
        return None  # into a dense table, or into another sparse one
    if func is aten._coalesce.default:
        return _coalesced(given)
    if func is aten.sparse_mask.default and is_sparse(args[1]):
        mask: Tensor = args[1]
        values = given.new_empty((mask._nnz(), *mask._values().shape[1:]))
        return _of(mask._indices().new_empty(mask._indices().shape), values, mask.shape, coalesced=mask.is_coalesced())
    if func is aten.clone.default and torch._C._current_autograd_node() is not None and given._values().is_contiguous():
        # without a mode the engine takes such a gradient over (torch/csrc/autograd/functions/accumulate_grad.h)
        return _of(given._indices(), given._values(), given.shape, coalesced=given.is_coalesced())
    if func in _CLONES or (name.removesuffix("_") in _ROW_BY_ROW and sum(map(is_sparse, op_leaves(args, kwargs))) == 1):
        if func._schema.is_mutable:
            return given
        indices, values = torch.empty_like(given._indices()), given._values().new_empty(given._values().shape)
        return _of(indices, values, given.shape, coalesced=given.is_coalesced())
    if any(isinstance(one.type, torch.TensorType) for one in func._schema.returns):
        raise TraceError(
            f"{func} is called with a sparse tensor (the gradient of an Embedding(sparse=True), say), and how much "
            "memory it takes is not known; leave optimizer= and step= out and lower the budget by what it needs, or "
            "train with sparse=False"
        )
    return None


def with_fake_parts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments for a sparse tensor of a fake table, whose indices are real."""
    values = next((leaf for leaf in op_leaves(args, kwargs) if isinstance(leaf, FakeTensor)), None)
    if values is None:
        return args, kwargs
    faked: tuple[tuple[Any, ...], dict[str, Any]] = op_map(
        lambda leaf: _fake_indices(leaf, values) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
    )
    return faked


def _fake_indices(real: Tensor, beside: Tensor) -> Tensor:
    """Indices of a real batch, or made of them, kept alive by a tensor that does not count again."""
    if isinstance(real, FakeTensor):
        return real
    made = beside.new_empty((1,) * real.dim(), dtype=real.dtype)
    weakref.finalize(made.untyped_storage(), lambda _: None, real)
    return made.expand(real.shape)


def sparse_workspace(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that a kernel allocates inside of a call with sparse tensors, in addition to its results."""
    if func in _ADDS and all(map(is_sparse, args[:2])) and func._schema.is_mutable:
        return _bytes(args[0])  # its old parts, which are freed as the new ones are allocated
    if func is aten._coalesce.default:
        given: Tensor = args[0]
        flat = 0 if given.sparse_dim() == 1 else 1
        return (3 + flat) * given._nnz() * given._indices().element_size()  # sorted positions, and the permutation
    if func is aten.sparse_mask.default:
        values: Tensor = args[1]._values()
        return values.numel() * args[0].element_size() + SCALAR_BYTES  # gathered rows, and a one
    return 0


def with_places(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of the backward of bags with sparse gradients. The real op computes the bag of each index; the fake one
    finds no index in any.
    """
    if not has_places(func) or not args[9]:
        return args
    gradient, indices, offsets, places = args[:4]
    if not places.numel():
        places = gradient.new_empty(indices.shape, dtype=indices.dtype)
    return (gradient, _fake_indices(indices, gradient), offsets, places, *args[4:])


def has_places(func: Any) -> bool:
    """Whether an op is one whose arguments `with_places` changes."""
    return func is aten._embedding_bag_backward.default


def makes_sparse(func: Any) -> bool:
    """Whether an op assembles parts, and allocates no memory."""
    return bool(func._schema.name.startswith(_FROM_PARTS))


def _bytes(tensor: Tensor) -> int:
    return sum(part.untyped_storage().nbytes() for part in (tensor._indices(), tensor._values()))


def _of(indices: Tensor, values: Tensor, size: Any, *, coalesced: bool) -> Tensor:
    made: Tensor = aten._sparse_coo_tensor_unsafe(indices, values, size, is_coalesced=coalesced)
    return made


def _sum(func: Any, one: Tensor, other: Tensor) -> Tensor:
    """All entries of both, one after the other."""
    entries = one._nnz() + other._nnz()
    indices, values = one._indices(), one._values()
    made = _of(
        indices.new_empty((indices.shape[0], entries)),
        values.new_empty((entries, *values.shape[1:])),
        one.shape,
        coalesced=False,
    )
    if not func._schema.is_mutable:
        return made
    assert isinstance(one, FakeTensor)
    with in_kernel_invocation_manager(one.fake_mode):  # on meta tensors, for which its parts are right
        aten.copy_sparse_to_sparse_(one, made)
    return one


def _coalesced(given: Tensor) -> Tensor:
    """Room for all entries, of which the distinct ones are used."""
    indices, values = given._indices(), given._values()
    rows = min(given._nnz(), prod(given.shape[: given.sparse_dim()]))
    return _of(
        indices.new_empty(indices.shape).narrow(1, 0, rows),
        values.new_empty(values.shape).narrow(0, 0, rows),
        given.shape,
        coalesced=True,
    )
