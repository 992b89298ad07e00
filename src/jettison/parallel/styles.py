"""Tensor and sequence parallelism as `ParallelStyle`s for torch's `parallelize_module`.

    parallelize_module(layer, mesh["tp"], {
        "attention_norm": Replicated(sharded=True),
        "attention": BlockInput(dim=0),
        "attention.qkv": ColumnParallel(),
        "attention.out": RowParallel(dim=0),
        ...
    })

Parameters become DTensors, so that FSDP2, optimizers and distributed checkpoints know them; forwards compute on local
tensors. ``dim`` is the sequence's dim of the activations outside the blocks (0 for s × b × h, 1 for b × s × h) where
they are sharded along it, and None where they are whole. `structure.tensor_parallel_plan` writes such plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from jettison.core.errors import UnsupportedModule, UsageError
from jettison.parallel.dropout import OwnDraws
from jettison.parallel.linear import column_linear, gather_input
from jettison.parallel.parameters import distribute, local_part
from jettison.parallel.regions import Axis, collect, f, f_bar, g_bar, split

# linear layers --------------------------------------------------------------------------------------------------------


def _is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D: a linear layer whose weight is h × n, GPT-2's."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module | None) -> bool:
    """Layers that `ColumnParallel` and `RowParallel` know."""
    return module is not None and (type(module) is nn.Linear or _is_conv1d(module))


@dataclass
class _Forward:
    """Stands in for a module's forward. Copied and pickled along with it."""

    module: nn.Module
    axis: Axis

    def weight(self) -> Tensor:
        """Local, outputs × inputs."""
        weight = local_part(self.module.weight)
        assert weight is not None
        if _is_conv1d(self.module):
            weight = weight.reshape(weight.shape[0], -1).t()
        return weight

    def bias(self, *, partial: bool = False) -> Tensor | None:
        """Local and flat."""
        bias = local_part(self.module.bias, partial=partial)
        return None if bias is None else bias.reshape(-1)


@dataclass
class _ColumnForward(_Forward):
    enters: bool
    collected: int | None

    def __call__(self, x: Tensor) -> Tensor:
        x = f(x, self.axis) if self.enters else x
        out = column_linear(x, self.weight(), self.bias())
        return out if self.collected is None else _collect_features(out, self.axis, self.collected)


def _collect_features(x: Tensor, axis: Axis, features: int) -> Tensor:
    """All ranks' features; the last ranks may have fewer (of 50257, say)."""
    each = -(-features // axis.size)
    if x.shape[-1] < each:
        x = functional.pad(x, (0, each - x.shape[-1]))
    whole = collect(x, axis, -1)
    return whole if whole.shape[-1] == features else whole.narrow(-1, 0, features).contiguous()


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
    """One that can say beforehand whether it fits."""

    def check(self, module: nn.Module, ways: int) -> None:
        """Does the module divide over so many ranks?

        Raises:
            UsageError: it does not.
            UnsupportedModule: it is of another kind.
        """


class ColumnParallel(Style):
    """Shard a linear layer's outputs. Behind a `BlockInput` with ``dim`` it holds the shard of its input.

    Args:
        unit: outputs that belong together (of one head) and stay on one rank.
        groups: the outputs are this many layers in one (GPT-2's q, k and v), each sharded by itself. Its weight gets a
            dim for them, h × groups × n, so that a shard is a part of one dim in every checkpoint.
        enters: its input is whole on every rank and no `BlockInput` stands before it.
        collected: every rank gets all outputs (logits, for a loss that all ranks compute).
    """

    def __init__(self, *, unit: int = 1, groups: int = 1, enters: bool = False, collected: bool = False) -> None:
        super().__init__()
        self.unit = unit
        self.groups = groups
        self.enters = enters
        self.collected = collected

    def check(self, module: nn.Module, ways: int) -> None:
        """See `Style.check`."""
        units = _linear_sizes(module)[1] // self.groups // self.unit
        if not self.collected and units % ways:
            what = f"heads of {self.unit} outputs" if self.unit > 1 else "outputs"
            raise UsageError(f"{units} {what} do not divide over {ways} tensor-parallel ranks")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = Axis.of(device_mesh)
        self.check(module, axis.size)
        features = _linear_sizes(module)[1]
        if self.groups > 1:
            _group(module, self.groups)
        last = module.weight.dim() - 1 if _is_conv1d(module) else 0
        distribute(self, module, "weight", device_mesh, Shard(last))
        if module.bias is not None:
            distribute(self, module, "bias", device_mesh, Shard(module.bias.dim() - 1))
        module.forward = _ColumnForward(module, axis, self.enters, features if self.collected else None)
        return module


class RowParallel(Style):
    """Shard a linear layer's inputs, and sum what the ranks get; the bias is added to the sum.

    Args:
        dim: the sum is scattered along this dim; None: every rank gets all of it.
        draws: the loan of `BlockInput` ends here.
    """

    def __init__(self, *, dim: int | None = None, draws: OwnDraws | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.draws = draws

    def check(self, module: nn.Module, ways: int) -> None:
        """See `Style.check`."""
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
        raise UnsupportedModule(f"got a {type(module).__name__}; expected nn.Linear or transformers' Conv1D")
    inputs, outputs = module.weight.shape if _is_conv1d(module) else module.weight.shape[::-1]
    return inputs, outputs


def _group(module: nn.Module, groups: int) -> None:
    for name, parameter in module.named_parameters():
        shape = (*parameter.shape[:-1], groups, parameter.shape[-1] // groups)
        made = nn.Parameter(parameter.detach().view(shape), requires_grad=parameter.requires_grad)
        setattr(module, name, made)


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


def _end_loan(draws: OwnDraws, *_: Any) -> None:
    draws.end()


class BlockInput(Style):
    """The input of an attention or feed-forward block whose layers are sharded: f, or g along ``dim``.

    Args:
        divided: names of whole numbers on the module that count what is sharded, to be divided by the ranks.
        draws: what the module draws, from here to the `RowParallel` with the same loan, is each rank's own.
    """

    def __init__(self, *, dim: int | None = None, divided: Sequence[str] = (), draws: OwnDraws | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.divided = tuple(divided)
        self.draws = draws

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = Axis.of(device_mesh)
        for name in self.divided:
            setattr(module, name, getattr(module, name) // axis.size)
        module.register_forward_pre_hook(_InputHook(_Enter(axis, self.dim, self.draws, module)), with_kwargs=True)
        if self.draws is not None:
            module.register_forward_hook(partial(_end_loan, self.draws), always_call=True)  # where the forward failed
        return module


class SplitInput(Style):
    """Whole activations become shards along ``dim`` before the module, which has no sharded parameters."""

    def __init__(self, *, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        move = partial(split, axis=Axis.of(device_mesh), dim=self.dim)
        module.register_forward_pre_hook(_InputHook(move), with_kwargs=True)
        return module


# everything else ------------------------------------------------------------------------------------------------------


@dataclass
class _ReplicatedForward:
    """Runs a module's own forward with local tensors in the place of its parameters."""

    module: nn.Module
    axis: Axis
    partial: bool
    split_ids: int | None
    gathers: int | None
    forward: Callable[..., Any] = field(repr=False)

    def __call__(self, x: Tensor) -> Tensor:
        if self.split_ids is not None:
            x = split(x, self.axis, self.split_ids)
        table = self.module._parameters
        held = dict(table)
        try:
            for name, parameter in held.items():
                table[name] = local_part(parameter, partial=self.partial)
            out: Tensor = self.forward(x)
        finally:
            table.update(held)
        return out if self.gathers is None else gather_input(out, self.axis, self.gathers)


class Replicated(Style):
    """A norm, or another layer of which every rank has the whole.

    Args:
        sharded: it works on a part of its own (of the sequence, of the heads).
        split_ids: it looks up ids, of which it takes its part along this dim.
        gathers: its output is the input of a column-parallel layer that is not its neighbour (the head), gathered along
            this dim.
    """

    def __init__(self, *, sharded: bool = False, split_ids: int | None = None, gathers: int | None = None) -> None:
        super().__init__()
        self.sharded = sharded
        self.split_ids = split_ids
        self.gathers = gathers

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


class VocabularyParallel(Style):
    """Shard an embedding's rows. Every rank looks up the ids that it has, and the results are summed.

    Args:
        dim: the sum is scattered along this dim; None: every rank gets all of it.
    """

    def __init__(self, *, dim: int | None = None) -> None:
        super().__init__()
        self.dim = dim

    def check(self, module: nn.Module, ways: int) -> None:
        """See `Style.check`."""
        if type(module) is not nn.Embedding or module.max_norm is not None or module.scale_grad_by_freq:
            raise UnsupportedModule(f"got {module}; expected nn.Embedding without max_norm and scale_grad_by_freq")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh.size())
        distribute(self, module, "weight", device_mesh, Shard(0))
        module.forward = _VocabularyForward(module, Axis.of(device_mesh), self.dim)
        return module
