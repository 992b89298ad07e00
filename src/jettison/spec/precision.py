"""Precision and optimizer of a run: dtypes of weights, gradients and optimizer state, and what is offloaded to CPU.

A framework's ``defaults.toml`` has its rules of optimizer offload, section ``optimizer_offload``, with the framework
code of each.

NOTE [ Precision-aware optimizers ]
Megatron's ``--use-precision-aware-optimizer`` with moments in bf16 (``--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16``).
TransformerEngine's ``FusedAdam`` then keeps the 16 bits by which fp32 masters differ from bf16 weights, as int16
(``store_param_remainders``, on by default: ``megatron/core/optimizer/optimizer_config.py``), and reads gradients
without a copy (``decoupled_grad``): ``bf16-aware``, with ``--main-grads-dtype bf16``, and ``bf16-aware-grad32``. Where
``fp8_recipe`` is current scaling, and Megatron-Bridge sets "tensorwise" even in bf16 (``mixed_precision.py``), Megatron
keeps fp32 masters instead and copies gradients to fp32 (``use_precision_aware_optimizer_no_fp8_or_ds_fp8``,
``_copy_model_grads_to_main_grads``): ``bf16-bridge``.

NOTE [ Autocast ]
``torch.autocast`` leaves parameters, embeddings, norms and sums in fp32. A matmul casts its operands
(``aten/src/ATen/autocast_mode.cpp``, ``cached_cast``): its input every time, so that each of three matmuls of one input
saves a copy, and its weight once until the outermost autocast ends, a copy that its backward saves. FSDP's mixed
precision (``bf16-autocast`` under ZeRO 3) casts inputs of modules and all-gathers weights in bf16, without such copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

from jettison.core.dtypes import DTYPE_BYTES
from jettison.core.errors import UsageError, known
from jettison.core.files import read_table
from jettison.spec.fp8 import FP8, Fp8Recipe
from jettison.spec.frameworks import named


class Gradients(StrEnum):
    """Allocation of weight gradients."""

    ONE_BY_ONE = "one by one"  # as backward reaches each weight; freed after the optimizer step
    UPFRONT = "upfront"  # one permanent buffer: Megatron's, and DDP's with gradients as bucket views
    BUCKETS = "buckets"  # one by one, and permanent buckets: DistributedDataParallel by default
    ACCUMULATOR = "fp32 accumulator"  # in each backward; after it added to a wider buffer and freed: nanotron
    IN_BACKWARD = "in backward"  # the optimizer steps during backward and frees each gradient at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Dtypes of a training run.

    Args:
        accumulator: dtype of a second buffer that accumulates gradients of micro-batches; None: no such buffer.
        apart: the accumulator is permanent, and gradients are freed once added to it: `Gradients.ACCUMULATOR`.
        optimizer_gradient: dtype of the optimizer's copy of gradients for its masters, which is kept until gradients
            are freed for the next step; None: no copy.
        reduced: FSDP's ``reduce_dtype``; None: that of gradients.
        recipe: quantization of GEMMs; None: unknown, and quantized copies of weights and scales are not counted.
        casts: dtype of matmuls whose operands are cast, where other ops run in ``compute``: `under_autocast`.
    """

    name: str
    compute: str  # dtype of activations
    parameter: str  # of weights in forward and backward
    gradient: str  # of ``.grad``
    accumulator: str | None = None
    master: str | None = None  # of master weights; None: the optimizer updates the parameters
    gemm_inputs: str | None = None  # of quantized GEMM inputs
    moment: str | None = None  # of the optimizer's moments; None: that of the weights it updates
    optimizer_gradient: str | None = None
    reduced: str | None = None
    recipe: Fp8Recipe | None = None
    casts: str | None = None
    apart: bool = False

    @property
    def reduce_dtype(self) -> str:
        """Dtype in which gradients are reduced."""
        return self.reduced or self.gradient

    @property
    def moment_bytes(self) -> int:
        """Bytes of an element of the optimizer's moments, by default those of the tensor that it updates."""
        return DTYPE_BYTES[self.moment or self.master or self.parameter]

    def reducing_in(self, word: str) -> Precision:
        """The same with gradients that FSDP reduces in fp32, bf16 or the dtype of ``compute``."""
        dtypes = {"fp32": "float32", "bf16": "bfloat16", "compute": self.compute}
        if word not in dtypes:
            raise UsageError(f"got --reduce-dtype {word!r}; expected fp32, bf16 or compute")
        return self if dtypes[word] == self.gradient else replace(self, reduced=dtypes[word])

    @property
    def words(self) -> str:
        """Name and recipe, for messages."""
        return self.name if self.recipe is None else f"{self.name}, GEMMs by {self.recipe}"

    def check(self, optimizer: Optimizer, *, on_host: bool) -> None:
        """Reject an optimizer that does not support this precision."""
        if self.moment and (on_host or optimizer not in (Optimizer.ADAMW, Optimizer.NONE)):
            where = " and --offload-optimizer" if on_host else ""
            raise UsageError(
                f"got --precision {self.name} with --optimizer {optimizer}{where}; the precision-aware optimizer is "
                f"AdamW on the device: give --optimizer adamw{' alone' * on_host}, or --precision bf16"
            )

    def with_recipe(self, recipe: Fp8Recipe) -> Precision:
        """Add a recipe for FP8 or FP4 GEMMs; a `UsageError` unless activations are bf16."""
        if self.compute != "bfloat16":
            raise UsageError(f"got --fp8-recipe {recipe.name} with --precision {self.name}; give one in bf16")
        return replace(self, gemm_inputs=FP8, recipe=recipe)


@lru_cache(maxsize=16)
def under_autocast(precision: Precision) -> Precision:
    """Precision of regions with fp32 weights under torch.autocast. See NOTE [ Autocast ]."""
    return replace(precision, compute=precision.parameter, casts=precision.compute)


class Accumulation(StrEnum):
    """Accumulation of weight gradients."""

    AUTOGRAD = "autograd"  # a new gradient in the same dtype is added: autograd
    CAST = "cast"  # a new gradient in the parameter's dtype is added to a wider buffer: Megatron's DDP hook
    FUSED = "fused"  # the weight gradient GEMM accumulates into the buffer: Megatron's gradient_accumulation_fusion
    DUMMY = "fused-dummy"  # the same, and TransformerEngine keeps a permanent dummy gradient for each shape


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GradientRule:
    """Dtypes of weight gradients during a backward. `gradient_rule` returns one object of each kind: a cache key."""

    kept: str  # dtype of gradients until the optimizer step
    added: str  # of a new gradient that is added to an earlier one
    fused: bool = False  # GEMMs accumulate without a new gradient
    dummies: bool = False  # and so does torch's head, which is given the library's dummy gradient
    update_bytes: int = 0  # of an element, while a weight is updated during backward
    reentrant: bool = False  # a full checkpoint keeps the gradient of its output through its backward


@lru_cache(maxsize=256)
def gradient_rule(
    precision: Precision,
    accumulation: Accumulation,
    update_bytes: int = 0,
    *,
    whole: bool = False,
    reentrant: bool = False,
) -> GradientRule:
    """Gradient rule of a precision and an accumulation.

    Args:
        whole: unsharded gradients have the dtype of matmuls, which `GradientRule.kept` is, and shards are kept.
        reentrant: checkpoints are reentrant.
    """
    if whole:
        wide = precision.compute
        return GradientRule(kept=wide, added=wide, update_bytes=update_bytes, reentrant=reentrant)
    added = precision.gradient if accumulation is Accumulation.AUTOGRAD else precision.compute
    dummies = accumulation is Accumulation.DUMMY
    fused = dummies or accumulation is Accumulation.FUSED
    return GradientRule(
        kept=precision.gradient,
        added=added,
        fused=fused,
        dummies=dummies,
        update_bytes=update_bytes,
        reentrant=reentrant,
    )


PRECISIONS: Final = MappingProxyType(
    {name: Precision(name=name, **fields) for name, fields in read_table(Path(__file__).with_suffix(".toml")).items()}
)
"""Precisions by name."""


class Optimizer(StrEnum):
    """Optimizer, its meaning in ``jettison list``, and its state: moments in the dtype of the tensor that it updates,
    or None: a rule of its own in `formula.model_states`.
    """

    meaning: str
    moments: int | None

    def __new__(cls, name: str, meaning: str = "", moments: int | None = None) -> Self:
        optimizer = str.__new__(cls, name)
        optimizer._value_, optimizer.meaning, optimizer.moments = name, meaning, moments
        return optimizer

    ADAMW = "adamw", "two moments; fused kernel, as trainers use it", 2
    ADAMW_FOREACH = "adamw-foreach", "torch's default on CUDA: 4 more bytes a parameter within its step", 2
    ADAMW_ON_COPIES = "adamw-deepspeed", "on copies of gradients, 1e9 elements at a time under ZeRO 3 (DeepSpeed)", 2
    ADAMW_BF16 = "adamw-bf16", "two moments in bf16 (torchtitan's fused_opt_states_bf16)"
    SGD = "sgd", "no state", 0
    SGD_MOMENTUM = "sgd-momentum", "one moment", 1
    ADAM8BIT = "adam8bit", "two moments of one byte, with a scale for each 256 (arXiv 2110.02861)"
    ADAM8BIT_TRAINER = "adam8bit-trainer", "the same, with fp32 moments of embeddings (transformers' Trainer)"
    ADAM4BIT = "adam4bit", "two moments of half a byte, with a scale for each 128 (torchao)"
    ADAFACTOR = "adafactor", "row and column statistics of each matrix (arXiv 1804.04235)"
    MUON = "muon", "one moment for matrices of layers, AdamW for the rest"
    DIST_MUON = "dist-muon", "distributed by unsharded matrix (Megatron's default layout)"
    DIST_MUON_PINGPONG = "dist-muon-pingpong", "distributed by unsharded tensor of every kind (older Megatron)"
    NONE = "none", "no optimizer: a forward and a backward", 0


DIST_MUONS: Final = (Optimizer.DIST_MUON, Optimizer.DIST_MUON_PINGPONG)
"""Each rank has full matrices: NOTE [ Whole tensors on ranks ] in `predict.optimizer_step`."""


def precision(name: str) -> Precision:
    """Return a precision by name, or raise a `UsageError`."""
    return PRECISIONS[known(name, PRECISIONS, "the precision")]


def optimizer(name: str) -> Optimizer:
    """Return an optimizer by name, or raise a `UsageError`."""
    return Optimizer(known(name, list(Optimizer), "the optimizer"))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OptimizerOffload:
    """Rule for optimizer offload; by default nothing moves. Each rule is one object, since rules are cache keys.

    Args:
        framework: its framework, in messages. ``zeros``: supported ZeRO stages.
        moves_masters: the optimizer's master weights move. ``moves_parameters``: so do a rank's parameter shards.
        moves_packed: and those of quantized weights.
        keeps_buffer: a gradient of the largest parameter stays on the device. ``copies_shards``: gradients are reduced
            on the device before they are offloaded. ``one_micro_batch``: gradients cannot be accumulated on CPU.
    """

    name: str = "none"
    framework: str = ""
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    least_elements: int = 4096  # states of smaller parameters stay
    cpu_passes: float = 0  # over arrays of all offloaded elements, by a fused step on CPU: docs/decisions/0122
    frees_gradients: bool = False  # gradients are offloaded and freed during backward
    moves_masters: bool = False
    moves_parameters: bool = False
    moves_packed: bool = False
    keeps_buffer: bool = False
    copies_shards: bool = False
    one_micro_batch: bool = False
    moves: bool = True  # whether anything is offloaded

    @property
    def steps_on_cpu(self) -> bool:
        """Whether the optimizer step runs on CPU."""
        return self.cpu_passes > 0

    def __reduce__(self) -> tuple[Callable[[str], OptimizerOffload], tuple[str]]:
        return optimizer_offload, (self.name,)

    def __str__(self) -> str:
        return self.name


NO_OFFLOAD: Final = OptimizerOffload(moves=False)


@cache
def optimizer_offload(name: str) -> OptimizerOffload:
    """Return a rule by name, or raise a `UsageError`."""
    rules = named("optimizer_offload")
    if known(name, ("none", *rules), "--offload-optimizer") == "none":
        return NO_OFFLOAD
    fields = {key: value for key, value in rules[name].items() if key not in ("order", "folder")}
    zeros = tuple(fields.pop("zeros", NO_OFFLOAD.zeros))
    return OptimizerOffload(name=name, zeros=zeros, **fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementBytes:
    """Bytes per element of a parameter whose states are offloaded, without the states.

    Args:
        sent_each, fetched_each: device to host and back in every micro-batch.
        sent, fetched: the same, once a step.
    """

    host: int  # copies and gradients on CPU, without offloaded parameter shards
    sent_each: int = 0
    fetched_each: int = 0
    sent: int = 0
    fetched: int = 0


def element_bytes(
    rule: OptimizerOffload, *, zero: int, micro_batches: int, parameter: int, gradient: int
) -> ElementBytes:
    """CPU memory and transfers of a rule without the states.

    Args:
        parameter, gradient: bytes of one element on the device.
    """
    updated = 0 if rule.moves_parameters else parameter  # parameters come back once a step
    if not rule.steps_on_cpu:
        return ElementBytes(host=0)
    if not rule.moves_masters:
        return ElementBytes(host=updated + gradient, sent_each=gradient, fetched=updated)
    if zero == 3:
        return ElementBytes(host=gradient + 4, sent_each=gradient + 4, fetched_each=gradient, fetched=updated)
    both = gradient if micro_batches > 1 else 0
    return ElementBytes(host=4 + parameter + both, sent_each=both, fetched_each=both, sent=4, fetched=parameter)
