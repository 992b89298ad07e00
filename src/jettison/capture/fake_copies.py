"""Fake copies: a model's and a batch's structure on fake tensors, for tracing without memory.

A fake copy shares no storage with its model and allocates none: each parameter, buffer and plain tensor attribute
becomes a fake tensor of the same shape, stride, dtype and device. Tensors that share a storage still share one; tied
parameters stay one object.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from jettison.capture import fsdp2
from jettison.capture.deep_copies import close_over_copies, copied, copy_arrays, held_in, without_finalizers
from jettison.capture.fake_tensor_cache import UNKNOWN, QuickFakeMode
from jettison.capture.pytrees import op_leaves, op_map, tree_map
from jettison.capture.state_kinds import MOST_SHARED
from jettison.capture.tensor_subclasses import plain, wrapping
from jettison.core.errors import TraceError
from jettison.core.objects import swapped

aten = torch.ops.aten
_SELECT, _NONZERO, _BINCOUNT = aten.masked_select.default, aten.nonzero.default, aten.bincount.default
_NUMBER, _EQUAL = aten._local_scalar_dense.default, aten.equal.default
_INDEX, _RNN = aten.index.Tensor, aten.mkldnn_rnn_layer.default
_BAGS_BACKWARD = aten._embedding_bag_backward.default
LARGEST_RNN_BYTES = 2**28


class StepFakeMode(QuickFakeMode):
    """A `FakeTensorMode` with other answers where torch's fake kernels refuse (`_RULES`) or err (`_CORRECTIONS`)."""

    sparse = False
    """Whether there are sparse tensors: see below."""
    guesses = False
    """Whether a value that Python reads is made up (true, 1, all rows) instead of raising an error."""
    thread: int | None = None
    """The thread that is recorded: modes are per thread, and other threads' ops on its tensors are not seen."""

    def from_tensor(self, tensor: Tensor, **how: Any) -> FakeTensor:
        return super().from_tensor(_alone(tensor), **how)

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.thread is not None and self.thread != (here := threading.get_ident()):
            thread = next((one for one in threading.enumerate() if one.ident == here), None)
            # autograd's thread, which has the modes of its caller, is none or a dummy
            if thread is not None and type(thread) is not threading._DummyThread:
                raise TraceError(
                    f"the forward computes ({func}) in a thread of its own ({thread.name}): planning runs it on "
                    "tensors without values and sees one thread alone. Compute in the thread that calls the model"
                )
        ours = self.sparse or _is_ours_to_answer(func)
        if ours:
            has_sparse = self.sparse and any(map(is_sparse, args[:2]))
            if has_sparse and (found := sparse_result(func, args, kwargs)) is not None:
                return found
            if makes_sparse(func):
                self.sparse = True
                args, kwargs = with_fake_parts(args, kwargs)
            if func is _BAGS_BACKWARD and args[9]:
                self.sparse, args = True, with_places(args)
            if func is _INDEX:
                args = (args[0], _places(args[1]), *args[2:])
            rule = _RULES.get(func)
            found = None if rule is None else rule(func, args, kwargs, self.guesses)
            if found is not None:
                return found
        if any(map(_is_real_view, args)):
            args, kwargs = op_map(_alone, (args, kwargs))
        out = super().dispatch(func, types, args, kwargs)
        self._note(func, args, out)
        correct = _CORRECTIONS.get(func) if ours else None
        on_cpu = isinstance(args[0], Tensor) and args[0].device.type == "cpu" if correct else False
        return correct(args, kwargs, out) if correct is not None and on_cpu else out

    def remembered(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
        if self.sparse or _is_ours_to_answer(func):
            return UNKNOWN
        out = super().remembered(func, args, kwargs)
        self._note(func, args, out)
        return out

    def _note(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        if self.guesses and isinstance(out, FakeTensor) and out.dtype is torch.bool:
            _note_truth(func, args, out)


@functools.cache
def _is_ours_to_answer(func: Any) -> bool:
    """Whether an operator needs more than torch's fake kernel."""
    ours = func is _INDEX or func in _RULES or func in _CORRECTIONS
    return ours or makes_sparse(func) or func is _BAGS_BACKWARD


def _is_real_view(value: Any) -> bool:
    if value.__class__ is list or value.__class__ is tuple:
        return any(map(_is_real_view, value))
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value._is_view()


def _alone(value: Any) -> Any:
    """A view of real numbers as complex ones, or the reverse, without its base, whose fake one could not be viewed."""
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or not value._is_view():
        return value
    if value._base is None or value.is_complex() == value._base.is_complex():
        return value
    with unset_fake_temporarily(), torch.no_grad():
        made = torch.empty(0, dtype=value.dtype, device=value.device)
        made.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
        return made.requires_grad_(value.requires_grad)


def fake_mode(*, allow_non_fake_inputs: bool = False) -> StepFakeMode:
    """A fresh mode for one trace. Enter it outside (before) any recording or counting dispatch mode."""
    return StepFakeMode(allow_non_fake_inputs=allow_non_fake_inputs)


@contextlib.contextmanager
def roughly(fake_model: nn.Module) -> Iterator[None]:
    """Make up values that Python reads, as in a backward whose hooks log the norms of gradients."""
    parameters = map(plain, fake_model.parameters())
    mode = next((p.fake_mode for p in parameters if isinstance(p, FakeTensor)), None)
    with guessing(mode, True), started_by_fabric():
        yield


def guessing(mode: FakeTensorMode | None, wanted: bool) -> contextlib.AbstractContextManager[None]:
    """Switch made-up values on or off within the context."""
    return swapped(mode, guesses=wanted) if isinstance(mode, StepFakeMode) else contextlib.nullcontext()


def fake_copy(
    model: nn.Module, mode: FakeTensorMode, device: torch.device | str | None = None, *, stored: bool = False
) -> nn.Module:
    """A deep copy of `model` whose every tensor is fake. `device` overrides the device (needed for a meta model).

    Modules under FSDP2 are copied in the state that they have during a forward: with unsharded parameters, and without
    FSDP except for its casts; or, with ``stored``, in their state before `fully_shard`.
    """
    faker = _Faker(mode, None if device is None else torch.device(device))
    memo: dict[int, Any] = {id(state): state for state in fsdp2.states(model)}
    copies: list[tuple[nn.Module, nn.Module]] = []
    units = list(fsdp2.sharded_modules(model))
    for module in units:
        memo.update((id(held), whole) for held, whole in fsdp2.whole_parameters(module, faker.of_meta, stored=stored))
        kind: Any = type(module).__mro__[module._orig_cls_mro_index]  # before `fully_shard` changed it
        copies.append((module, kind.__new__(kind)))
        memo[id(module)] = copies[-1][1]
    for tensor in _tensors_of(model):
        if id(tensor) not in memo:
            memo[id(tensor)] = faker.like(tensor)
    copy_arrays(model, _tensors_of(model), memo)
    copies += without_finalizers(model, memo)
    for index, (module, fake_model) in enumerate(copies):
        fake_model.__setstate__(copied(module.__getstate__(), memo))
        if index < len(units):
            (fsdp2.leave_unsharded if stored else fsdp2.leave_casts)(module, fake_model)
    made: nn.Module = copied(model, memo)
    close_over_copies(model, memo)
    return made


def fake_batch(batch: Any, mode: FakeTensorMode, device: torch.device | str | None = None) -> Any:
    """Fake the tensors of a tree; other leaves are unchanged."""
    faker = _Faker(mode, None if device is None else torch.device(device))
    return tree_map(lambda leaf: faker.like(leaf) if isinstance(leaf, Tensor) else leaf, batch)


class _Faker:
    """Fakes tensors of one model, and keeps shared storages shared."""

    def __init__(self, mode: FakeTensorMode, device: torch.device | None) -> None:
        self._mode = mode
        self._device = device
        self._storages: dict[int, torch.UntypedStorage] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """Return a fake leaf for `tensor`, of the same Python class if that is a kind of parameter."""
        wrap = wrapping(tensor)
        if wrap is not None:
            wrapped = wrap.wrap(self.like(plain(tensor)))
            if isinstance(tensor, nn.Parameter):
                return _as_parameter(tensor, wrapped)
            return wrapped.requires_grad_(tensor.requires_grad)
        with torch._C.DisableTorchFunctionSubclass():  # the user's class may count its calls
            is_strided = tensor.layout is torch.strided
        if is_traceable_wrapper_subclass(tensor) or not is_strided:  # these fake their parts
            return self._sparse(tensor) if is_sparse(tensor) else self._mode.from_tensor(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="meta")
            meta = torch.empty(0, dtype=tensor.dtype, device="meta")
            meta.set_(self._storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
            fake = self.of_meta(meta, tensor.device)
            if isinstance(tensor, nn.Parameter):
                return _as_parameter(tensor, fake)
            return fake.requires_grad_(tensor.requires_grad)

    def _sparse(self, tensor: Tensor) -> Tensor:
        """Fake a sparse tensor with all its entries: a coalesced gradient, its momentum."""
        if isinstance(self._mode, StepFakeMode):
            self._mode.sparse = True
        with torch.no_grad(), self._mode:
            indices, values = self.like(tensor._indices().detach()), self.like(tensor._values().detach())
            made = aten._sparse_coo_tensor_unsafe(indices, values, tensor.shape, is_coalesced=tensor.is_coalesced())
        return made.requires_grad_(tensor.requires_grad)

    def of_meta(self, meta: Tensor, device: torch.device) -> Tensor:
        return FakeTensor(self._mode, meta, self._device or device)


def _as_parameter(parameter: nn.Parameter, fake: Tensor) -> nn.Parameter:
    fake_model = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        fake_model.__dict__.setdefault(name, value)
    return fake_model


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers without their gradients, and tensors of plain attributes, also in containers; in objects only
    large ones (PEFT's AdaLoRA has statistics of every adapter in one). Small ones may be numbers that a forward reads.
    """
    yield from model.parameters()
    yield from model.buffers()
    seen: set[int] = set()
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                for one, in_object in held_in(value, seen, ours=False):
                    # sparse tensors have no nbytes
                    if issubclass(type(one), Tensor) and (
                        not in_object or one.numel() * one.element_size() > MOST_SHARED
                    ):
                        yield one


# gaps of torch's fake kernels -----------------------------------------------------------------------------------------


def _places(indices: Sequence[Any]) -> list[Any]:
    """Replace real masks among indices by the positions where they are true."""
    found: list[Any] = []
    for index in indices:
        if isinstance(index, Tensor) and not isinstance(index, FakeTensor) and index.dtype in (torch.bool, torch.uint8):
            with unset_fake_temporarily():
                found.extend(index.nonzero().unbind(1))
        else:
            found.append(index)
    return found


def _grouped_mm(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], __: bool) -> Tensor | None:
    """Experts of mixtures in float32 and float16, which torch's fake kernel refuses; rows are padded to 16 bytes."""
    (a, b), more = args[:2], dict(zip(("offs", "bias", "out_dtype"), args[2:], strict=False)) | kwargs
    if a.dtype is torch.bfloat16:
        return None
    groups = 0 if more.get("offs") is None else more["offs"].shape[0]
    if a.dim() == 2:
        shape = (groups, a.shape[0], b.shape[1]) if b.dim() == 2 else (a.shape[0], b.shape[2])
    else:
        shape = (a.shape[1], b.shape[1]) if b.dim() == 2 else (a.shape[0], a.shape[1], b.shape[2])
    dtype = more.get("out_dtype") or a.dtype
    align = 16 // dtype.itemsize
    row = -(-shape[-1] // align) * align
    stride = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return a.new_empty_strided(shape, stride, dtype=dtype)


def _ctc_loss(_: Any, args: tuple[Any, ...], __: dict[str, Any], ___: bool) -> tuple[Tensor, Tensor]:
    """The loss of each row [n], and its alphas [n, t, 2 * longest target + 1], which depend on the targets' lengths."""
    log_probs, target_lengths = args[0], args[3]
    if any(isinstance(n, Tensor) and n.device.type == "cpu" != log_probs.device.type for n in args[2:4]):
        raise TraceError(
            "ctc_loss is given lengths on the CPU and log-probabilities on another device: torch takes that, and fails "
            "where anything watches the ops; move the lengths to the device (`.to(log_probs.device)`), or give lists"
        )
    if isinstance(target_lengths, FakeTensor):
        raise DynamicOutputShapeException(aten._ctc_loss.Tensor)
    longest = max(target_lengths.tolist() if isinstance(target_lengths, Tensor) else target_lengths, default=0)
    rows, steps = (log_probs.shape[1], log_probs.shape[0]) if log_probs.dim() == 3 else (1, log_probs.shape[0])
    return log_probs.new_empty(rows), log_probs.new_empty(rows, steps, 2 * longest + 1)


def _cudnn(func: Any, *_: Any) -> NoReturn:
    """Refuse: torch caches the state of its dropout for ever, which must not be fake; its callers are observed."""
    raise UnsupportedOperatorException(func)


def _by_values(func: Any, args: tuple[Any, ...], _: dict[str, Any], guesses: bool) -> Any:
    """Result of an op whose shape depends on values; None if the values are unknown."""
    if func is _SELECT:
        values, mask = args
        if not isinstance(mask, FakeTensor):
            return values.new_empty(int(mask.expand(torch.broadcast_shapes(values.shape, mask.shape)).sum()))
        return values.new_empty(torch.broadcast_shapes(values.shape, mask.shape).numel()) if guesses else None
    if not guesses:
        return None
    if func is _NONZERO:
        return args[0].new_empty((args[0].dim(), args[0].numel()), dtype=torch.int64).t()
    if func is _EQUAL:
        return True
    if func is _NUMBER and (known := getattr(args[0], _TRUTH, None)) is not None:
        return known
    if func is _BINCOUNT:
        weights = args[1] if len(args) > 1 else None
        dtype = torch.int64 if weights is None else torch.promote_types(weights.dtype, torch.float32)
        return args[0].new_empty(max(1, *args[2:3]), dtype=dtype)
    dtype = args[0].dtype
    return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


_RULES: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any], bool], Any]] = {
    **dict.fromkeys((_SELECT, _NONZERO, _NUMBER, _EQUAL, _BINCOUNT), _by_values),
    aten._grouped_mm.default: _grouped_mm,
    **dict.fromkeys((aten._ctc_loss.default, aten._ctc_loss.Tensor), _ctc_loss),
    # torch's fake kernel wants the lengths on the device, the real one takes them from the CPU
    **dict.fromkeys(
        (aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor),
        lambda _, args, *__: torch.empty_like(args[1]),
    ),
    **dict.fromkeys((aten._cudnn_rnn.default, aten._cudnn_init_dropout_state.default), _cudnn),
    **dict.fromkeys((aten._cudnn_rnn_flatten_weight.default, aten.miopen_rnn.default), _cudnn),
}
"""By operator: its result for (operator, arguments, keywords, are values made up); None: torch's is right."""
if torch.distributed.is_available():  # the real one returns its argument, torch's fake kernel a new tensor
    _RULES[torch.ops._c10d_functional.wait_tensor.default] = lambda _, args, *__: args[0]


def _batch_norm(args: Sequence[Any], _: Any, out: Any) -> Any:
    """A contiguous, or channels-last, result; statistics have the weight's dtype, or the running mean's."""
    told = next((tensor for tensor in args[1:5] if isinstance(tensor, Tensor)), args[0])
    result = torch.empty_like(out[0], memory_format=suggest_memory_format(out[0]), requires_grad=False)
    return (result, *(one.new_empty(one.shape, dtype=told.dtype) for one in out[1:]))


def _norm(args: Sequence[Any], _: Any, out: Any) -> Any:
    """The CPU gives statistics of the weight's type, torch's fake kernels of the input's."""
    weight = next((tensor for tensor in args[1:3] if isinstance(tensor, Tensor)), args[0])
    if weight.dtype is args[0].dtype:
        return out
    return (out[0], *(statistic.new_empty(statistic.shape, dtype=weight.dtype) for statistic in out[1:]))


def _loss(args: Sequence[Any], _: Any, out: Any) -> Any:
    """The CPU returns one number on a storage with room for all terms."""
    if out.dim():
        return out
    return out.new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape)).as_strided((), ())


def _col2im(args: Sequence[Any], _: Any, out: Any) -> Any:
    """The CPU returns a result on a storage with room for its argument."""
    if args[0].numel() <= out.numel():
        return out
    return out.new_empty(args[0].numel()).as_strided(out.shape, out.stride())


def _rnn(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """Add the workspace that an LSTM layer of oneDNN keeps for backward: the real kernel's, run once per shape, or a
    bound (gates, states, their gradients) where a run would take much memory.
    """
    steps, rows, inputs = args[0].shape
    hidden = args[2].shape[1]
    nbytes = 4 * (steps + 1) * rows * (16 * hidden + 4 * max(inputs, hidden)) + 2**16
    if nbytes <= LARGEST_RNN_BYTES:
        tensors = tuple((tuple(t.shape), t.dtype) for t in args[:7])
        nbytes = _rnn_workspace(tensors, (args[7], tuple(args[8]), *args[9:], *kwargs.values()))
    return (*out[:3], out[0].new_empty(int(nbytes), dtype=torch.uint8))


@functools.lru_cache(maxsize=256)
def _rnn_workspace(tensors: tuple[Any, ...], more: tuple[Any, ...]) -> int:
    with _disable_current_modes(), torch.enable_grad():  # without gradients it keeps nothing
        made = [torch.zeros(shape, dtype=dtype) for shape, dtype in tensors]
        workspace = _RNN(*made, more[0], list(more[1]), *more[2:])[3]
        return 0 if workspace is None else int(workspace.numel())  # none if nothing is trained


_CORRECTIONS: dict[Any, Callable[[Sequence[Any], dict[str, Any], Any], Any]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.native_layer_norm.default: _norm,
    aten.native_group_norm.default: _norm,
    # the gradient has the input's type, from torch's fake kernel the weight's
    aten.native_group_norm_backward.default: lambda args, _, out: (
        None if out[0] is None else torch.empty_like(out[0], dtype=args[1].dtype),
        *out[1:],
    ),
    aten.mse_loss.default: _loss,
    aten.smooth_l1_loss.default: _loss,
    aten.soft_margin_loss.default: _loss,
    aten.binary_cross_entropy.default: _loss,
    aten.col2im.default: _col2im,
    _RNN: _rnn,
    # torch's fake kernel gives both biases one gradient
    aten.mkldnn_rnn_layer_backward.default: lambda _, __, out: (
        (*out[:4], torch.empty_like(out[3]), *out[5:]) if out[4] is out[3] else out
    ),
}
"""By operator: the result of the CPU's kernel, from (arguments, keywords, the fake kernel's result)."""

_TRUTH = "_jettison_truth"
_LOGIC: dict[str, Any] = {"aten::any": any, "aten::all": all, "aten::mul": all, "aten::bitwise_and": all}
_LOGIC |= {"aten::logical_and": all, "aten::logical_or": any, "aten::bitwise_or": any, "aten::clone": all}
_LOGIC |= {"aten::_is_any_true": any, "aten::_is_all_true": all}  # torch.autograd's own check, in anomaly mode
_NOTS = ("aten::logical_not", "aten::bitwise_not")


def _note_truth(func: Any, args: tuple[Any, ...], out: Tensor) -> None:
    """Answer a check for NaN and infinity: made-up numbers are finite."""
    name, given = func._schema.name, [a for a in args if isinstance(a, Tensor | float)]
    known = None
    if name in ("aten::ne", "aten::eq") and len(given) == 2:
        if given[0] is given[1] or (isinstance(given[1], float) and math.isinf(given[1])):
            known = (given[0] is given[1]) is (name == "aten::eq")
    elif name in ("aten::isnan", "aten::isinf", "aten::isfinite"):
        known = name == "aten::isfinite"
    elif name in _LOGIC or name in _NOTS:
        truths = [getattr(a, _TRUTH, None) for a in given if isinstance(a, Tensor)]
        if truths and None not in truths:
            known = not truths[0] if name in _NOTS else _LOGIC[name](truths)
    if known is not None:
        setattr(out, _TRUTH, known)


# Lightning Fabric, whose models only train through their Fabric -------------------------------------------------------


def started_by_fabric() -> contextlib.AbstractContextManager[None]:
    """Allow a backward that Lightning Fabric did not start, which it refuses (lightning/fabric/wrappers.py)."""
    wrappers = sys.modules.get("lightning.fabric.wrappers") or sys.modules.get("lightning_fabric.wrappers")
    has_flag = getattr(wrappers, "_in_fabric_backward", None) is not None
    return swapped(wrappers, _in_fabric_backward=True) if has_flag else contextlib.nullcontext()


# sparse gradients (torch.nn.Embedding with sparse=True): their parts, and memory of ops on them -----------------------
#
# Torch's fake kernels make sparse results without entries. Here they have as many as the real kernels allocate room
# for. The number of table rows in a batch depends on its values: coalesced gradients count with their maximum, the
# number of entries or of the table's rows, whichever is smaller. Sources:
# aten/src/ATen/native/sparse/SparseTensor.cpp (``_coalesce_sparse_cpu``, ``sparse_mask``), SparseTensorMath.cpp
# (``add_out_sparse_cpu``).


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
    """Result of an op on fake sparse tensors; None where torch's fake kernel is right. `TraceError` if unknown."""
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
    return op_map(lambda leaf: _fake_indices(leaf, values) if isinstance(leaf, Tensor) else leaf, (args, kwargs))


def _fake_indices(real: Tensor, like: Tensor) -> Tensor:
    """Indices of a real batch, or made of them, kept alive by a tensor that does not count again."""
    if isinstance(real, FakeTensor):
        return real
    made = like.new_empty((1,) * real.dim(), dtype=real.dtype)
    weakref.finalize(made.untyped_storage(), lambda _: None, real)
    return made.expand(real.shape)


def sparse_workspace(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that a kernel allocates inside of a call with sparse tensors, in addition to its results."""
    if func in _ADDS and all(map(is_sparse, args[:2])) and func._schema.is_mutable:
        parts = (args[0]._indices(), args[0]._values())  # the old ones are freed as the new ones are allocated
        return sum(part.untyped_storage().nbytes() for part in parts)
    if func is aten._coalesce.default:
        given: Tensor = args[0]
        flat = 0 if given.sparse_dim() == 1 else 1
        return (3 + flat) * given._nnz() * given._indices().element_size()  # sorted positions, and the permutation
    if func is aten.sparse_mask.default:
        values: Tensor = args[1]._values()
        return values.numel() * args[0].element_size() + SCALAR_BYTES  # gathered rows, and a one
    return 0


def with_places(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a sparse bags' backward: the real op finds each index's bag, the fake one finds no index in any."""
    gradient, indices, offsets, places = args[:4]
    if not places.numel():
        places = gradient.new_empty(indices.shape, dtype=indices.dtype)
    return (gradient, _fake_indices(indices, gradient), offsets, places, *args[4:])


def makes_sparse(func: Any) -> bool:
    """Whether an op assembles parts, and allocates no memory."""
    return bool(func._schema.name.startswith(_FROM_PARTS))


def _of(indices: Tensor, values: Tensor, size: Any, *, coalesced: bool) -> Tensor:
    return aten._sparse_coo_tensor_unsafe(indices, values, size, is_coalesced=coalesced)


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
