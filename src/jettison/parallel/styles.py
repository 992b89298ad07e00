"""Tensor and sequence parallelism as `ParallelStyle`s for torch's `parallelize_module`.

    parallelize_module(layer, mesh["tp"], {
        "attention_norm": Replicated(sharded=True),
        "attention": BlockInput(dim=0),
        "attention.qkv": ColumnParallel(),
        "attention.out": RowParallel(dim=0),
        ...
    })

Parameters become DTensors, so that FSDP2, optimizers and distributed checkpoints know them; forwards compute on local
tensors. ``dim`` is the sequence's dim of the activations outside the blocks (0 for s × b × h, 1 for b × s × h) if
they are sharded along it, and None if they are unsharded. `known_models.tensor_parallel_plan` makes such plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from jettison.core.errors import UnsupportedModule, UsageError
from jettison.core.objects import swapped_entries
from jettison.parallel.dropout import OwnDraws
from jettison.parallel.parameters import distribute, local_part
from jettison.parallel.tp_collectives import Axis, collect, f, f_bar, finish_gather, g, g_bar, split, start_gather

# linear layers --------------------------------------------------------------------------------------------------------


def _is_conv1d(module: nn.Module | None) -> bool:
    """transformers' Conv1D: a linear layer whose weight is h × n, GPT-2's."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module | None) -> bool:
    """Whether `ColumnParallel` and `RowParallel` can shard the layer."""
    return type(module) is nn.Linear or _is_conv1d(module)


@dataclass
class _Forward:
    """Replacement of a module's forward, copied and pickled with the module."""

    module: nn.Module
    axis: Axis

    def weight(self) -> Tensor:
        weight = local_part(self.module.weight)
        assert weight is not None
        if _is_conv1d(self.module):
            weight = weight.reshape(weight.shape[0], -1).t()
        return weight

    def bias(self, *, partial: bool = False) -> Tensor | None:
        bias = local_part(self.module.bias, partial=partial)
        return None if bias is None else bias.reshape(-1)


@dataclass
class _ColumnForward(_Forward):
    enters: bool
    collected: int | None

    def __call__(self, x: Tensor) -> Tensor:
        x = f(x, self.axis) if self.enters else x
        out = column_linear(x, self.weight(), self.bias())
        if self.collected is None:
            return out
        each = -(-self.collected // self.axis.size)  # the last ranks may have fewer (of 50257, say)
        if out.shape[-1] < each:
            out = functional.pad(out, (0, each - out.shape[-1]))
        whole = collect(out, self.axis, -1)
        return whole if whole.shape[-1] == self.collected else whole.narrow(-1, 0, self.collected).contiguous()


@dataclass
class _RowForward(_Forward):
    dim: int | None
    draws: OwnDraws | None

    def __call__(self, x: Tensor) -> Tensor:
        if self.draws is not None:
            self.draws.end()
        out = functional.linear(x, self.weight())
        out = f_bar(out, self.axis) if self.dim is None else g_bar(out, self.axis, self.dim)
        bias = self.bias(partial=self.dim is not None)
        return out if bias is None else out + bias.to(out.dtype)


class Style(ParallelStyle):
    """A `ParallelStyle` that checks a module before it is applied."""

    def check(self, module: nn.Module, ways: int) -> None:
        """Raise `UsageError` if its sizes do not divide by the ranks, `UnsupportedModule` for another module."""


@dataclass(eq=False, kw_only=True)
class ColumnParallel(Style):
    """Shard a linear layer's outputs. After a `BlockInput` with ``dim`` it saves the shard of its input.

    Args:
        unit: outputs that belong together (of one head) and stay on one rank.
        groups: the outputs are this many layers in one (GPT-2's q, k and v), each sharded by itself. Its weight gets a
            dim for them, h × groups × n, so that a shard is a part of one dim in every checkpoint.
        enters: its input is unsharded, and no `BlockInput` comes before it.
        collected: every rank gets all outputs (logits, for a loss that all ranks compute).
    """

    unit: int = 1
    groups: int = 1
    enters: bool = False
    collected: bool = False

    def check(self, module: nn.Module, ways: int) -> None:
        units = _linear_sizes(module)[1] // self.groups // self.unit
        if not self.collected and units % ways:
            what = f"heads of {self.unit} outputs" if self.unit > 1 else "outputs"
            raise UsageError(f"{units} {what} do not divide over {ways} tensor-parallel ranks")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = Axis.of(device_mesh)
        self.check(module, axis.size)
        features = _linear_sizes(module)[1]
        for name, parameter in module.named_parameters() if self.groups > 1 else ():
            shape = (*parameter.shape[:-1], self.groups, parameter.shape[-1] // self.groups)
            setattr(module, name, nn.Parameter(parameter.detach().view(shape), parameter.requires_grad))
        last = module.weight.dim() - 1 if _is_conv1d(module) else 0
        distribute(self, module, "weight", device_mesh, Shard(last))
        if module.bias is not None:
            distribute(self, module, "bias", device_mesh, Shard(module.bias.dim() - 1))
        module.forward = _ColumnForward(module, axis, self.enters, features if self.collected else None)
        return module


@dataclass(eq=False, kw_only=True)
class RowParallel(Style):
    """Shard a linear layer's inputs, and sum the ranks' results; the bias is added to the sum.

    Args:
        dim: the sum is scattered along this dim; None: every rank gets all of it.
        draws: random state of `BlockInput`, which ends here.
    """

    dim: int | None = None
    draws: OwnDraws | None = None

    def check(self, module: nn.Module, ways: int) -> None:
        inputs = _linear_sizes(module)[0]
        if inputs % ways:
            raise UsageError(f"{inputs} inputs do not divide over {ways} tensor-parallel ranks")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = Axis.of(device_mesh)
        self.check(module, axis.size)
        distribute(self, module, "weight", device_mesh, Shard(0 if _is_conv1d(module) else 1))
        distribute(self, module, "bias", device_mesh, Replicate())
        module.forward = _RowForward(module, axis, self.dim, self.draws)
        return module


def _linear_sizes(module: nn.Module) -> tuple[int, int]:
    if not is_linear(module):
        raise UnsupportedModule(f"got a {type(module).__name__}; expected nn.Linear, or Conv1D of GPT-2")
    inputs, outputs = module.weight.shape if _is_conv1d(module) else module.weight.shape[::-1]
    return inputs, outputs


# borders --------------------------------------------------------------------------------------------------------------


@dataclass
class _InputHook:
    """Replaces the activation among a module's arguments: the first positional one, or ``hidden_states``."""

    move: Callable[[Tensor], Tensor]

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (self.move(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self.move(kwargs["hidden_states"])}


@dataclass
class _Enter:
    axis: Axis
    dim: int | None
    draws: OwnDraws | None
    module: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        if self.draws is not None and self.module.training:
            self.draws.begin(self.axis)
        return f(x, self.axis) if self.dim is None else gather_input(x, self.axis, self.dim)


@dataclass(eq=False, kw_only=True)
class BlockInput(Style):
    """The input of an attention or feed-forward block whose layers are sharded: f, or g along ``dim``.

    Args:
        divided: names of whole numbers on the module that count what is sharded, to be divided by the ranks.
        draws: the rank's own random state, from here to the `RowParallel` with the same one.
    """

    dim: int | None = None
    divided: Sequence[str] = ()
    draws: OwnDraws | None = None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = Axis.of(device_mesh)
        for name in self.divided:
            setattr(module, name, getattr(module, name) // axis.size)
        module.register_forward_pre_hook(_InputHook(_Enter(axis, self.dim, self.draws, module)), with_kwargs=True)
        if self.draws is not None:
            module.register_forward_hook(self.draws.end, always_call=True)  # where the forward failed
        return module


@dataclass(eq=False, kw_only=True)
class SplitInput(Style):
    """Shard activations along ``dim`` before the module, which has no sharded parameters."""

    dim: int

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        move = partial(split, axis=Axis.of(device_mesh), dim=self.dim)
        module.register_forward_pre_hook(_InputHook(move), with_kwargs=True)
        return module


# everything else ------------------------------------------------------------------------------------------------------


@dataclass
class _ReplicatedForward:
    """Runs a module's own forward with local tensors as its parameters."""

    module: nn.Module
    axis: Axis
    partial: bool
    split_ids: int | None
    gathers: int | None
    forward: Callable[..., Any] = field(repr=False)

    def __call__(self, x: Tensor) -> Tensor:
        if self.split_ids is not None:
            x = split(x, self.axis, self.split_ids)
        held = self.module._parameters
        with swapped_entries((held, name, local_part(p, partial=self.partial)) for name, p in held.items()):
            out: Tensor = self.forward(x)
        return out if self.gathers is None else gather_input(out, self.axis, self.gathers)


@dataclass(eq=False, kw_only=True)
class Replicated(Style):
    """A norm, or another layer that every rank has in full.

    Args:
        sharded: its input is the rank's part of the sequence or of the heads.
        split_ids: an embedding takes its part of the ids along this dim.
        gathers: its output is all-gathered along this dim, as the input of a later column-parallel layer (the head).
    """

    sharded: bool = False
    split_ids: int | None = None
    gathers: int | None = None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in list(module._parameters):
            distribute(self, module, name, device_mesh, Replicate())
        axis = Axis.of(device_mesh)
        partial = self.sharded and axis.size > 1
        module.forward = _ReplicatedForward(module, axis, partial, self.split_ids, self.gathers, module.forward)
        return module


class _Lookup(torch.autograd.Function):
    """Rows of ids in [first, first + rows of the weight), zeros for all others. Saves the ids alone."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, first: int, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.where = first, weight.shape[0], padding_idx
        local, elsewhere = _local_ids(ids, first, weight.shape[0])
        return torch.nn.functional.embedding(local, weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        first, rows, padding_idx = ctx.where
        local, elsewhere = _local_ids(ids, first, rows)
        if padding_idx is not None:
            elsewhere = elsewhere | (ids == padding_idx)
        dy = dy.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        dw = torch.ops.aten.embedding_dense_backward(dy, local, rows, -1, False)
        return None, dw, None, None


def _local_ids(ids: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    local = ids - first
    elsewhere = (local < 0) | (local >= rows)
    return local.masked_fill(elsewhere, 0), elsewhere


@dataclass
class _VocabularyForward(_Forward):
    dim: int | None

    def __call__(self, ids: Tensor) -> Tensor:
        weight: DTensor = self.module.weight
        first = self.axis.rank * math.ceil(weight.shape[0] / self.axis.size)
        local = local_part(weight)
        assert local is not None
        out: Tensor = _Lookup.apply(ids, local, first, self.module.padding_idx)
        return f_bar(out, self.axis) if self.dim is None else g_bar(out, self.axis, self.dim)


@dataclass(eq=False, kw_only=True)
class VocabularyParallel(Style):
    """Shard an embedding's rows. Every rank looks up the ids that it has, and the results are summed and scattered
    along ``dim``; None: every rank gets all of the sum.
    """

    dim: int | None = None

    def check(self, module: nn.Module, ways: int) -> None:
        if type(module) is not nn.Embedding or module.max_norm is not None or module.scale_grad_by_freq:
            raise UnsupportedModule(f"got {module}; expected nn.Embedding without max_norm and scale_grad_by_freq")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh.size())
        distribute(self, module, "weight", device_mesh, Shard(0))
        module.forward = _VocabularyForward(module, Axis.of(device_mesh), self.dim)
        return module


# Column-parallel matmuls that save the shard of their input and all-gather it again in backward -----------------------
#
# NOTE [ One all-gather for all matmuls of an input ]
# q, k and v read one all-gathered input; so do gate and up. `gather_input` all-gathers it once and marks the result
# with the shard and a `Gathered` that all of these matmuls share. Each saves the shard, which is one storage however
# often it is saved, and none saves the gathered tensor. In backward the first of them starts the all-gather, computes
# the gradient of its input meanwhile, and then waits; the others find it done; the last one frees it. The mark is an
# attribute of the tensor, so nothing outlives the forward. A matmul with another input (a slice, a cast) finds no mark
# and saves its input, as torch does: more bytes, same gradients.

_NOTE = "_jettison_gathered"


@dataclass(slots=True, eq=False)
class Gathered:
    """All-gather of one input in backward, shared by all matmuls that read it."""

    axis: Axis
    dim: int
    readers: int = 0
    _left: int = 0
    _pending: Tensor | None = None
    _whole: Tensor | None = None

    def start(self, shard: Tensor) -> None:
        """Start the all-gather, unless another reader has."""
        if self._pending is None and self._whole is None:
            self._pending = start_gather(shard, self.axis)
            self._left = self.readers

    def take(self) -> Tensor:
        """The all-gathered tensor. The last reader's call drops the reference."""
        if self._whole is None:
            assert self._pending is not None
            self._whole, self._pending = finish_gather(self._pending, self.axis, self.dim), None
        whole = self._whole
        self._left -= 1
        if self._left <= 0:
            self._whole = None
        return whole


def gather_input(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """g, with the mark that `column_linear` looks for."""
    if axis.size == 1:
        return x
    dtype = _autocast_dtype(x)
    x = x if dtype is None else x.to(dtype)  # the cast that autocast would apply to the gathered input
    whole = g(x, axis, dim)
    setattr(whole, _NOTE, (Gathered(axis, dim), x.detach()))
    return whole


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + bias, with this rank's rows of W: n/t × h."""
    note = _note_of(x)
    if note is None:
        return functional.linear(x, weight, bias)
    gathered, shard = note
    if (dtype := _autocast_dtype(x)) is not None:
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    return _ColumnLinear.apply(x, weight, bias, shard, gathered)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, weight: Tensor, bias: Tensor | None, shard: Tensor, gathered: Gathered
    ) -> Tensor:
        if ctx.needs_input_grad[1]:
            gathered.readers += 1
            ctx.save_for_backward(weight, shard)
        else:
            ctx.save_for_backward(weight)
        ctx.gathered = gathered
        return functional.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        weight, *shard = ctx.saved_tensors
        # a split backward asks for x's gradient and the weight's in turn
        nodes = [node for node, _ in ctx.next_functions[:3]]
        wants_x, wants_weight, wants_bias = (n is not None and torch._C._will_engine_execute_node(n) for n in nodes)
        rows = dy.reshape(-1, dy.shape[-1])
        if wants_weight:
            ctx.gathered.start(shard[0])
        dx = torch.matmul(dy, weight) if wants_x else None
        db = rows.sum(0) if wants_bias else None
        dw = rows.t() @ ctx.gathered.take().reshape(-1, weight.shape[1]) if wants_weight else None
        return dx, dw, db, None, None


@cache
def can_split_backward() -> bool:
    """Whether a schedule may run the backward of these matmuls in two halves, as zero-bubble ones do.

    Between the halves torch's schedules refer to nodes of the graph from Python alone. In torch 2.11 that does not keep
    the node of an ``autograd.Function``.
    """
    x, weight = torch.zeros(1, 1), torch.zeros(1, 1, requires_grad=True)
    node = _ColumnLinear.apply(x, weight, None, x, Gathered(Axis("", 1, 0), 0)).grad_fn
    try:
        return bool(node._input_metadata)
    except RuntimeError:
        return False


def _note_of(x: Tensor) -> tuple[Gathered, Tensor] | None:
    """The mark of `gather_input` on x, or on the tensor that x is a view of."""
    note = getattr(x, _NOTE, None)
    if note is None and x._base is not None and x.is_contiguous() and x._base.is_contiguous():
        whole = (x.numel(), x.shape[-1], x.dtype) == (x._base.numel(), x._base.shape[-1], x._base.dtype)
        note = getattr(x._base, _NOTE, None) if whole else None
    return note


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype is torch.float64:
        return None
    return torch.get_autocast_dtype(kind)
