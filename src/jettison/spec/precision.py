"""Bytes of a parameter's companions: what is held for each parameter beside itself, by precision and by optimizer.

NOTE [ Precision-aware optimizers ]
Megatron's ``--use-precision-aware-optimizer`` with moments in bf16 (``--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16``).
TransformerEngine's ``FusedAdam`` then holds the 16 bits that bf16 weights lack of fp32, as int16
(``store_param_remainders``, on by default: ``megatron/core/optimizer/optimizer_config.py``), and reads gradients as
they are (``decoupled_grad``): ``bf16-aware``, with ``--main-grads-dtype bf16``, and ``bf16-aware-grad32``. Where
``fp8_recipe`` is set to a scaling of the day, and Megatron-Bridge sets it to "tensorwise" even in bf16
(``mixed_precision.py``), Megatron holds fp32 masters instead and copies gradients to fp32
(``use_precision_aware_optimizer_no_fp8_or_ds_fp8``, ``_copy_model_grads_to_main_grads``): ``bf16-bridge``.

NOTE [ Autocast ]
``torch.autocast`` leaves parameters, embeddings, norms and sums in fp32. A product casts what it reads
(``aten/src/ATen/autocast_mode.cpp``, ``cached_cast``): its input anew, so that each of three products of one input
keeps a copy, and its weight once until the outermost autocast ends, a copy that its backward keeps. FSDP's mixed
precision (``bf16-autocast`` under ZeRO 3) casts what modules are given, and gathers weights narrow: no copy of either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from jettison.core.errors import UsageError
from jettison.spec.fp8 import NARROW, Fp8Recipe


class Gradients(StrEnum):
    """When weight gradients are allocated."""

    ONE_BY_ONE = "one by one"  # as backward reaches each weight; freed again after the optimizer step
    UPFRONT = "upfront"  # one buffer for all, for good: Megatron's, and DDP's buckets where gradients are views of them
    BUCKETS = "buckets"  # one by one, beside buckets that are there for good: DistributedDataParallel as it comes
    ADDED = "added"  # as each backward makes them, and behind it added to a wider buffer and let go of: nanotron
    IN_BACKWARD = "in backward"  # the optimizer steps within backward, and each is freed as soon as it was applied


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Dtypes of a training run.

    Args:
        accumulator: of a second gradient buffer that micro-batches are added up in; None: there is none.
        apart: the accumulator is there for good, and gradients go when they have been added to it: `Gradients.ADDED`.
        optimizer_gradient: of the copy of gradients that the optimizer makes for its masters, and that stays until
            gradients are let go of for the next step; None: it reads them as they are.
        recipe: how they are quantised, by which library; None: it is not said, and copies of weights and scales are
            not counted.
        casts: what products cast their inputs and weights to, where other ops run in ``compute``: `under_autocast`.
    """

    name: str
    compute: str  # of activations
    parameter: str  # of the weights that forward and backward read
    gradient: str  # of what backward leaves at each parameter
    accumulator: str | None = None
    master: str | None = None  # of the copy that the optimizer updates; None: it updates the weights themselves
    product: str | None = None  # of the inputs of matrix products, where they are quantised for them
    moment: str | None = None  # of what the optimizer remembers of gradients; None: of what it updates
    optimizer_gradient: str | None = None
    recipe: Fp8Recipe | None = None
    casts: str | None = None
    apart: bool = False

    @property
    def words(self) -> str:
        """Its name, and how products are narrow."""
        return self.name if self.recipe is None else f"{self.name}, products by {self.recipe}"

    def check(self, optimizer: Optimizer, *, on_host: bool) -> None:
        """Refuse an optimizer that does not hold this."""
        if self.moment and (on_host or optimizer not in (Optimizer.ADAMW, Optimizer.NONE)):
            where = " and states on the host" if on_host else ""
            raise UsageError(
                f"got --precision {self.name} with --optimizer {optimizer}{where}; Megatron's precision-aware "
                "optimizer is adamw, on the device"
            )

    def with_recipe(self, recipe: Fp8Recipe) -> Precision:
        """The same with narrow products; refused unless activations are in 16 bits."""
        if self.compute != "bfloat16":
            raise UsageError(f"got --fp8-recipe {recipe.name} with --precision {self.name}; give one in bf16")
        return replace(self, product=NARROW, recipe=recipe)


@lru_cache(maxsize=16)
def under_autocast(precision: Precision) -> Precision:
    """What regions see of fp32 weights under torch.autocast. See NOTE [ Autocast ]."""
    return replace(precision, compute=precision.parameter, casts=precision.compute)


class Adding(StrEnum):
    """How a weight's gradient gets to what was there before it."""

    WHOLE = "whole"  # made beside it in its dtype, and added: autograd
    CAST = "cast"  # made in the parameter's dtype, and added to a wider buffer: Megatron's DDP hook
    FUSED = "fused"  # the product of inputs and gradients adds to the buffer: Megatron's gradient_accumulation_fusion
    DUMMY = "fused-dummy"  # the same, and TransformerEngine keeps an empty gradient for each shape, for good


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GradientRule:
    """What there is of weight gradients during a backward. `gradient_rule` makes one of each kind: a key of caches."""

    kept: str  # dtype of what stays until the optimizer
    added: str  # of a contribution to what is there already, while both live
    fused: bool = False  # products have no contribution of their own
    dummies: bool = False  # not even the head's, which is torch's: it is given the library's empty gradient as well
    update_bytes: int = 0  # of an element, while a weight is updated within backward
    reentrant: bool = False  # a full checkpoint holds the gradient of what it returned through its backward


@lru_cache(maxsize=256)
def gradient_rule(
    precision: Precision, adding: Adding, update_bytes: int = 0, *, whole: bool = False, reentrant: bool = False
) -> GradientRule:
    """Where a precision and a way to add meet.

    Args:
        whole: gradients come in the dtype of products, and shards of them are what is kept: `GradientRule.kept` is
            what they come in.
        reentrant: checkpoints are.
    """
    if whole:
        wide = precision.compute
        return GradientRule(kept=wide, added=wide, update_bytes=update_bytes, reentrant=reentrant)
    added = precision.gradient if adding is Adding.WHOLE else precision.compute
    fused, dummies = adding in (Adding.FUSED, Adding.DUMMY), adding is Adding.DUMMY
    return GradientRule(
        kept=precision.gradient,
        added=added,
        fused=fused,
        dummies=dummies,
        update_bytes=update_bytes,
        reentrant=reentrant,
    )


_FULL: Final = Precision(name="fp32", compute="float32", parameter="float32", gradient="float32")
_PURE: Final = Precision(name="bf16-pure", compute="bfloat16", parameter="bfloat16", gradient="bfloat16")
_MIXED: Final = replace(_PURE, name="bf16", master="float32")
_AWARE: Final = replace(_PURE, name="bf16-aware", master="int16", moment="bfloat16")
"""Moments in bf16: NOTE [ Precision-aware optimizers ]."""
PRECISIONS: Final = MappingProxyType(
    {
        p.name: p
        for p in (
            _FULL,
            _MIXED,  # 2 + 2 + 4 + 8 = 16 bytes a parameter with Adam
            replace(_MIXED, name="bf16-grad32", accumulator="float32"),  # 20 bytes
            # 18 bytes: Megatron adds bf16 gradients straight into an fp32 buffer
            replace(_MIXED, name="bf16-main32", gradient="float32"),
            # Megatron's ``--grad-reduce-in-bf16``: the optimizer copies gradients to fp32
            replace(_MIXED, name="bf16-reduce16", optimizer_gradient="float32"),
            Precision(
                name="fp16-main32",
                compute="float16",
                parameter="float16",
                gradient="float16",
                master="float32",
                optimizer_gradient="float32",
            ),  # Megatron's fp16: ``megatron/core/optimizer/optimizer.py``, ``_copy_model_grads_to_main_grads``
            _AWARE,  # 10 bytes
            replace(_AWARE, name="bf16-aware-grad32", gradient="float32"),  # 12 bytes
            # 12 bytes, 16 in a step
            replace(_AWARE, name="bf16-bridge", master="float32", optimizer_gradient="float32"),
            _PURE,
            # 10 bytes: DeepSpeed's ``bf16_master_weights_and_grads`` with ``bf16_optimizer_states``
            replace(_PURE, name="bf16-master16", master="bfloat16"),
            # fp32 weights, cast for each use: torch.autocast, FSDP's mixed precision
            replace(_FULL, name="bf16-autocast", compute="bfloat16"),
            replace(_MIXED, name="fp8", product=NARROW),
        )
    }
)
"""By name. Optimizer state comes on top: see `Optimizer`."""


class Optimizer(StrEnum):
    """Which state is held for each parameter."""

    ADAMW = "adamw"  # two fp32 moments (bf16 ones for bf16-pure: state follows the parameter's dtype)
    ADAMW_FOREACH = "adamw-foreach"  # the same as torch runs it on CUDA unless told otherwise: all at once, unfused
    ADAMW_ON_COPIES = "adamw-deepspeed"  # the same on copies of its gradients, as DeepSpeed's ZeRO steps
    ADAMW_BF16 = "adamw-bf16"  # two bf16 moments, whatever is updated: torchtitan's fused_opt_states_bf16
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"
    ADAM8BIT = "adam8bit"  # two moments of one byte, and an fp32 scale for each 256 of them (arXiv 2110.02861)
    ADAM4BIT = "adam4bit"  # two moments of half a byte, and an fp32 scale for each 128 of them: torchao's AdamW4bit
    ADAFACTOR = "adafactor"  # a row and a column of a matrix (arXiv 1804.04235), no first moment
    MUON = "muon"  # one moment for matrices of layers, AdamW for the rest
    DIST_MUON = "dist-muon"  # Megatron's: each rank has whole matrices: NOTE [ Whole tensors on ranks ]
    DIST_MUON_PINGPONG = "dist-muon-pingpong"  # its older way to share tensors out
    NONE = "none"


MUONS: Final = (Optimizer.MUON, Optimizer.DIST_MUON, Optimizer.DIST_MUON_PINGPONG)


def precision(name: str) -> Precision:
    """A precision by name, or a `UsageError`."""
    if name not in PRECISIONS:
        raise UsageError(f"got the precision {name!r}; expected one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def optimizer(name: str) -> Optimizer:
    """An optimizer by name, or a `UsageError`."""
    if name not in set(Optimizer):
        raise UsageError(f"got the optimizer {name!r}; expected one of {', '.join(Optimizer)}")
    return Optimizer(name)
