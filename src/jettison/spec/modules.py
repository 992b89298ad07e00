"""Lists of modules, as Megatron-Core writes them: parts of a layer that are computed again, or wait on the host.

``megatron/core/transformer/transformer_config.py`` (0.19): ``recompute_modules`` with the granularity "selective", and
``offload_modules`` with ``fine_grained_activation_offloading``; ``__post_init__`` has what goes with what. What each of
them keeps and frees: `solve.modules`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from jettison.core.errors import UsageError
from jettison.spec.kernels import Kernels
from jettison.spec.model import Attention, LatentAttention, Mlp, ModelSpec, Moe

CORE_ATTENTION: Final = "core_attn"
RECOMPUTED: Final = (CORE_ATTENTION, "layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts", "moe")
OFFLOADED: Final = ("attn_norm", "qkv_linear", CORE_ATTENTION, "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
_INSIDE_EXPERTS: Final = frozenset({"moe_act", "expert_fc1"})


def listed(text: str, flag: str) -> tuple[str, ...]:
    """Read ``core_attn,mlp``; blanks separate as well, as on Megatron's command line.

    Raises:
        UsageError: a module that is not known, or none.
    """
    known = RECOMPUTED if flag == "--recompute-modules" else OFFLOADED
    found = tuple(dict.fromkeys(text.replace(",", " ").replace("+", " ").split()))
    for name in found or ("",):
        if name not in known:
            raise UsageError(f"got {flag} {text}, and {name or 'nothing'!r}; expected some of {', '.join(known)}")
    return tuple(name for name in known if name in found)


def check_lists(again: tuple[str, ...], sent: tuple[str, ...]) -> None:
    """Do these go together? As ``TransformerConfig.__post_init__`` has it.

    Raises:
        UsageError: no.
    """
    if "attn_proj" in sent and CORE_ATTENTION not in sent:
        raise UsageError(
            "got --offload-modules attn_proj without core_attn, which needs what attn_proj reads; give both"
        )
    inside = _INSIDE_EXPERTS.intersection(sent)
    if "moe" in again and inside:
        raise UsageError(
            f"got --offload-modules {','.join(sorted(inside))} and --recompute-modules moe, which computes all of the "
            "experts again; leave one of them away"
        )


def check_parts(model: ModelSpec, kernels: Kernels, names: Iterable[str], *, own_norms: bool) -> None:
    """Has this model, in this code, such parts?

    Args:
        own_norms: TransformerEngine has the products, and a norm is a module of its own where it cannot be part of one:
            NOTE [ Norms of their own ] in `solve.modules`.

    Raises:
        UsageError: no.
    """
    if kernels.name != "megatron":
        raise UsageError(
            f"got lists of modules with --kernels {kernels.name}; Megatron-Core alone takes them: give --kernels "
            "megatron or --like megatron-0.19, or another word of --recompute"
        )
    there = _there(model, kernels, own_norms=own_norms)
    for name in names:
        if name not in there:
            norm = " of its own, since TransformerEngine makes norms part of the next product" if "norm" in name else ""
            raise UsageError(
                f"got the module {name}, and no layer of {model.name} has one{norm}: it would free nothing. Leave it "
                "away"
            )


def _there(model: ModelSpec, kernels: Kernels, *, own_norms: bool) -> frozenset[str]:
    """Names that mean something in some layer."""
    experts = [layer.mlp for layer in model.described if isinstance(layer.mlp, Moe)]
    latent = any(isinstance(layer.attention, LatentAttention) for layer in model.described)
    attends = any(isinstance(layer.attention, Attention | LatentAttention) for layer in model.described)
    found = {CORE_ATTENTION, "qkv_linear", "attn_proj"} if attends else set()
    found |= {"mlp"} if any(isinstance(layer.mlp, Mlp) for layer in model.described) else set()
    found |= {"moe"} if experts else set()
    found |= {"moe_act", "expert_fc1"} if experts and not kernels.sequential_experts else set()
    found |= {"shared_experts"} if any(moe.shared_ffn for moe in experts) else set()
    found |= {"mla_up_proj"} if latent else set()
    found |= {"attn_norm", "layernorm"} if latent or not own_norms else set()
    found |= {"mlp_norm", "layernorm"} if experts or not own_norms else set()
    return frozenset(found)
