"""Traits of ATen ops for a recorder: writes, random draws, whether recomputation is allowed, cost."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils.flop_counter import flop_registry

from jettison.capture.pytrees import op_leaves
from jettison.capture.randomness import MOVES_BY_NUMBER, is_private, op_name
from jettison.capture.tensor_subclasses import plain
from jettison.ledger.program import Anchor

aten = torch.ops.aten

# Ops whose second run may give other results (ties, thread order): they are kept.
DISCRETE = {
    *("topk", "argmax", "argmin", "sort", "argsort", "msort", "kthvalue", "nonzero", "median", "nanmedian"),
    *("mode", "unique", "unique_consecutive", "_unique2", "unique_dim", "histc", "bincount"),
}

# The list of `torch.use_deterministic_algorithms` for CUDA, restricted to ops of a forward that are not `DISCRETE`.
_ADDS_IN_ANY_ORDER = {
    *("index_add", "scatter_add", "scatter_reduce", "_scatter_reduce", "index_reduce", "cumsum", "put", "histc"),
    *("bincount", "nll_loss2d_forward"),
}
_WRITES_IN_ANY_ORDER = {"index_copy", "scatter", "put", "index_put", "_index_put_impl"}


def is_nondeterministic(name: str, device: str, *, floats: bool, values: bool, deterministic: bool) -> bool:
    """Whether a second run of a kernel may give other bits, according to torch.

    Args:
        name: of the op, without its namespace; in-place variants count alike.
        device: device type.
        floats: the result is floating point: sums of integers are the same in any order.
        values: several values are written: if two meet, either may win.
        deterministic: torch was told to use deterministic algorithms, or to fail.
    """
    if device in ("cpu", "meta") or deterministic:
        return False
    name = name.removesuffix("_")
    return (floats and name in _ADDS_IN_ANY_ORDER) or (values and name in _WRITES_IN_ANY_ORDER)


_ATTENTION = {
    f"_scaled_dot_product_{kind}"
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
}

_MATMULS = frozenset({"_grouped_mm", "_scaled_grouped_mm", "_int_mm", "_addmm_activation"})
"""Matmuls that torch's FLOP counter does not count."""

_BOOKKEEPING = {
    *("prim::device", "aten::is_same_size", "aten::sym_size", "aten::sym_numel", "aten::sym_stride"),
    *("aten::sym_storage_offset", "aten::_is_zerotensor", "_c10d_functional::wait_tensor"),
    *("_c10d_functional::_wrap_tensor_autograd",),
}

# They write running statistics in training, which their schemas do not declare.
MOVE_STATISTICS = {
    *("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm", "aten::batch_norm_update_stats"),
    *("aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts"),
}

# ctc_loss leaves everything past the lengths unwritten, oneDNN's LSTM the padding of its workspace (which also differs
# without recorded gradients)
_WRITE_IN_PART = {"_ctc_loss", "mkldnn_rnn_layer"}

_COMMUNICATION = {"_c10d_functional", "c10d_functional", "c10d", "symm_mem", "fsdp"}

# Collectives that return a new tensor and may be recomputed: every rank of a group does so if all have the same plan.
_COLLECTIVES = {
    f"_c10d_functional::{name}"
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast")
} | {"_dtensor::shard_dim_alltoall"}


def is_bookkeeping(func: Any) -> bool:
    """Whether a call only queries a tensor, or waits for it, and computes nothing."""
    return func._schema.name in _BOOKKEEPING


def is_communication(func: Any) -> bool:
    return is_collective(func) or _full_name(func).split("::")[0] in _COMMUNICATION


def sees_modes(func: Any) -> bool:
    """Whether torch uses this op instead of another while a dispatch mode is active, as during recording. It saves
    more than the other: a run saves the recorded tensors only under some mode.
    """
    return func is aten._ctc_loss.Tensor


def made_by_shape(func: Any, kwargs: dict[str, Any], out: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """A call that allocates the same empty memory without reading a tensor: its recomputation does not need that tensor
    first (torch's dropout on a CPU draws into memory like its argument's). None for other ops, and on other devices,
    where a recording covers calls on any of their number, and a shape does not tell which.
    """
    if func is not aten.empty_like.default or kwargs.get("pin_memory") or plain(out) is not out:
        return None
    if out.device.type != "cpu" or out.layout is not torch.strided:
        return None
    size, stride = tuple(out.shape), tuple(out.stride())
    return aten.empty_strided.default, (size, stride), {"dtype": out.dtype, "device": out.device}


def is_collective(func: Any) -> bool:
    """Whether a call communicates with other ranks and can be repeated; its result must be waited for."""
    return _full_name(func) in _COLLECTIVES


def _full_name(func: Any) -> str:
    schema = getattr(func, "_schema", None)  # ops on random states have none
    return "" if schema is None else str(schema.name)


def computes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
    """Whether a call allocates memory or writes to existing memory; a call that only makes views does neither."""
    if _written(func):
        return True
    given = {t.untyped_storage()._cdata for t in op_leaves(args, kwargs) if isinstance(t, Tensor)}
    return any(isinstance(t, Tensor) and t.untyped_storage()._cdata not in given for t in op_leaves(out))


def writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Tensors that a call overwrites, by its schema; may be pieces of one memory. A higher-order op has none."""
    found: list[Tensor] = []
    if isinstance(func, HigherOrderOperator):
        return found
    for i, name, kwarg_only in _written(func):
        value = args[i] if i < len(args) and not kwarg_only else kwargs.get(name)
        found.extend(t for t in op_leaves(value) if isinstance(t, Tensor))
    if not found and func._schema.name in MOVE_STATISTICS:
        named = _named(func, args, kwargs)
        if named.get("training", True):  # the schema does not declare it
            running = named.get("running_mean"), named.get("running_var")
            found.extend(t for t in running if isinstance(t, Tensor))
    return found


def _named(func: Any, args: Sequence[Any], kwargs: Any) -> dict[str, Any]:
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs


@functools.lru_cache(maxsize=4096)
def _written(func: Any) -> tuple[tuple[int, str, bool], ...]:
    """Position, name and whether it is keyword-only, of each argument that a call writes to, by its schema."""
    return tuple(
        (i, arg.name, arg.kwarg_only)
        for i, arg in enumerate(func._schema.arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    )


def without_statistics(func: Any, args: Sequence[Any]) -> list[Any] | None:
    """A training batch norm's arguments without running statistics, which it does not read; None for other calls."""
    if func is not aten.native_batch_norm.default or not args[5]:
        return None
    return [*args[:3], None, None, *args[5:]]


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers: tagged so, and without a dropout probability of zero."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    usual = next((a.default_value for a in func._schema.arguments if a.name == "dropout_p"), True)
    return bool(_named(func, args, kwargs).get("dropout_p", usual))


def anchor_of(func: Any, kwargs: dict[str, Any], spec_args: Any, device: str) -> Anchor | None:
    """Reason why this call may not be recomputed, by itself, on a device of this type."""
    name = func._schema.name.split("::")[1]
    if name in DISCRETE:
        return Anchor.DISCRETE
    if any(isinstance(v, torch.Generator) and is_private(v) for v in op_leaves(spec_args, kwargs)):
        return Anchor.GENERATOR
    if is_communication(func) and not is_collective(func):
        return Anchor.COLLECTIVE
    if name in ("lift_fresh", "lift", "lift_fresh_copy", "_local_scalar_dense", "set_", "resize_"):
        return Anchor.OPAQUE
    if device != "cpu":
        named = _named(func, spec_args, kwargs)
        source = next((named[key] for key in ("source", "src", "values") if key in named), None)
        target = next((v for v in op_leaves(spec_args) if hasattr(v, "dtype")), None)
        if is_nondeterministic(
            name,
            device,
            floats=target is None or target.dtype.is_floating_point or target.dtype.is_complex,
            values=source is not None and hasattr(source, "size") and prod(source.size) > 1,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        ):
            return Anchor.NONDETERMINISTIC
    if any(isinstance(v, torch.SymInt | torch.SymFloat | torch.SymBool) for v in op_leaves(spec_args, kwargs)):
        return Anchor.OPAQUE
    return Anchor.UNWRITTEN if name in _WRITE_IN_PART else None


def takes_number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call computes with a plain number that is not a dim or a size."""
    if func._schema.name.split("::")[1] in MOVES_BY_NUMBER:
        return True  # integers of a range
    named = _named(func, args, kwargs)
    given = [(str(a.type), named.get(a.name)) for a in func._schema.arguments]
    return any(isinstance(v, int | float) and kind not in ("int", "bool", "Optional[int]") for kind, v in given)


def price_key(func: Any, spec_args: Any, spec_kwargs: Any) -> str:
    """Equal for calls that cost the same: op, shapes, strides, dtypes and constants."""

    def text(leaf: Any) -> str:
        if hasattr(leaf, "buffer"):
            return f"{str(leaf.dtype)[6:]}{list(leaf.size)}{list(leaf.stride)}"
        return repr(leaf)

    if is_collective(func):  # groups of one size cost the same, and their names differ from rank to rank
        named = _named(func, spec_args, spec_kwargs)
        spec_args, spec_kwargs = [v for name, v in named.items() if name != "group_name"], {}

    return f"{func}({', '.join(text(leaf) for leaf in op_leaves(spec_args, spec_kwargs))})"


def op_cost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[int, int]:
    """FLOPs (a multiply-add is 2) and bytes read plus written of one call."""
    tensors = [t for t in op_leaves(args, kwargs, out) if isinstance(t, Tensor)]
    # a broadcast dim has stride 0: its elements are the same memory
    own = [prod(n for n, step in zip(t.shape, t.stride(), strict=True) if step) * t.element_size() for t in tensors]
    moved, name = sum(own), op_name(func) if func.namespace == "aten" else ""
    if name in _ATTENTION:  # torch's formula wants as many keys as query heads
        query, key, value = args[:3]
        b, a, s, d = query.shape
        return 2 * b * a * s * key.shape[-2] * (d + value.shape[-1]), moved
    if name in _MATMULS:
        left, right = args[1:3] if name == "_addmm_activation" else args[:2]
        if left.dim() == 3 and right.dim() == 2:  # columns of the right operand are distributed over the groups
            return 2 * left.shape[1] * prod(right.shape), moved
        return 2 * prod(left.shape) * right.shape[-1], moved
    formula = flop_registry.get(func.overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0, moved


def unwritten_results(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Tensor]:
    """Results that no kernel writes or reads: random states that attention returns without dropout."""
    if func.namespace != "aten" or op_name(func) not in _ATTENTION or not isinstance(out, tuple):
        return []
    names = {"unused"} if draws(func, args, kwargs) else {"unused", "rng_state", "philox_seed", "philox_offset"}
    named = zip(func._schema.returns, out, strict=True)
    return [leaf for result, leaf in named if result.name in names and isinstance(leaf, Tensor)]
