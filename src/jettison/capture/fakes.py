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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from jettison.capture import sharded
from jettison.capture.copies import close_over_copies, copied, copy_arrays, held_in, without_finalizers
from jettison.capture.quick_fakes import UNKNOWN, QuickFakeMode
from jettison.capture.state_kinds import MOST_SHARED
from jettison.capture.tensor_subclasses import plain, wrapping
from jettison.capture.trees import op_map, tree_map
from jettison.core.errors import TraceError
from jettison.core.objects import swapped

aten = torch.ops.aten
_SELECT, _NONZERO, _BINCOUNT = aten.masked_select.default, aten.nonzero.default, aten.bincount.default
_NUMBER, _EQUAL = aten._local_scalar_dense.default, aten.equal.default
_INDEX = aten.index.Tensor


class StepFakeMode(QuickFakeMode):
    """A `FakeTensorMode` with other answers where torch's fake kernels refuse (`_RULES`) or err (`_CORRECTIONS`)."""

    sparse = False
    """Whether the model or its optimizer has sparse tensors."""
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
        ours = _is_ours_to_answer(func)
        if self.sparse or ours:
            refuse_sparse(func, args)
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
    return func is _INDEX or func in _RULES or func in _CORRECTIONS or makes_sparse(func)


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
    memo: dict[int, Any] = {id(state): state for state in sharded.states(model)}
    copies: list[tuple[nn.Module, nn.Module]] = []
    units = list(sharded.sharded_modules(model))
    for module in units:
        memo.update((id(held), whole) for held, whole in sharded.whole_parameters(module, faker.of_meta, stored=stored))
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
            (sharded.leave_unsharded if stored else sharded.leave_casts)(module, fake_model)
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
            if is_sparse(tensor) and isinstance(self._mode, StepFakeMode):
                self._mode.sparse = True
            return self._mode.from_tensor(tensor)
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


def _recurrent(func: Any, *_: Any) -> NoReturn:
    """Refuse layers of cuDNN, whose cached state of dropout must not be fake, and of oneDNN, whose workspace no shape
    tells: their callers are observed.
    """
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
    **dict.fromkeys((aten._cudnn_rnn.default, aten._cudnn_init_dropout_state.default), _recurrent),
    **dict.fromkeys(
        (aten._cudnn_rnn_flatten_weight.default, aten.miopen_rnn.default, aten.mkldnn_rnn_layer.default), _recurrent
    ),
}
"""By operator: its result for (operator, arguments, keywords, are values made up); None: torch's is right."""
if torch.distributed.is_available():  # the real one returns its argument, torch's fake kernel a new tensor
    _RULES[torch.ops._c10d_functional.wait_tensor.default] = lambda _, args, *__: args[0]


def _batch_norm(args: Sequence[Any], _: Any, out: Any) -> Any:
    """A contiguous, or channels-last, result; statistics have the weight's dtype, or the running mean's."""
    told = next((tensor for tensor in args[1:5] if isinstance(tensor, Tensor)), args[0])
    result = torch.empty_like(out[0], memory_format=suggest_memory_format(out[0]), requires_grad=False)
    return (result, *(one.new_empty(one.shape, dtype=told.dtype) for one in out[1:]))


def _layer_norm(args: Sequence[Any], _: Any, out: Any) -> Any:
    """The CPU gives statistics of the weight's type, torch's fake kernel of the input's."""
    weight = args[2]
    if weight is None or weight.dtype is args[0].dtype:
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


_CORRECTIONS: dict[Any, Callable[[Sequence[Any], dict[str, Any], Any], Any]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.native_layer_norm.default: _layer_norm,
    aten.mse_loss.default: _loss,
    aten.smooth_l1_loss.default: _loss,
    aten.soft_margin_loss.default: _loss,
    aten.binary_cross_entropy.default: _loss,
    aten.col2im.default: _col2im,
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


# sparse tensors -------------------------------------------------------------------------------------------------------

_LOOKS: Final = frozenset({"_indices", "_values", "_nnz", "_dimI", "_dimV", "is_coalesced", "dense_dim", "sparse_dim"})
"""Views of parts, and queries."""
_OF_BAGS: Final = aten._embedding_bag_backward.default


def is_sparse(value: Any) -> bool:
    """Whether a value is a sparse tensor of coordinates."""
    return isinstance(value, Tensor) and value.layout is torch.sparse_coo


def makes_sparse(func: Any) -> bool:
    """Whether an op makes a sparse tensor, or may."""
    return bool(func is _OF_BAGS or func._schema.name.startswith("aten::_sparse_coo_tensor"))


def refuse_sparse(func: Any, args: tuple[Any, ...]) -> None:
    """Raise `TraceError` for an op that makes or takes sparse tensors: how many entries they have depends on values."""
    is_look = func.namespace != "aten" or func._schema.name.removeprefix("aten::") in _LOOKS
    makes = makes_sparse(func) and (func is not _OF_BAGS or args[9])
    if makes or (any(map(is_sparse, args[:2])) and not is_look):
        raise TraceError(
            f"{func} makes or takes a sparse tensor (the gradient of an Embedding(sparse=True), say), and how much "
            "memory that takes depends on values; train with sparse=False, or choose a policy instead of a budget"
        )
