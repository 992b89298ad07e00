"""Pytrees of arguments and results, in which dataclasses with tensors are nodes, too.

torch's pytree treats a dataclass as one leaf, unless its author has registered it. A block that returns one would then
have no tensors. Classes of others are not registered here, as that would change other code. A `torch.Size` is a leaf
here: torch registers it once some of its parts are imported, and restores a tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

tree_unflatten = pytree.tree_unflatten

_ATOMS = frozenset((Tensor, nn.Parameter, bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size))
_OTHER = object()


@dataclass(frozen=True, slots=True)
class _DataclassFields:
    """A dataclass by its attributes."""

    kind: type
    values: dict[str, Any]


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    leaves, spec = pytree.tree_flatten(tree, _is_size)
    if not any(map(_is_dataclass, leaves)):
        return leaves, spec
    return pytree.tree_flatten(_expanded(tree, ()), _is_size)


def tree_shape(tree: Any) -> tuple[list[Any], Any]:
    """Return leaves, and a hashable value that is equal for trees of one structure; it runs in every planned call.
    Tuples, lists and dicts of tensors and plain values, as in most calls, are walked here; others use `tree_flatten`,
    whose spec is the value then.
    """
    leaves: list[Any] = []
    shape = _shape(tree, leaves)
    return tree_flatten(tree) if shape is _OTHER else (leaves, shape)


def _shape(node: Any, leaves: list[Any]) -> Any:
    kind = node.__class__
    if kind is dict:
        found: list[Any] = [kind, *node]
        inside = node.values()
    elif kind is tuple or kind is list:
        found = [kind]
        inside = node
    else:
        return _OTHER
    for child in inside:
        if child.__class__ in _ATOMS or isinstance(child, Tensor):  # the common types
            leaves.append(child)
            found.append(None)
            continue
        shape = _shape(child, leaves)
        if shape is _OTHER:
            return _OTHER
        found.append(shape)
    return tuple(found)


def tree_leaves(tree: Any) -> list[Any]:
    if tree.__class__ in _ATOMS:
        return [tree]
    leaves = pytree.tree_leaves(tree, _is_size)
    return pytree.tree_leaves(_expanded(tree, ()), _is_size) if any(map(_is_dataclass, leaves)) else leaves


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    """Map each leaf of the tree; dataclasses stay closed."""
    return pytree.tree_map(change, tree, is_leaf=_is_size)


def op_leaves(*values: Any) -> list[Any]:
    """Leaves of an operator's arguments or results, which come only in lists, tuples and dicts."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple):
            found.extend(op_leaves(*value))
        elif isinstance(value, dict):
            found.extend(op_leaves(*value.values()))
        else:
            found.append(value)
    return found


def op_map(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([op_map(change, inside) for inside in value])
    if isinstance(value, dict):
        return {key: op_map(change, inside) for key, inside in value.items()}
    return change(value)


def _is_size(node: Any) -> bool:
    return isinstance(node, torch.Size)


def _is_dataclass(leaf: Any) -> bool:
    return hasattr(leaf, "__dataclass_fields__") and not isinstance(leaf, type | Tensor | nn.Module)


def _expanded(tree: Any, above: tuple[int, ...]) -> Any:
    """The tree with dataclasses opened, except those ``above`` (ids), to one of which it may refer."""
    leaves, spec = pytree.tree_flatten(tree, _is_size)
    return pytree.tree_unflatten([_expand(leaf, above) if _is_dataclass(leaf) else leaf for leaf in leaves], spec)


def _expand(leaf: Any, above: tuple[int, ...]) -> Any:
    if id(leaf) in above:
        return leaf
    names = dict.fromkeys((*(f.name for f in fields(leaf)), *getattr(leaf, "__dict__", {})))
    above = (*above, id(leaf))
    values = {name: _expanded(getattr(leaf, name), above) for name in names if hasattr(leaf, name)}
    if not any(isinstance(inside, Tensor) for inside in pytree.tree_leaves(values, _is_size)):
        return leaf  # a configuration
    return _DataclassFields(type(leaf), values)


def _unflatten(values: Iterable[Any], context: Any) -> Any:
    kind, names = context
    made = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(
    _DataclassFields,
    lambda opened: (list(opened.values.values()), (opened.kind, tuple(opened.values))),
    _unflatten,
    serialized_type_name="jettison.capture.pytrees._DataclassFields",
)
