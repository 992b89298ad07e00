"""Context parallelism: every rank has a part of each sequence, and its queries attend to the keys of all ranks.

NOTE [ Load balance of causal attention ]
A row of causal attention attends to the rows before it, so the first rows of a sequence have little work and the last
ones much. A sequence is cut into 2c pieces, and rank r has the pieces r and 2c-1-r: all ranks then have equal work (the
order of arXiv 2407.21783 §3.3.2, and of Megatron's and torch's own). All other modules of a transformer treat tokens
one by one, so that their order does not matter; their positions are passed with them.

NOTE [ All-gathered keys ]
Keys and values of all ranks are all-gathered before the core and put into the sequence's order (the all-gather form of
the same section); ring attention would pass them on piece by piece. They are not saved: backward all-gathers them again
and reduce-scatters their gradients. A rank saves its rows of q, k, v and of the output, and one statistic for each row.
The collectives are torch's functional ones, which a recording sees. Ops and shapes are the same on every rank, so that
one plan serves all ranks and they recompute the same ops.

NOTE [ Causal rows ]
Rows of causal attention that begin somewhere in the sequence are ops of their own, `jettison::causal_rows` and
`jettison::causal_rows_backward`: one fused kernel's forward, and its backward. What the kernel reads depends on where a
rank's rows begin; as one op over whole keys it has the same shapes on all ranks, so that one plan is for all of them.

b micro-batch · a heads · k key-value heads · n (m: a kernel's) rows of a rank · s = nc sequence · d head dim · c ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from jettison.core.errors import UnsupportedModule, UsageError
from jettison.parallel.known_models import RECORD, HeadForm, LayerForm, StackForm, class_of, known, refuse_planned
from jettison.parallel.tp_collectives import Axis

_c10d, _aten = torch.ops._c10d_functional, torch.ops.aten
ROWS = -2
"""The dim of q, k and v that the sequence is cut along."""


@dataclass(frozen=True, slots=True)
class Context:
    """One rank's part of every sequence, see NOTE [ Load balance of causal attention ]."""

    axis: Axis

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Context:
        """Along a mesh axis, such as ``mesh["cp"]``."""
        return cls(Axis.of(mesh))

    @property
    def pieces(self) -> int:
        """Number of pieces that a sequence is cut into."""
        return 2 * self.axis.size

    def own(self, rank: int | None = None) -> tuple[int, int]:
        """Numbers of the two pieces that a rank has; this one where none is named."""
        number = self.axis.rank if rank is None else rank
        return number, self.pieces - 1 - number

    def check(self, seq: int) -> int:
        """Number of tokens in a piece of a sequence of this length. Raise `UsageError` if it is not divisible."""
        if seq % self.pieces:
            raise UsageError(
                f"got sequences of {seq} tokens, which do not divide into the {self.pieces} pieces of "
                f"{self.axis.size} context-parallel ranks; expected a multiple of {self.pieces}"
            )
        return seq // self.pieces

    def positions(self, seq: int, device: torch.device | None = None) -> Tensor:
        """Positions of this rank's tokens in their sequence: n numbers."""
        each = self.check(seq)
        return torch.cat([torch.arange(i * each, (i + 1) * each, device=device) for i in self.own()])

    def take(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that all ranks have, along the sequence's dim."""
        each = self.check(x.shape[dim])
        return torch.cat([x.narrow(dim, i * each, each) for i in self.own()], dim=dim)

    def mean(self, x: Tensor) -> Tensor:
        """Mean of all ranks' tensors; no gradient goes through."""
        if self.axis.size == 1:
            return x
        return _c10d.wait_tensor(_c10d.all_reduce(x.detach().contiguous(), "avg", self.axis.name))

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all ranks in the sequence's order: … × n × d to … × s × d."""
        stacked = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), self.axis.size, self.axis.name))
        halves = [part.chunk(2, dim=ROWS) for part in stacked.chunk(self.axis.size)]
        return torch.cat([*(first for first, _ in halves), *(last for _, last in reversed(halves))], dim=ROWS)

    def scatter(self, pieces: Sequence[Tensor]) -> Tensor:
        """This rank's rows of the sum over all ranks of these pieces of a sequence."""
        size = self.axis.size
        stacked = torch.stack([pieces[i] for rank in range(size) for i in self.own(rank)])
        own = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(stacked, "sum", size, self.axis.name))
        return torch.cat(own.unbind(), dim=ROWS)


class _Gather(torch.autograd.Function):
    """All-gather of keys for an eager core, or one with a mask. Saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context) -> Tensor:
        ctx.context = context
        return context.gather(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        context: Context = ctx.context
        return context.scatter(dy.chunk(context.pieces, dim=ROWS)), None


def gathered(x: Tensor, context: Context) -> Tensor:
    """All rows of keys or values, differentiable; their gradients are summed over the ranks."""
    return x if context.axis.size == 1 else _Gather.apply(x, context)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float | None = None) -> Tensor:
    """softmax(q k^T) v of this rank's rows over all earlier rows of the sequence, by a fused kernel.

    See NOTE [ All-gathered keys ]. Under autocast in its dtype, as torch's `scaled_dot_product_attention` is.

    Args:
        q: b × a × n × d.
        k, v: b × k × n × d; k divides a.
    """
    if not kernel_fits(q):
        return _masked(q, k, v, context, scale)
    kind = q.device.type
    if torch.is_autocast_enabled(kind) and q.dtype is not torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    return _CausalAttention.apply(q, k, v, context, q.shape[-1] ** -0.5 if scale is None else scale)


def _masked(q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float | None) -> Tensor:
    rows = context.positions(q.shape[ROWS] * context.axis.size, q.device)
    mask = _mask(q, rows, len(rows) * context.axis.size)
    k, v = (gathered(x, context).repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float) -> Tensor:
        whole = context.gather(k), context.gather(v)
        each = q.shape[ROWS] // 2
        made = [
            causal_rows(part, *whole, i * each, scale)
            for part, i in zip(q.chunk(2, dim=ROWS), context.own(), strict=True)
        ]
        out = _joined([part for part, _ in made], like=q)
        sums = torch.cat([part for _, part in made], dim=2)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.context, ctx.scale = context, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, sums = ctx.saved_tensors
        context: Context = ctx.context
        whole = context.gather(k), context.gather(v)
        parts = zip(*(x.chunk(2, dim=2) for x in (dy, q, out, sums)), strict=True)
        (dy_0, q_0, out_0, sums_0), (dy_1, q_1, out_1, sums_1) = parts
        first, last = (i * q_0.shape[2] for i in context.own())
        dq_1, *dkv = causal_rows_backward(dy_1, q_1, *whole, out_1, sums_1, last, ctx.scale)
        dq_0, *dkv_0 = causal_rows_backward(dy_0, q_0, *whole, out_0, sums_0, first, ctx.scale)
        del whole
        while dkv_0:  # the first rows read a part of what the last ones read
            more = dkv_0.pop()
            dkv[len(dkv_0)].narrow(2, 0, more.shape[2]).add_(more)
        del more
        dk = context.scatter(_pieces(dkv.pop(0), context))
        dv = context.scatter(_pieces(dkv.pop(), context))
        return _joined([dq_0, dq_1], like=q), dk, dv, None, None


def _joined(parts: Sequence[Tensor], *, like: Tensor) -> Tensor:
    """Rows concatenated, in the memory layout (heads inside or outside of rows) of the tensor ``like``."""
    if like.stride(1) < like.stride(2):
        return torch.cat([part.transpose(1, 2) for part in parts], dim=1).transpose(1, 2)
    return torch.cat(list(parts), dim=2)


def _pieces(x: Tensor, context: Context) -> list[Tensor]:
    """The pieces of a sequence that this rank's rows read, and nothing for those after them."""
    known = list(x.split(x.shape[ROWS] // (context.own()[1] + 1), dim=ROWS))
    return known + [torch.zeros_like(known[0])] * (context.pieces - len(known))


# the kernels: NOTE [ Causal rows ] ----------------------------------------------------------------------------------


def kernel_fits(q: Tensor) -> bool:
    """Whether a fused kernel takes queries like these. CUDA's with causal rows is for 16 bits and some widths."""
    if q.device.type in ("cpu", "meta"):
        return q.is_floating_point()
    d = q.shape[-1]
    return q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and d % 8 == 0 and d <= 256


@torch.library.custom_op("jettison::causal_rows", mutates_args=())
def causal_rows(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of the rows from ``start`` on, and the log-sum-exp of each row. ``q``: b
    × a × m × d; ``k``, ``v``: b × k × s × d, the whole sequence.
    """
    k, v = (part.narrow(2, 0, start + q.shape[2]) for part in (k, v))
    if q.is_cuda:  # its causal mask is aligned to the lower right corner
        out, sums, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)
        return out, sums
    mask = _mask(q, torch.arange(start, k.shape[2], device=q.device), k.shape[2])
    out, sums = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    return out, sums.contiguous()


@torch.library.custom_op("jettison::causal_rows_backward", mutates_args=())
def causal_rows_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, start: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, and of the keys and values up to the last of these rows."""
    k, v = (part.narrow(2, 0, start + q.shape[2]) for part in (k, v))
    if q.is_cuda:
        places: tuple[Any, ...] = (None, None, q.shape[2], k.shape[2])
        drawn = (torch.empty(n, dtype=torch.uint64, device=q.device) for n in (2, 0))
        made = _aten._scaled_dot_product_flash_attention_backward(
            dy, q, k, v, out, sums, *places, 0.0, True, *drawn, scale=scale
        )
    else:
        mask = _mask(q, torch.arange(start, k.shape[2], device=q.device), k.shape[2])
        made = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, k, v, out, sums, 0.0, False, attn_mask=mask, scale=scale
        )
    dq, dk, dv = made
    return dq, dk, dv


def _mask(q: Tensor, rows: Tensor, keys: int) -> Tensor:
    """Mask by the rows' positions: minus infinity where a key comes after the row, 0 elsewhere."""
    later = torch.arange(keys, device=q.device) > rows.unsqueeze(1)
    return torch.zeros(later.shape, dtype=q.dtype, device=q.device).masked_fill_(later, float("-inf"))


@causal_rows.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=wide)


@causal_rows_backward.register_fake
def _(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, start: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    keys = start + q.shape[2]
    sizes = ((x, min(x.shape[2], n)) for x, n in ((q, keys), (k, keys), (v, keys)))
    dq, dk, dv = (x.new_empty((x.shape[0], n, x.shape[1], x.shape[3])).transpose(1, 2) for x, n in sizes)
    return dq, dk, dv


@register_flop_formula(torch.ops.jettison.causal_rows)
def _flops(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """FLOPs over all keys, masked ones included, as for all attention."""
    b, a, m, d = q
    return int(2 * b * a * m * k[2] * (d + v[3]))


# models that are known ------------------------------------------------------------------------------------------------
#
# Known are the models of record, whose attentions have their core as an attribute, and transformers' models of which
# `known_models` knows the layers: there the core is a function that the configuration names, and ours is registered
# (`AttentionInterface.register`). A model is then called with this rank's tokens and their positions (`Context.take`,
# `Context.positions`), and with labels that were shifted before they were taken.

NAME: Final = "jettison_context"
"""Name of the function among transformers' attention functions."""
_CORES: Final = {f"{RECORD}.GptAttention": False, f"{RECORD}.LlamaAttention": True}
"""Attentions of the models of record, and whether the core is a kernel that knows a causal mask."""


@dataclass(frozen=True)
class ContextCore:
    """Attention core in which a rank's rows attend to the keys of all ranks."""

    context: Context
    core: Callable[..., Tensor]  # of one rank, called with what is gathered
    fused: bool  # without a mask it is causal, and one kernel

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *more: Any) -> Tensor:
        """As the core, with some rows of q, k and v."""
        if self.fused and mask is None:
            return causal_attention(q, k, v, self.context)
        return self.core(q, gathered(k, self.context), gathered(v, self.context), mask, *more)


@dataclass(frozen=True)
class HubShare:
    """Data that our attention function needs on a module of transformers': the ranks, and the configured kernel."""

    context: Context
    kernel: str


def apply_context_parallel(model: nn.Module, mesh: DeviceMesh) -> Context:
    """Let attention read the keys of all ranks of an axis, in place. Return the `Context` that shards a batch.

    Before or after `apply_tensor_parallel`; before plans are made, FSDP, and DistributedDataParallel, which average
    gradients over this axis as over data-parallel ranks: the mean of all ranks' mean losses is the loss.

    Args:
        mesh: the context-parallel axis alone, ``mesh["cp"]``.

    Raises:
        UnsupportedModule: the model's attention cannot be found, or is of an unknown kind.
        UsageError: it runs under a plan, or is context parallel already.
    """
    context = Context.of(mesh)
    if context.axis.size > 1:
        set_cores(model, context)
    return context


def set_cores(model: nn.Module, context: Context) -> None:
    """As `apply_context_parallel`, for a given `Context`; no communication before the model is called."""
    refuse_planned(model, "context parallelism")
    kind = class_of(model)
    if kind in known(HeadForm):
        _apply_to_hub(model, context)
    elif kind in known(StackForm) and kind.startswith(RECORD):
        attentions: list[Any] = [module for module in model.modules() if class_of(module) in _CORES]
        if any(isinstance(attention.core, ContextCore) for attention in attentions):
            raise UsageError("the model is context parallel already; apply it once")
        for attention in attentions:
            attention.core = ContextCore(context, attention.core, _CORES[class_of(attention)])
    else:
        ours = (name for name in known(StackForm) if name.startswith(RECORD))
        names = [name.rpartition(".")[2] for name in (*known(HeadForm), *ours)]
        raise UnsupportedModule(
            f"context parallelism: the attention core of {type(model).__name__} is unknown; known models: "
            f"{', '.join(sorted(names))}"
        )


def _apply_to_hub(model: nn.Module, context: Context) -> None:
    from transformers import AttentionInterface

    config: Any = model.config
    kernel = config._attn_implementation
    if kernel == NAME:
        raise UsageError("the model is context parallel already; apply it once")
    _check(model, kernel)
    AttentionInterface.register(NAME, _hub_attention)
    for module in model.modules():
        form = known(LayerForm).get(class_of(module))
        if form is not None:
            setattr(module.get_submodule(form.attention), _SHARE, HubShare(context, kernel))
    config._attn_implementation = NAME


_SHARE: Final = "context_share"


def _check(model: nn.Module, kernel: str) -> None:
    """Raise `UnsupportedModule` unless attention is causal, with a known core."""
    config: Any = model.config
    why = ""
    if kernel not in ("eager", "sdpa"):
        why = f"its attention is {kernel!r}; expected eager or sdpa"
    elif set(getattr(config, "layer_types", None) or ()) - {"full_attention"} or has_window(config):
        why = "its attention has a sliding window"
    elif getattr(config, "reorder_and_upcast_attn", False):
        why = "its attention computes scores in fp32 by code of its own (reorder_and_upcast_attn)"
    elif kernel == "sdpa" and any(getattr(config, name, None) for name in ("attention_dropout", "attn_pdrop")):
        why = "its attention has dropout, for which no kernel is known here; expected attention = eager, or none"
    if why:
        raise UnsupportedModule(f"context parallelism cannot be applied to this {type(model).__name__}: {why}")


def has_window(config: Any) -> bool:
    """Whether attention of one of transformers' models sees a window only."""
    return getattr(config, "sliding_window", None) is not None and bool(getattr(config, "use_sliding_window", True))


def asked_kernel(model: nn.Module) -> str | None:
    """Attention kernel of a transformers model before ours replaced it; None for other models."""
    shares = (getattr(module, _SHARE, None) for module in model.modules())
    return next((share.kernel for share in shares if share is not None), None)


def _hub_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function for transformers; a mask has this rank's rows and all keys."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    share: HubShare = getattr(module, _SHARE)
    if attention_mask is None:
        if share.kernel == "sdpa":
            return causal_attention(query, key, value, share.context, scaling).transpose(1, 2), None
        raise UsageError(
            "context parallelism: got no mask for eager attention; expected attention_mask, this rank's rows of all "
            "keys (b × 1 × n × s), 0 where a row may look and minus infinity where it may not"
        )
    own: Any = sys.modules[type(module).__module__]
    core = own.eager_attention_forward if share.kernel == "eager" else ALL_ATTENTION_FUNCTIONS["sdpa"]
    whole = (gathered(x, share.context) for x in (key, value))
    return core(module, query, *whole, attention_mask, scaling=scaling, dropout=dropout, **more)
