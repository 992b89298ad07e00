"""Recompute modes of all layers or some, with lists of recomputed and offloaded modules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import isqrt
from typing import Final, Self

from jettison.core.errors import UsageError
from jettison.spec.kernels import Kernels, sets_with
from jettison.spec.model import Attention, LatentAttention, Mlp, ModelSpec, Moe

# lists of modules -----------------------------------------------------------------------------------------------------
#
# Lists of recomputed and offloaded modules, named as in Megatron-Core
# ``megatron/core/transformer/transformer_config.py`` (0.19): ``recompute_modules`` with the granularity "selective",
# and ``offload_modules`` with ``fine_grained_activation_offloading``; ``__post_init__`` checks their combinations.
# `solve.checkpoint_policy` has the tensors that each of them keeps and frees.


CORE_ATTENTION: Final = "core_attn"
RECOMPUTED: Final = (CORE_ATTENTION, "layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts", "moe")
OFFLOADED: Final = ("attn_norm", "qkv_linear", CORE_ATTENTION, "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
_INSIDE_EXPERTS: Final = frozenset({"moe_act", "expert_fc1"})


def listed(text: str, flag: str) -> tuple[str, ...]:
    """Read a list such as ``core_attn,mlp``, or with spaces. Raise `UsageError` for an unknown module, or none."""
    known = RECOMPUTED if flag == "--recompute-modules" else OFFLOADED
    found = tuple(dict.fromkeys(text.replace(",", " ").replace("+", " ").split()))
    for name in found or ("",):
        if name not in known:
            raise UsageError(f"got {flag} {text}, and {name or 'nothing'!r}; expected some of {', '.join(known)}")
    return tuple(name for name in known if name in found)


def check_parts(model: ModelSpec, kernels: Kernels, names: Iterable[str], *, own_norms: bool) -> None:
    """Reject modules that this model does not have with these kernels.

    Args:
        own_norms: TransformerEngine has the GEMMs, and a norm is a separate module where it cannot be fused with one:
            NOTE [ Norms of their own ] in `solve.checkpoint_policy`.
    """
    if not kernels.module_lists:
        raise UsageError(
            f"got lists of modules with --kernels {kernels.name}, whose code has none: give --kernels "
            f"{sets_with('module_lists')}, or another mode of --recompute"
        )
    there = _there(model, kernels, own_norms=own_norms)
    for name in names:
        if name not in there:
            norm = ", since TransformerEngine fuses norms with the next linear layer" if "norm" in name else ""
            raise UsageError(
                f"got the module {name}, which no layer of {model.name} has{norm}: it would free nothing. Drop it"
            )


def _there(model: ModelSpec, kernels: Kernels, *, own_norms: bool) -> frozenset[str]:
    """Names of modules that some layer has."""
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
    """Recompute mode of a layer's saved tensors, its meaning in ``jettison list``, and its argument in `form`."""

    meaning: str
    argument: str

    def __new__(cls, name: str, meaning: str, argument: str = "") -> Self:
        mode = str.__new__(cls, name)
        mode._value_, mode.meaning, mode.argument = name, meaning, argument
        return mode

    NONE = "none", "no checkpointing: keep every saved tensor"
    SELECTIVE = "selective", "recompute the attention core (arXiv 2205.05198, section 5)"
    SELECTIVE_OP = "selective-op", "keep outputs of matmuls and fused attention, recompute the rest"
    SELECTIVE_OP_ALTERNATE = "selective-op-alternate", "the same, and recompute every second matmul (torchtitan)"
    FULL = "full", "keep only each layer's input"
    PARTS = "parts", "checkpoint attention, feed-forward block and norms of a layer each (NeMo AutoModel)"
    EVERY = "every", "checkpoint segments of K layers, keep each segment's input (arXiv 1604.06174)", "K"
    BLOCK = "block", "full for the first N layers of a stage, none for the others (Megatron's block method)", "N"
    INTERVAL = "interval", "full for one layer in K, none for the others (torchtitan's selective layers)", "K"
    MODULES = "modules", "recompute Megatron-Core modules, as --recompute-modules core_attn,mlp", "core_attn+mlp"
    AUTO = "auto", "planned tensor by tensor for a budget"

    @property
    def form(self) -> str:
        """Value of ``--recompute`` for this mode, such as ``every:K``."""
        return f"{self}:{self.argument}" if self.argument else str(self)


UNIFORM_MODES: Final = (Mode.NONE, Mode.SELECTIVE, Mode.SELECTIVE_OP, Mode.SELECTIVE_OP_ALTERNATE, Mode.FULL)
"""Modes under which each layer has the policy of that name in `solve.checkpoint_policy`."""
MOST: Final = -1
"""Micro-batches without checkpointing: as many as fit, which `search.largest_fit` finds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """A mode and its number. ``offload`` offloads the kept tensors of each layer to CPU until backward.

    ``whole``: micro-batches without checkpointing in each window that a pipeline stage has in flight, the same number
    on every stage (arXiv 2205.05198 Appendix C; Megatron's ``num_microbatches_with_partial_activation_checkpoints``).

    ``reentrant``: checkpoints run a nested backward of what they recompute (``use_reentrant=True``), outside the FSDP
    wrapping.

    ``modules``: recomputed modules of a layer; ``sent``: modules whose large tensors are offloaded to CPU.

    Raises:
        UsageError: a mode without its number, or a number below 1; micro-batches without checkpointing together with
            mode none or offloading; lists of modules that exclude each other or the mode.
    """

    mode: Mode = Mode.NONE
    number: int = 1
    offload: bool = False
    whole: int = 0
    modules: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    reentrant: bool = False

    @property
    def segment(self) -> int:
        """Layers in each segment; 1: no segments."""
        return self.number if self.mode is Mode.EVERY else 1

    def __post_init__(self) -> None:
        # as Megatron's ``TransformerConfig.__post_init__``
        if "attn_proj" in self.sent and CORE_ATTENTION not in self.sent:
            raise UsageError("got --offload-modules attn_proj without core_attn, whose output it reads; give both")
        inside = _INSIDE_EXPERTS.intersection(self.sent)
        if "moe" in self.modules and inside:
            raise UsageError(
                f"got --offload-modules {','.join(sorted(inside))} and --recompute-modules moe, which recomputes all "
                "of the experts; drop one of them"
            )
        if self.sent and (self.offload or self.mode not in (Mode.NONE, Mode.MODULES)):
            other = "--offload" if self.offload else f"--recompute {self.mode}"
            raise UsageError(f"--offload-modules does not go with {other}; drop one of them")
        if self.number < 1:
            raise UsageError(f"got --recompute {self.mode}:{self.number}; expected a number of 1 or more")
        if self.whole < MOST:
            raise UsageError(f"got --micro-batches-without-recompute {self.whole}; expected 0 or more")
        if self.whole and self.mode is Mode.NONE:
            raise UsageError(
                "got --micro-batches-without-recompute and --recompute none, which checkpoints no micro-batch; give "
                "the mode of the others"
            )
        if self.whole and self.to_host:
            flag = "--offload" if self.offload else "--offload-modules"
            raise UsageError(f"--micro-batches-without-recompute does not go with {flag}; drop one of them")

    @classmethod
    def parse(cls, text: str, *, layers: int, offload: bool = False, whole: int = 0) -> Recompute:
        """Read ``none``, ``selective``, ``selective-op``, ``selective-op-alternate``, ``full``, ``every:K``,
        ``block:N``, ``interval:K``, ``sqrt`` (segments of √L layers), ``parts``, ``modules:core_attn+mlp`` or ``auto``.
        Raise `UsageError` for another text.
        """
        word, colon, number = text.partition(":")
        if word == Mode.MODULES and colon:
            modules = listed(number, "--recompute-modules")
            return cls(mode=Mode.MODULES, modules=modules, offload=offload, whole=whole)
        if word == "sqrt" and not colon:
            return cls(mode=Mode.EVERY, number=max(1, round_sqrt(layers)), offload=offload, whole=whole)
        mode = next((mode for mode in Mode if mode == word and bool(mode.argument) == bool(colon)), Mode.MODULES)
        if mode is Mode.MODULES or (colon and not number.isdecimal()):
            forms = ", ".join(mode.form for mode in Mode)
            raise UsageError(f"got --recompute {text!r}; expected one of {forms}, sqrt")
        return cls(mode=mode, number=int(number) if colon else 1, offload=offload, whole=whole)

    def __str__(self) -> str:
        if self.mode is Mode.MODULES:
            return f"{self.mode}:{'+'.join(self.modules)}"
        return f"{self.mode}:{self.number}" if self.mode.argument else str(self.mode)

    @property
    def to_host(self) -> bool:
        """Whether anything is offloaded to CPU."""
        return self.offload or bool(self.sent)

    @property
    def words(self) -> str:
        """Mode with offloading and micro-batches without checkpointing, for messages."""
        text = f"{self}, offloaded" if self.offload else str(self)
        text += f", {'+'.join(self.sent)} offloaded" if self.sent else ""
        return f"{text}, {self.whole} micro-batches of each window without checkpointing" if self.whole > 0 else text


NOTHING_AGAIN: Final = Recompute()


def round_sqrt(layers: int) -> int:
    """Integer nearest to √L: the segment length with the fewest saved bytes (arXiv 1604.06174 §4.1)."""
    root = isqrt(layers)
    return root + (layers - root * root > root)
