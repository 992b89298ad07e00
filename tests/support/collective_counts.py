"""What one rank really holds for backward, and what it really sends: counted on the running program, not predicted."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KINDS = {
    "_c10d_functional::all_gather_into_tensor": "all_gather_into_tensor",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter_tensor",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_to_all_single": "all_to_all_single",
    "_c10d_functional::broadcast": "broadcast",
    "_dtensor::shard_dim_alltoall": "all_to_all_single",
    "c10d::_allgather_base_": "all_gather_into_tensor",
    "c10d::_reduce_scatter_base_": "reduce_scatter_tensor",
    "c10d::allreduce_": "all_reduce",
    "c10d::broadcast_": "broadcast",
    "c10d::alltoall_base_": "all_to_all_single",
}
_SILENT = ("::wait_tensor", "::_wrap_tensor_autograd", "::barrier")


class Transfer(NamedTuple):
    """A kind of collective in one of the two passes."""

    kind: str
    backward: bool


class CollectiveBytes(TorchDispatchMode):
    """Counts collectives: bytes of the whole tensor, the gathered or the reduced one, by kind and pass.

    ``nbytes`` and ``calls`` are by `Transfer`. A collective of a kind that is not known raises: none goes uncounted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Counter[Transfer] = Counter()
        self.calls: Counter[Transfer] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it calls again, with what it is made of
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.split("::")[0] in ("_c10d_functional", "c10d", "_dtensor") and not name.endswith(_SILENT):
            transfer = Transfer(_KINDS[name], torch._C._current_graph_task_id() != -1)
            self.calls[transfer] += 1
            self.nbytes[transfer] += max(_nbytes(args), _nbytes(out))
        return out


def _nbytes(tree: Any) -> int:
    return max((t.numel() * t.element_size() for t in tree_leaves(tree) if isinstance(t, Tensor)), default=0)


class _Seen(TorchDispatchMode):
    """Every storage that an op reads or makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for storage in _storages((args, kwargs, out)):
            self.seen[storage._cdata] = weakref.ref(storage)
        return out


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [local_tensor(leaf).untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def held_bytes(forward: Callable[[], Tensor], *, apart: Iterable[Tensor] = ()) -> int:
    """Bytes alive between forward and backward, of all that a forward touches.

    What is counted is memory, whoever holds it: autograd, a checkpoint, a recipe. ``forward`` returns the scalar to
    differentiate, and makes its inputs itself, so that they count only if they are held; scalars do not count.

    Args:
        apart: what is there anyway: parameters, the leaf that inputs are made of, a mask that all layers share.
    """
    before = {s._cdata for s in _storages(_python_tensors())}
    seen = _Seen()
    with seen:
        loss = forward()
    gc.collect()
    _settle(seen)
    alive = {s._cdata: s for ref in seen.seen.values() if (s := ref()) is not None}
    alive |= {s._cdata: s for s in _storages(_python_tensors()) if s._cdata not in before}  # what no op has touched
    skip = {s._cdata for s in _storages([loss, *apart])}
    return sum(s.nbytes() for key, s in alive.items() if key not in skip and s.nbytes() > 8)


def _settle(seen: _Seen, *, rounds: int = 20, seconds: float = 0.01) -> None:
    """Wait until no more is let go of: a thread that has done a transfer drops its tensors a moment later."""
    before, unchanged = -1, 0
    while unchanged < rounds:
        now = sum(ref() is not None for ref in seen.seen.values())
        before, unchanged = now, unchanged + 1 if now == before else 0
        time.sleep(seconds)


def _python_tensors() -> list[Tensor]:
    """All that Python code can reach, fake ones aside."""
    found = [o for o in gc.get_objects() if issubclass(type(o), Tensor) and not isinstance(o, FakeTensor)]
    return [tensor for tensor in found if tensor.device.type != "meta" and tensor.layout is torch.strided]


def saved_bytes(forward: Callable[[], Tensor], *, parameters: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd saves: distinct storages that are no parameter's, scalars aside."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = local_tensor(tensor).untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    free = {local_tensor(p).untyped_storage()._cdata for p in parameters}
    return sum(s.nbytes() for key, s in storages.items() if key not in free and s.nbytes() > 8)


def local_tensor(tensor: Tensor) -> Tensor:
    """The memory behind a DTensor, or behind one that is still on its way."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor
