"""Context parallelism for the models that are known: what stands in the place of attention's core.

Known are the models of record, and transformers' models of which `known_models` knows the layers. In a model of
record the core is an attribute of each attention; in transformers it is a function that the configuration names, and a
name of ours is registered there, as other people's kernels are (`AttentionInterface.register`).

A model is then called with this rank's tokens and their positions (`Context.take`, `Context.positions`), and with
labels that were shifted before they were taken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jettison.core.errors import UnsupportedModule, UsageError
from jettison.parallel.context import Context, causal_attention, gathered
from jettison.parallel.known_models import HEADS, LAYERS, STACKS, class_of
from jettison.runtime.planned import PlannedForward

NAME: Final = "jettison_context"
"""Of the function, among transformers' attention functions."""
_RECORD: Final = "jettison.models.reference"
_CORES: Final = {f"{_RECORD}.GptAttention": False, f"{_RECORD}.LlamaAttention": True}
"""Attentions of the models of record: is the core a kernel that knows a causal mask?"""


@dataclass(frozen=True)
class ContextCore:
    """A core whose rows meet the keys of all ranks.

    Args:
        core: of one rank, called with what is gathered.
        fused: without a mask it is causal, and one kernel.
    """

    context: Context
    core: Callable[..., Tensor]
    fused: bool

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *more: Any) -> Tensor:
        """As the core, with some rows of q, k and v."""
        if self.fused and mask is None:
            return causal_attention(q, k, v, self.context)
        return self.core(q, gathered(k, self.context), gathered(v, self.context), mask, *more)


@dataclass(frozen=True)
class HubShare:
    """What our function among transformers' finds on an attention: the ranks, and the kernel that was asked for."""

    context: Context
    kernel: str


def apply_context_parallel(model: nn.Module, mesh: DeviceMesh) -> Context:
    """Have attention meet the keys of all ranks of an axis, in place; what to cut a batch with is returned.

    Before or after `apply_tensor_parallel`; before plans are made, FSDP, and DistributedDataParallel, which average
    gradients over this axis as over data-parallel ranks: the mean of all ranks' mean losses is the loss.

    Args:
        mesh: the context-parallel axis alone, ``mesh["cp"]``.

    Raises:
        UnsupportedModule: it is not known where this model's attention is, or it is of a kind that is not known here.
        UsageError: it runs under a plan, or is context parallel already.
    """
    context = Context.of(mesh)
    if context.axis.size > 1:
        set_cores(model, context)
    return context


def set_cores(model: nn.Module, context: Context) -> None:
    """The same for a place that is given; nothing is sent before the model is called."""
    for path, module in model.named_modules():
        if isinstance(module.forward, PlannedForward):
            raise UsageError(
                f"{path or 'the model'} runs under a plan; apply context parallelism before plans are made"
            )
    kind = class_of(model)
    if kind in HEADS:
        _apply_to_hub(model, context)
    elif kind in STACKS and kind.startswith(_RECORD):
        _apply_to_record(model, context)
    else:
        names = [name.rpartition(".")[2] for name in HEADS] + ["Gpt", "Llama"]
        raise UnsupportedModule(
            f"context parallelism: it is not known where a {type(model).__name__} has the core of its attention; known "
            f"are {', '.join(sorted(names))}"
        )


def _apply_to_record(model: nn.Module, context: Context) -> None:
    for module in model.modules():
        fused = _CORES.get(class_of(module))
        if fused is None:
            continue
        attention: Any = module
        if isinstance(attention.core, ContextCore):
            raise UsageError("the model is context parallel already; apply it once")
        attention.core = ContextCore(context, attention.core, fused)


def _apply_to_hub(model: nn.Module, context: Context) -> None:
    from transformers import AttentionInterface

    config: Any = model.config
    kernel = config._attn_implementation
    if kernel == NAME:
        raise UsageError("the model is context parallel already; apply it once")
    _check(model, kernel)
    AttentionInterface.register(NAME, _hub_attention)
    for attention in _hub_attentions(model):
        setattr(attention, _SHARE, HubShare(context, kernel))
    config._attn_implementation = NAME


_SHARE: Final = "context_share"


def _hub_attentions(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        form = LAYERS.get(class_of(module))
        if form is not None:
            yield module.get_submodule(form.attention)


def _check(model: nn.Module, kernel: str) -> None:
    """Is attention the causal one, whose core we know?

    Raises:
        UnsupportedModule: no.
    """
    config: Any = model.config
    why = ""
    if kernel not in ("eager", "sdpa"):
        why = f"its attention is {kernel!r}; expected eager or sdpa"
    elif set(getattr(config, "layer_types", None) or ()) - {"full_attention"} or (
        getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    ):
        why = "its attention has a sliding window"
    elif getattr(config, "reorder_and_upcast_attn", False):
        why = "its attention computes scores in fp32 by code of its own (reorder_and_upcast_attn)"
    elif kernel == "sdpa" and any(getattr(config, name, None) for name in ("attention_dropout", "attn_pdrop")):
        why = "its attention has dropout, for which no kernel is known here; expected attention = eager, or none"
    if why:
        raise UnsupportedModule(f"context parallelism cannot be applied to this {type(model).__name__}: {why}")


def asked_kernel(model: nn.Module) -> str | None:
    """What attention of one of transformers' models was, before ours took its place; None for other models."""
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
    """As transformers' own; a mask, where there is one, has this rank's rows of all keys."""
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
    found: tuple[Tensor, Tensor | None] = core(
        module, query, *whole, attention_mask, scaling=scaling, dropout=dropout, **more
    )
    return found
