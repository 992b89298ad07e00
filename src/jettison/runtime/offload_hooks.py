"""Moving what a region saves where it has no recording: every tensor as it comes by, in whatever wrapper."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from jettison.capture.recording import TensorRef
from jettison.capture.tensor_subclasses import arrived, is_dense, storage_of, wrapping
from jettison.runtime.callers import of_a_region
from jettison.runtime.handles import Held, opened
from jettison.runtime.moves import Move, Transit
from jettison.runtime.offload import Group
from jettison.runtime.views import Within, view_of


@dataclass(eq=False, slots=True)
class _Sent:
    """A tensor that may be on the host, for autograd to hold. All on one storage share the box."""

    ref: TensorRef
    shared: _Shared
    group: Group

    def open(self) -> Tensor:
        self.group.asked()
        with torch.no_grad():
            return view_of(self.shared.open(), self.ref)


class _Shared:
    """One range of a storage, and how many saved tensors see it: what came back lives until the last has asked."""

    __slots__ = ("box", "count", "flat", "left", "lock")

    def __init__(self, box: Transit) -> None:
        self.box = box
        self.count = self.left = 0
        self.flat: Tensor | None = None
        self.lock = threading.Lock()

    def open(self) -> Tensor:
        with self.lock:
            flat = self.box.open() if self.flat is None else self.flat
            self.left -= 1
            if self.left <= 0:
                self.flat, self.left = None, self.count
            else:
                self.flat = flat
            return flat


class _Wrapped:
    """A wrapper taken apart: what is inside goes by itself."""

    __slots__ = ("cls", "context", "inner", "size", "stride")

    def __init__(self, tensor: Any, inner: dict[str, Any], context: Any) -> None:
        self.cls, self.inner, self.context = type(tensor), inner, context
        self.size, self.stride = tensor.size(), tensor.stride()

    def open(self) -> Tensor:
        inner = {name: packed.open() for name, packed in self.inner.items()}
        found: Tensor = self.cls.__tensor_unflatten__(inner, self.context, self.size, self.stride)
        return found


class OffloadHooks:
    """Of one call. ``lives`` are tensors that live anyway: parameters, buffers, what the caller holds. Without a group
    nothing moves, and nothing below ``smallest_bytes``.
    """

    def __init__(self, lives: Iterable[Tensor], group: Group | None, smallest_bytes: int) -> None:
        self.lives = {storage_of(part) for tensor in lives for part in _parts(tensor)}
        self.group = group
        self.smallest_bytes = smallest_bytes
        self.boxes: dict[tuple[int, int, int, int], _Shared] = {}

    @of_a_region
    def sent(self, tensor: Tensor) -> Any:
        """Autograd saves a tensor: it is on its way, if it may go."""
        if self.group is None:
            return Held(tensor)
        if wrapping(tensor) is None and is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            return _Wrapped(tensor, {name: self.sent(getattr(tensor, name)) for name in names}, context)
        if not is_dense(tensor) or storage_of(tensor) in self.lives or tensor.is_inference():
            return Held(tensor)
        part = arrived(tensor)
        reach = sum((n - 1) * s for n, s in zip(part.shape, part.stride(), strict=True)) + 1 if part.numel() else 0
        nbytes = reach * part.element_size()
        if nbytes < self.smallest_bytes or part.device != self.group.engine.place:
            return Held(tensor)
        begin, nbytes = self.range_of(part, nbytes)
        key = (part.untyped_storage()._cdata, part._version, begin, nbytes)
        shared = self.boxes.get(key)
        if shared is None:
            box = Transit(Move(seen=TensorRef.of(0, part), begin=begin, nbytes=nbytes), self.group)
            box.fill(part)
            shared = self.boxes[key] = _Shared(box)
        shared.count += 1
        shared.left += 1
        return _Sent(Within.since(begin, TensorRef.of(0, tensor)), shared, self.group)

    def range_of(self, part: Tensor, reach_bytes: int) -> tuple[int, int]:
        """What of its storage goes for a tensor: where that begins, and bytes."""
        return part.storage_offset() * part.element_size(), reach_bytes

    def close(self) -> None:
        """The call is over: what it has sent belongs to the graph alone."""
        self.boxes.clear()

    pack, unpack = sent, opened


def _parts(tensor: Tensor) -> list[Tensor]:
    if wrapping(tensor) is None and is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _parts(getattr(tensor, name))]
    return [tensor]
