"""Cross entropy in chunks of rows: bitwise identical, with one copy of the logits where torch holds three.

NOTE [ Cross entropy in chunks ]
For logits with N rows and V columns ``torch.nn.functional.cross_entropy`` holds the logits and their log-softmax at the
end of its forward; the log-softmax, the gradient of ``nll_loss`` and the gradient of the logits at the end of its
backward (aten/src/ATen/native/LossNLL.cpp, SoftMax.cpp). Each of these kernels treats rows independently, except for
the sum over rows. So the same kernels are called for some rows at a time:

- forward: log-softmax of a chunk, and from that the entry of each row that ``nll_loss`` selects. The sum is `nll_loss`
  again, over a matrix of one column: the order in which it adds rows depends on their number only.
- backward: log-softmax of a chunk once more, and its two gradients, the second in place of the logits if nothing else
  references those. Memory that cannot be resized may be NumPy's or another process's, whatever its count is.

A chunk has a multiple of 16 rows, so that the alignment of every row's address stays the same: CUDA kernels add the
elements of a row in an order that depends on it. Equality of the bits is tested on this machine before a combination of
device, dtype and V is used; if it fails, and for anything besides classes and a reduction (class weights, smoothing,
probabilities), torch's own function is called.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from operator import gt
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd import Function
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from jettison.core.objects import swapped
from jettison.runtime.cuda_graphs import refuse_capture

aten = torch.ops.aten

SMALLEST_BYTES: Final = 4 * 1024**2
"""Smaller logits are left to torch: their copies are no reason for a plan, and chunks cost calls."""
CPU_CHUNK_BYTES: Final = 2 * 1024**2  # stays in a core's cache, which makes it faster than torch's own
DEVICE_CHUNKS: Final = 32  # launches, where no cache matters
ROWS: Final = 16  # a chunk has a multiple of this
REDUCTIONS: Final = {"none": 0, "mean": 1, "sum": 2}  # aten/src/ATen/core/Reduction.h
IGNORED: Final = -100
PLAIN: Final = frozenset({Tensor, nn.Parameter, FakeTensor})

CHANGED: Final = (
    "logits or classes were written to between their cross entropy and its backward, in a way that autograd does not "
    "see (data, NumPy), while their loss goes over chunks: work on a clone of them, or pass chunked_loss=False"
)

Holders = tuple[int, int, int]
"""References to a Python tensor, to its memory, and to the Python storage, which counts once for all its users."""

_replaced = functional.cross_entropy
_code = _replaced.__code__
_torchs = types.FunctionType(_code, _replaced.__globals__, _replaced.__name__, _replaced.__defaults__)
"""Torch's function, also while it is replaced."""
_lock = threading.Lock()
_holders: set[ChunkedLossPatch] = set()
_local = threading.local()
_same_bits: dict[tuple[str, torch.dtype, int], bool] = {}


class ChunkedLossPatch:
    """Replaces ``torch.nn.functional.cross_entropy`` in the whole process until every hold is released: in chunks, with
    the same bits. It stays the same object, so that models with it can be pickled. ``used``: a loss was computed.
    """

    __slots__ = ("used",)

    def __init__(self) -> None:
        self.used = False
        with _lock:
            if not _holders:
                _replaced.__code__ = _handed_on.__code__
            _holders.add(self)

    def release(self) -> None:
        """Release it; after the last one torch has its own function back."""
        with _lock:
            _holders.discard(self)
            if not _holders and _replaced.__code__ is _handed_on.__code__:
                _replaced.__code__ = _code

    def until_gone(self, model: nn.Module) -> None:
        """Release it when the model is freed, if not before."""
        weakref.finalize(model, self.release)


@contextlib.contextmanager
def holding(wanted: bool) -> Iterator[ChunkedLossPatch | None]:
    """Take a hold that outlives this context, unless an exception leaves it; None if none is wanted."""
    if not wanted:
        yield None
        return
    hold = ChunkedLossPatch()
    try:
        yield hold
    except BaseException:
        hold.release()
        raise


def whole_losses() -> contextlib.AbstractContextManager[None]:
    """Compute losses on this thread as torch does without a plan: the reference of comparisons."""
    return swapped(_local, whole=True)


def cross_entropy(input: Tensor, target: Tensor, *more: Any) -> Tensor:
    """See `torch.nn.functional.cross_entropy`; ``more`` are all its other arguments."""
    weight, size_average, ignore_index, reduce, reduction, label_smoothing = more
    if (
        not torch.compiler.is_compiling()
        and weight is None
        and size_average is None
        and reduce is None
        and label_smoothing == 0.0
        and reduction in REDUCTIONS
        and _fits(input, target)
        and _gives_the_same_bits(input)
    ):
        for hold in tuple(_holders):
            hold.used = True
        return _chunked(input, target, ignore_index, reduction)
    return _torchs(input, target, *more)


def _handed_on(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Replacement for torch's function while a plan is on; it runs with the globals of torch's module."""
    from jettison.runtime.chunked_loss import cross_entropy

    return cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)


def _fits(input: Any, target: Any) -> bool:
    """Whether chunks are known to compute the same for these arguments, and save enough."""
    return (
        bool(_holders)
        and not getattr(_local, "whole", False)
        and input.__class__ in PLAIN
        and target.__class__ in PLAIN
        and torch.is_grad_enabled()
        and input.requires_grad
        and input.dim() == 2
        and target.dim() == 1
        and target.dtype is torch.int64
        and input.shape[0] == target.shape[0]
        and input.device == target.device
        and input.is_floating_point()
        and isinstance(input.shape[0], int)
        and input.nbytes >= SMALLEST_BYTES
        and input.is_contiguous()
        and (input.dtype is torch.float32 or not torch.is_autocast_enabled(input.device.type))
        and not torch.jit.is_tracing()
        and torch._C._autograd._saved_tensors_hooks_is_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
    )


def _chunked(input: Tensor, target: Tensor, ignore_index: int, reduction: str, rows: int | None = None) -> Tensor:
    asked = _LossRequest(ignore_index, REDUCTIONS[reduction], rows or rows_of(input), _LogitsStub.apply(input))
    return _CrossEntropy.apply(input, target, asked)


def rows_of(logits: Tensor) -> int:
    """Rows of a chunk of logits with shape [N, V]."""
    row = logits.shape[1] * logits.element_size()
    nbytes = CPU_CHUNK_BYTES if logits.device.type == "cpu" else logits.nbytes // DEVICE_CHUNKS
    return max(ROWS, nbytes // row // ROWS * ROWS)


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Hide the ops in here from modes that watch, fake or hold the tensors of a step."""
    nothing = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with unset_fake_temporarily(), _disable_current_modes(), nothing, torch.enable_grad():
        yield


def _gives_the_same_bits(logits: Tensor) -> bool:
    """Whether chunks give torch's bits for logits like these, on this device; tested once."""
    key = (str(logits.device), logits.dtype, logits.shape[1])
    if key not in _same_bits:
        refuse_capture("a loss is computed in chunks for the first time")
        with _apart():
            _same_bits[key] = _same(torch.device(key[0]), logits.dtype, logits.shape[1])
    return _same_bits[key]


def _same(device: torch.device, dtype: torch.dtype, columns: int) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    wide = torch.randn(ROWS + 1, columns, device=device, generator=generator)
    target = torch.randint(columns, (len(wide),), device=device, generator=generator)
    target[ROWS // 2] = IGNORED
    found = []
    for rows in (0, ROWS):
        logits = wide.to(dtype).requires_grad_()
        given = logits + 0
        loss = _chunked(given, target, IGNORED, "mean", rows) if rows else _torchs(given, target)
        del given
        loss.backward()
        assert logits.grad is not None
        found.append((loss.detach(), logits.grad))
    (loss, gradient), (chunked, of_chunks) = found
    return torch.equal(loss, chunked) and torch.equal(gradient, of_chunks)


@dataclass(slots=True)
class _LossRequest:
    ignore_index: int
    reduction: int
    rows: int
    twin: Tensor  # shape and graph position of the logits without their memory, for higher derivatives
    holders: dict[bool, Holders] | None = None  # references to the logits, to compare with when backward frees them


@functools.cache
def _alone() -> dict[bool, Holders]:
    """Reference counts of logits that only the graph holds, by whether the very tensor was saved; measured."""
    found: dict[bool, Holders] = {True: (0, 0, 0), False: (0, 0, 0)}
    swapped = torch.autograd.graph.saved_tensors_hooks(lambda x: None if x.dim() == 2 else x, _given)
    with _apart():
        for setting in (contextlib.nullcontext(), swapped):
            logits = torch.zeros(1, 2, requires_grad=True) + 0
            asked = _LossRequest(IGNORED, REDUCTIONS["sum"], ROWS, _LogitsStub.apply(logits), found)
            with setting:
                loss = _CrossEntropy.apply(logits, torch.zeros(1, dtype=torch.int64), asked)
            del logits
            loss.backward()
    return found


def _given(saved: Tensor | None) -> Tensor:
    return torch.zeros(1, 2) if saved is None else saved


class _CrossEntropy(Function):
    """See NOTE [ Cross entropy in chunks ]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, asked: _LossRequest) -> Tensor:
        # a tensor of its own on the same memory: once the forward's are freed, nothing else references that memory
        logits = logits.detach()
        of_rows = [
            aten.nll_loss_forward(aten._log_softmax(part, 1, False), wanted, None, 0, asked.ignore_index)[0]
            for part, wanted in zip(logits.split(asked.rows), target.split(asked.rows), strict=True)
        ]
        column = torch.cat(of_rows).neg_().unsqueeze(1)
        only = torch.where(target == asked.ignore_index, IGNORED, 0)
        loss: Tensor
        loss, weight = aten.nll_loss_forward(column, only, None, asked.reduction, IGNORED)
        ctx.save_for_backward(logits, target, weight, column)
        ctx.asked, ctx.saved = asked, weakref.ref(logits)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, target, weight, column = ctx.saved_tensors
        kinds = torch._C._functorch  # of a batch of gradients, as under ``is_grads_batched``
        is_batched = kinds.is_batchedtensor(gradient) or kinds.is_legacy_batchedtensor(gradient)
        if torch.is_grad_enabled() or is_batched:
            return _differentiable(gradient, logits, target, weight, ctx.asked), None, None
        asked: _LossRequest = ctx.asked
        is_saved = ctx.saved() is logits
        storage = logits.untyped_storage()
        holders = (sys.getrefcount(logits), torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage))
        again = torch._C._autograd._get_current_graph_task_keep_graph()
        if asked.holders is not None:
            asked.holders[is_saved] = holders
            found = torch.empty_like(logits)
        elif again or any(map(gt, holders, _alone()[is_saved])) or not storage.resizable():
            found = torch.empty_like(logits)
        else:
            found = logits
        parts = zip(logits.split(asked.rows), target.split(asked.rows), found.split(asked.rows), strict=True)
        now: list[Tensor] = []
        is_fake = isinstance(logits, FakeTensor)
        for number, (part, wanted, place) in enumerate(parts):
            logp = aten._log_softmax(part, 1, False)
            if is_saved:
                now.append(logp.new_empty(len(part)) if is_fake else _taken(logp, wanted, asked.ignore_index))
            of_rows = gradient if asked.reduction else gradient[number * asked.rows :][: asked.rows]
            of_logp = aten.nll_loss_backward(of_rows, logp, wanted, None, asked.reduction, asked.ignore_index, weight)
            aten._log_softmax_backward_data.out(of_logp, logp, 1, logits.dtype, out=place)
            del logp, of_logp  # otherwise the next chunk would be a third copy
        if is_saved and not is_fake:
            _unchanged(now, column)
        return found, None, None


def _unseen() -> contextlib.AbstractContextManager[Any]:
    """Hide the ops in here from the trace of the step."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()


def _taken(logp: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return the log-probability that `nll_loss` selects in each row of a chunk."""
    with _unseen():
        return aten.nll_loss_forward(logp, target, None, 0, ignore_index)[0]


def _unchanged(now: list[Tensor], before: Tensor) -> None:
    """Check that logits are unchanged since forward. torch saves the log-softmax, which nothing else references; logits
    may be written to through ``data`` or NumPy, which bumps no version. The selected entries of a chunk must be equal,
    or a `RuntimeError` is raised before the gradient is returned; on CUDA a device assertion.
    """
    with _unseen():
        rows = torch.cat(now).neg_()
        torch._assert_async(torch.isclose(rows, before[:, 0], rtol=0.0, atol=0.0, equal_nan=True).all(), CHANGED)


def _differentiable(gradient: Tensor, logits: Tensor, target: Tensor, weight: Tensor, asked: _LossRequest) -> Tensor:
    """The gradient of the logits as a differentiable function of them, as torch's own is."""
    again = _Reattached.apply(asked.twin, logits) if torch.is_grad_enabled() else logits
    logp = aten._log_softmax(again, 1, False)
    of_logp = aten.nll_loss_backward(gradient, logp, target, None, asked.reduction, asked.ignore_index, weight)
    return aten._log_softmax_backward_data(of_logp, logp, 1, logits.dtype)


class _LogitsStub(Function):
    """A tensor with the logits' shape and position in the graph, without memory."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.new_empty(()).expand(logits.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Reattached(Function):
    """The values of the logits, at the twin's position in the graph."""

    @staticmethod
    def forward(ctx: Any, twin: Tensor, logits: Tensor) -> Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
