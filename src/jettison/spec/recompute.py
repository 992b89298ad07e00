"""What is computed again: a mode by its word, for all layers or some, and what of them waits on the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import isqrt
from typing import Final

from jettison.core.errors import UsageError
from jettison.spec.kernels import Kernels
from jettison.spec.model import Attention, LatentAttention, Mlp, ModelSpec, Moe

# lists of modules -----------------------------------------------------------------------------------------------------
#
# Lists of modules, as Megatron-Core writes them: parts of a layer that are computed again, or wait on the host
# ``megatron/core/transformer/transformer_config.py`` (0.19): ``recompute_modules`` with the granularity "selective",
# and ``offload_modules`` with ``fine_grained_activation_offloading``; ``__post_init__`` has what goes with what. What
# each of them keeps and frees: `solve.modules`.


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
    """Refuse lists that do not go together, as ``TransformerConfig.__post_init__`` does."""
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
    """Refuse parts that this model, in this code, has not.

    Args:
        own_norms: TransformerEngine has the products, and a norm is a module of its own where it cannot be part of one:
            NOTE [ Norms of their own ] in `solve.modules`.
    """
    if not kernels.module_lists:
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


# modes ----------------------------------------------------------------------------------------------------------------


class Mode(StrEnum):
    """What happens to what a layer would save."""

    NONE = "none"
    SELECTIVE = "selective"  # the attention core goes (arXiv 2205.05198 §5)
    SELECTIVE_OP = "selective-op"  # outputs of matrix products and fused attention stay
    SELECTIVE_OP_ALTERNATE = "selective-op-alternate"  # the same, but every second product goes (torchtitan)
    FULL = "full"  # a layer's input stays
    EVERY = "every"  # segments of K layers: the segment's input stays (arXiv 1604.06174)
    BLOCK = "block"  # the first N layers of a stage are full, the rest is none (Megatron's block method)
    INTERVAL = "interval"  # one layer in K is full, the rest is none (torchtitan's selective layer)
    PARTS = "parts"  # attention, feed-forward block and norms of a layer are a checkpoint each: `solve.policy`
    MODULES = "modules"  # parts of a layer by Megatron's names, as lists above
    AUTO = "auto"  # as a planner decides for a budget


MOST: Final = -1
"""Of micro-batches kept whole: as many as fit, which `predict.whole_micro_batches` finds."""
_WITH_NUMBER = {Mode.EVERY: "K", Mode.BLOCK: "N", Mode.INTERVAL: "K"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """A mode and its number. ``offload`` sends what stays of each layer to the host until backward.

    ``whole``: of each window of micro-batches that a pipeline stage has in flight, so many keep everything, the same
    number on every stage (arXiv 2205.05198 Appendix C; Megatron's
    ``num_microbatches_with_partial_activation_checkpoints``).

    ``reentrant``: checkpoints differentiate what they recompute in a backward of its own (``use_reentrant=True``), and
    are around what FSDP has wrapped.

    ``modules``: parts of a layer that are computed again; ``sent``: those of which everything large waits on the host.

    Raises:
        UsageError: a mode that needs a number has none, or one below 1; micro-batches kept whole where all are, or
            beside offloading; lists of modules that do not go together, or beside another mode.
    """

    mode: Mode = Mode.NONE
    number: int = 1
    offload: bool = False
    whole: int = 0
    modules: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    reentrant: bool = False

    def __post_init__(self) -> None:
        check_lists(self.modules, self.sent)
        if self.sent and (self.offload or self.mode not in (Mode.NONE, Mode.MODULES)):
            other = "--offload" if self.offload else f"--recompute {self.mode}"
            raise UsageError(f"--offload-modules does not go with {other}; leave one of them away")
        if self.number < 1:
            raise UsageError(f"got --recompute {self.mode}:{self.number}; expected a number of 1 or more")
        if self.whole < MOST:
            raise UsageError(f"got --whole-micro-batches {self.whole}; expected 0 or more")
        if self.whole and self.mode is Mode.NONE:
            raise UsageError(
                "got --whole-micro-batches and --recompute none, which keeps all of them whole; give another mode for "
                "the others"
            )
        if self.whole and self.to_host:
            flag = "--offload" if self.offload else "--offload-modules"
            raise UsageError(f"--whole-micro-batches does not go with {flag}; leave one of them away")

    @classmethod
    def parse(cls, text: str, *, layers: int, offload: bool = False, whole: int = 0) -> Recompute:
        """Read ``none``, ``selective``, ``selective-op``, ``selective-op-alternate``, ``full``, ``every:K``,
        ``block:N``, ``interval:K``, ``sqrt`` (segments of √L layers), ``parts``, ``modules:core_attn+mlp`` or ``auto``.

        Raises:
            UsageError: none of these.
        """
        word, colon, number = text.partition(":")
        if word == Mode.MODULES and colon:
            modules = listed(number, "--recompute-modules")
            return cls(mode=Mode.MODULES, modules=modules, offload=offload, whole=whole)
        if word == "sqrt" and not colon:
            return cls(mode=Mode.EVERY, number=max(1, round_sqrt(layers)), offload=offload, whole=whole)
        known = {str(mode) for mode in Mode}
        with_number = {str(mode) for mode in _WITH_NUMBER}
        if (
            word not in known - {Mode.MODULES}
            or bool(colon) != (word in with_number)
            or (colon and not number.isdecimal())
        ):
            names = {**_WITH_NUMBER, Mode.MODULES: "core_attn+mlp"}
            words = [f"{m}:{names[m]}" if m in names else str(m) for m in Mode]
            raise UsageError(f"got --recompute {text!r}; expected one of {', '.join([*words, 'sqrt'])}")
        return cls(mode=Mode(word), number=int(number) if colon else 1, offload=offload, whole=whole)

    def __str__(self) -> str:
        if self.mode is Mode.MODULES:
            return f"{self.mode}:{'+'.join(self.modules)}"
        return f"{self.mode}:{self.number}" if self.mode in _WITH_NUMBER else str(self.mode)

    @property
    def to_host(self) -> bool:
        """Does anything wait there?"""
        return self.offload or bool(self.sent)

    @property
    def words(self) -> str:
        """With what is offloaded, and what is kept whole."""
        text = f"{self}, offloaded" if self.offload else str(self)
        text += f", {'+'.join(self.sent)} on the host" if self.sent else ""
        return f"{text}, {self.whole} of each window whole" if self.whole > 0 else text


NOTHING_AGAIN: Final = Recompute()


def round_sqrt(layers: int) -> int:
    """The whole number nearest to √L: the segment length that holds fewest bytes (arXiv 1604.06174 §4.1)."""
    root = isqrt(layers)
    return root + (layers - root * root > root)
