"""A `FakeTensorMode` with a quicker cache.

A dry run computes the same shapes block after block and plan after plan, and torch's own cache spends most of its time
on computing its key. Here results are cached under a cheaper key: the memory layout of each tensor, and the type and
value of all other arguments. It caches all calls that torch's cache does, and some that torch excludes although layouts
alone determine them: results in ``out=``, `_unsafe_view`, calls with real tensors among fake ones (an embedding's
indices). Calls without such a key use torch's path.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from jettison.capture.pytrees import op_leaves

_VALUES = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
_BY_STORAGE = frozenset({torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_.default})
"""Ops whose result also depends on the size of a storage."""


def call_key(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    mode: FakeTensorMode | None = None,
    *,
    offsets: bool = False,
) -> tuple[Any, ...] | None:
    """Key that is equal for calls of an operator on tensors of equal layout (with ``offsets``: in their storage, too),
    all of one fake ``mode`` if given, with equal other values; None if there is none.
    """
    key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled(), *(kwargs or ())]
    known = _add(key, args, mode, offsets) and (not kwargs or _add(key, kwargs.values(), mode, offsets))
    return tuple(key) if known else None


def _add(key: list[Any], values: Iterable[Any], mode: FakeTensorMode | None, offsets: bool) -> bool:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if mode is not None and value.fake_mode is not mode:
                return False
            if value.constant is not None or value.layout is not torch.strided:
                return False
            marks = value.requires_grad, value.is_neg(), value.is_conj(), value.is_inference()
            key += (value.shape, value.stride(), value.dtype, value.fake_device, marks)
            key += (value.storage_offset(),) if offsets else ()
        elif kind in _VALUES:
            key += (kind, value)
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            if not _add(key, value, mode, offsets):
                return False
        elif kind is Tensor and value.layout is torch.strided and not (value.requires_grad or _is_marked(value)):
            key += (kind, value.shape, value.stride(), value.dtype, value.device)
            key += (value.storage_offset(),) if offsets else ()
        else:
            return False
    return True


def _is_marked(tensor: Tensor) -> bool:
    return tensor.is_neg() or tensor.is_conj() or tensor.is_inference()


_TOUCHY = tuple(
    torch.Tag.__members__[name] for name in ("data_dependent_output", "dynamic_output_shape", "inplace_view")
)
_LIFTS = frozenset({torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default})


@functools.lru_cache(maxsize=4096)
def _depends_on_layouts(func: Any) -> bool:
    """Whether layouts and non-tensor values determine an operator's results, and their memory."""
    if func in _LIFTS or func.namespace not in ("aten", "prims", "fsdp") or any(tag in func.tags for tag in _TOUCHY):
        return False
    return not _is_composite(func)


UNKNOWN: Final = object()


@functools.lru_cache(maxsize=4096)
def _reads_tensors(func: Any) -> bool:
    """Whether every call has a tensor argument."""
    kinds = [argument.type for argument in func._schema.arguments]
    return any(isinstance(kind, torch.TensorType) or kind.isSubtypeOf(torch.ListType.ofTensors()) for kind in kinds)


@functools.lru_cache(maxsize=4096)
def _may_view(func: Any) -> bool:
    """Whether it may return a view, so that storage offsets matter."""
    return bool(
        func.is_view or func._schema.name in _IN_ITS_MEMORY or _is_composite(func) or "as_strided" in func.name()
    )


def _is_composite(func: Any) -> bool:
    """Whether it is composed of other operators: it may return its argument, or not."""
    if func.namespace == "prim":  # queries, which the dispatcher has no table for
        return False
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), implicit))


_IN_ITS_MEMORY = frozenset(
    ("aten::_unsafe_view", "aten::lift_fresh", "aten::lift_fresh_copy", "fsdp::all_gather_copy_in")
)


class _Made(NamedTuple):
    """One tensor that an operator returns."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    given: int  # position of the argument that it is, keyword arguments last; -1 for none
    viewed: int  # of the argument whose memory it views; -1 for none


_Answer = tuple[bool, tuple[_Made | None, ...]]
"""Whether an operator returns several tensors, and these."""


class QuickFakeMode(FakeTensorMode):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._remembered: dict[Any, _Answer] = {}
        self._answer: tuple[Any, ...] | None = None
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        key = self._key(func, args, kwargs)
        known = self._remembered.get(key) if key is not None else None
        if known is not None:
            return self._again(known, args, kwargs)
        try:
            out = super().dispatch(func, types, args, kwargs or {})
            answer, self._answer = self._answer, None
            cached = answer is not None and answer[0] is func and answer[1] is args and answer[2] is out
            # in-place calls have changed their arguments, which then differ from the key
            if key is not None and (cached or (_depends_on_layouts(func) and key == self._key(func, args, kwargs))):
                made = _made(func, args, kwargs, out)
                if made is not None:
                    self._remembered[key] = (isinstance(out, tuple), made)
            return out
        finally:
            self._answer = None  # it would keep the arguments alive

    def remembered(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
        """The answer to a call of fake tensors alone, if it is cached; else `UNKNOWN`. A mode above this may ask for it
        instead of running the operator, if no mode between them has to see the call.
        """
        if not _reads_tensors(func):  # tensors made of numbers are made for real where batches are
            return UNKNOWN
        key = self._key(func, args, kwargs)
        known = self._remembered.get(key) if key is not None else None
        return UNKNOWN if known is None or Tensor in key else self._again(known, args, kwargs)

    def _output_from_cache_entry(self, *asked: Any) -> Any:
        """Torch's cache has an answer: the operator and its arguments are the last of its parameters."""
        out = super()._output_from_cache_entry(*asked)
        self._answer = (*asked[-2:], out)
        return out

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
        if not self.cache_enabled:
            return None
        if torch.is_inference_mode_enabled() and func.is_view:  # `_one` makes tensors without version counters there
            return None
        key = call_key(func, args, kwargs, self, offsets=_may_view(func))
        if key is None or (Tensor in key and (func._schema.is_mutable or _may_view(func))):
            return None
        return key if func not in _BY_STORAGE else (key, args[0].untyped_storage().nbytes())

    def _again(self, known: _Answer, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
        several, made = known
        given = (*args, *kwargs.values()) if kwargs else args
        guard = torch._C._DisableTorchDispatch()
        try:
            found = [None if one is None else self._one(one, given) for one in made]
        finally:
            del guard
        return tuple(found) if several else found[0]

    def _one(self, one: _Made, given: tuple[Any, ...]) -> Tensor:
        if one.given >= 0:
            return given[one.given]
        meta, device = torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device="meta"), one.device
        if one.viewed >= 0:
            meta.set_(given[one.viewed].untyped_storage(), one.offset, one.shape, one.stride)
        attributes = self._attributes.get(device)
        if attributes is None:
            fake: Tensor = FakeTensor(self, meta, device)
            self._attributes[device] = dict(vars(fake))
            return fake
        # like all others on its device; the constructor takes four times as long
        fake = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
        if self._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        else:
            torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(attributes)
        return fake


def _made(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, out: Any
) -> tuple[_Made | None, ...] | None:
    """Recipe for an operator's results from layouts; None if they need more than a shape."""
    given = (*args, *kwargs.values()) if kwargs else args
    memory = [value.untyped_storage()._cdata if isinstance(value, Tensor) else None for value in given]
    inside = {leaf.untyped_storage()._cdata for leaf in op_leaves(given) if isinstance(leaf, Tensor)} - set(memory)
    found: list[_Made | None] = []
    for one in out if isinstance(out, tuple) else (out,):
        if one is None:
            found.append(None)
            continue
        if type(one) is not FakeTensor or one.constant is not None or one.layout is not torch.strided:
            return None
        same = next((i for i, value in enumerate(given) if value is one), -1)
        if same < 0 and (one.requires_grad or _is_marked(one)):
            return None
        storage = one.untyped_storage()
        viewed = next((i for i, other in enumerate(memory) if other == storage._cdata), -1)
        if same < 0 <= viewed and not _may_view(func):
            return None
        if same < 0 and viewed < 0:
            extent = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta").untyped_storage()
            if storage._cdata in inside or one.storage_offset() or storage.nbytes() != extent.nbytes():
                return None
            inside.add(storage._cdata)  # no other result may be in it
        shape, stride = tuple(one.shape), one.stride()
        found.append(_Made(shape, stride, one.storage_offset(), one.dtype, one.fake_device, same, viewed))
    return tuple(found)
