"""Fine-tuning: frozen weights and their quantization, LoRA adapters, and frozen reference and reward models.

NOTE [ Adapters as PEFT places them ]
LoRA (arXiv 2106.09685) adds B(A(dropout(x))) · alpha / r to a linear layer with a frozen weight. ``peft/tuners/lora/
layer.py``, ``Linear.forward``: each adapted layer casts x to the adapters' dtype, and the sum back. Under autocast that
copy is cast again, to the dtype of matmuls, and A saves the result. Over 4 bits (``lora/bnb.py``,
``Linear4bit.forward``) the layer's output is copied first, and under autocast x is not cast. alpha changes no byte. A
frozen weight needs no saved input: autograd saves x for adapters only.

With a frozen embedding the first layer's input has no gradient, and ops before its first adapter save nothing. With
checkpoints, trainers make the embedding's output require one (``enable_input_require_grads``).

NOTE [ Modules trained in full ]
PEFT 0.21, ``utils/other.py``, ``ModulesToSaveWrapper.update``: a module of ``modules_to_save`` stays, frozen, and a
deep copy in its dtype is trained in its place; ``cast_adapter_dtype`` casts only layers with adapters. So a tied
embedding and head become two trained copies over one frozen tensor. FSDP2 has the copies in fp32 like other trained
weights (accelerate 1.15, ``utils/fsdp_utils.py``, ``fsdp2_prepare_model``), but not over 4 bits.

NOTE [ Four bits ]
bitsandbytes (``functional.py``, ``quantize_4bit``): two elements a byte, an fp32 scale per 64 and a table of 16 fp32;
with double quantization (arXiv 2305.14314 §3) a byte per 64, an fp32 scale per 256 of these and an fp32 offset.
``autograd/_functions.py``, ``MatMul4Bit``: each pass dequantizes the matrix to 16 bits for its GEMM, and saves neither
it nor the input. transformers quantizes every ``nn.Linear`` but the head: embeddings, norms, routers and experts, which
are one tensor, keep 16 bits. Before 5.0 experts were linear layers, and quantized.

NOTE [ GPTQ ]
GPTQ checkpoints in AutoGPTQ and in fms-acceleration's copy of GPTQModel (876e2ed, ``gptqmodel/nn_modules/qlinear/
qlinear_tritonv2.py``): eight elements an int32; for each 128 inputs (``group_size``) a 16-bit scale and a 4-bit zero an
output; an int32 an input. ``triton_utils/dequant.py``, ``QuantLinearFunction``: each pass dequantizes the matrix to
16 bits, and saves neither it nor the input. PEFT (``tuners/lora/gptq.py``) adds to its output in place. Under FSDP
elements and zeros are parameters (``autogptq_utils.py``, ``PATCH_FOR_FSDP_TRITON_V2``), the rest is replicated. Nothing
is cast to fp32 for training.

NOTE [ What is not packed ]
PEFT's ``prepare_model_for_kbit_training`` (``peft/utils/other.py``, 0.5 to 0.21) casts every 16-bit parameter that is
not quantized to fp32: embeddings, norms, the head, biases. So the residual stream is fp32: ``Linear4bit.forward``
(bitsandbytes 0.43 to 0.50, ``nn/modules.py``) casts its input to the dtype of matmuls, and its output back
(``.to(inp_dtype)``). TRL to 0.26 (``peft_module_casting_to_bf16``: ``trl/trainer/utils.py``, later
``trl/models/utils.py``) casts embeddings and the head back but not norms, whose fp32 weights make their outputs fp32:
the first layer's input is 16-bit, and its residual is fp32 from its MLP on. Neither happens with a sharded base
(``is_sharded_qlora``).

NOTE [ Before training ]
Reserved bytes are those of the whole process, whose peak may come before its first step. PEFT's
``prepare_model_for_kbit_training`` casts embedding and head of a 4-bit base to fp32, and TRL to 0.24 casts them back
(NOTE [ What is not packed ]): neither copy fits into the segment of a 16-bit weight. transformers 4.54
to 4.57 (``modeling_utils.py``, ``caching_allocator_warmup``) first allocate, and free, half of the bytes that the base
has in 16 bits, without the head, or half of what is free but for 1.2 GiB; 4.51 to 4.53 count the head as well, 5.0
counts what is loaded. A Trainer frees what is cached before its first step (``trainer.py``, ``_inner_training_loop``:
``accelerator.free_memory``), so that of both peaks the higher one counts.

NOTE [ Eight bits ]
bitsandbytes (LLM.int8, arXiv 2208.07339): ``functional.py``, ``int8_vectorwise_quant``: a byte an element and an fp32
scale a row. ``autograd/_functions.py``, ``MatMul8bitLt`` (0.50): forward quantizes its input, runs an int8 GEMM, and
keeps the 16-bit input where it requires a gradient, although backward does not read it; backward dequantizes the matrix
to 16 bits (``state.CB.to(ctx.dtype_A, copy=True)``). The input is an attribute of the context, so that checkpoints do
not free it, unless they are reentrant: their forward builds no graph.
Outlier columns, which are few, and temporaries of the quantization are not counted.

NOTE [ Frozen FP8 ]
FP8 checkpoints (``quant_method`` fp8) in transformers 5.23, ``integrations/finegrained_fp8.py``: every ``nn.Linear``
but the head is an ``FP8Linear``, with a byte an element and an fp32 scale per 128 x 128. ``FP8LinearFunction``: forward
quantizes its input, reads the matrix as it is, and saves neither. Backward dequantizes the matrix to 16 bits, with
scales expanded over rows. PEFT 0.21 adapts it as any linear layer, in fp32 by default (``cast_adapter_dtype``).
Scales of the input, which are 3 % of its quantized copy, are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.core.files import read_table
from jettison.spec.model import ModelSpec

PACKED_BLOCK: Final = 64
SCALES_BLOCK: Final = 256
TABLE_BYTES: Final = 64
GPTQ_GROUP: Final = 128
FP8_BLOCK: Final = 128


class Base(StrEnum):
    """Storage of frozen matrices."""

    PLAIN = "plain"  # in the dtype of matmuls
    FP32 = "fp32"
    NF4 = "nf4"
    NF4_DOUBLE = "nf4-double"
    INT8 = "int8"
    GPTQ = "gptq"
    FP8 = "fp8"

    @property
    def packed(self) -> bool:
        """Whether matrices are quantized."""
        return self not in (Base.PLAIN, Base.FP32)

    @property
    def bits(self) -> int:
        """Bits of a quantized element; 0: not quantized."""
        return (8 if self in (Base.INT8, Base.FP8) else 4) if self.packed else 0

    def packed_bytes(self, elements: int, rows: int) -> int:
        """Bytes of one quantized matrix: the notes of this module."""
        if self is Base.FP8:
            return elements + 4 * -(-rows // FP8_BLOCK) * -(-elements // rows // FP8_BLOCK)
        if self is Base.INT8:
            return elements + self.scale_bytes(elements, rows)
        zeros = _groups(elements, rows) * rows // 2 if self is Base.GPTQ else 0
        return -(-elements // 2) + zeros + self.scale_bytes(elements, rows)

    def scale_bytes(self, elements: int, rows: int) -> int:
        """Bytes of scales and other tensors that are not parameters."""
        if self is Base.FP8:
            return 0
        if self is Base.INT8:
            return 4 * rows
        if self is Base.GPTQ:
            return 2 * _groups(elements, rows) * rows + 4 * (elements // rows)
        blocks = -(-elements // PACKED_BLOCK)
        scales = 4 * blocks if self is Base.NF4 else blocks + 4 * -(-blocks // SCALES_BLOCK) + 4
        return scales + TABLE_BYTES


def _groups(elements: int, rows: int) -> int:
    """Number of groups of inputs that share a scale."""
    return -(-elements // rows // GPTQ_GROUP)


class Upcast(StrEnum):
    """Parts of a quantized base that are fp32: NOTE [ What is not packed ]."""

    NONE = "none"
    NORMS = "norms"
    ALL = "all"


ALL: Final = "all-linear"
_PARTS: Final = read_table(Path(__file__).with_suffix(".toml"))
_LAYERS: Final = {layer: names for part in _PARTS.values() for layer, names in part.items()}
TARGETS: Final = MappingProxyType(
    {
        name: tuple(layer for layer, others in _LAYERS.items() if name in others)
        for names in _LAYERS.values()
        for name in names
    }
    | {"qkv": tuple(_LAYERS)[:4], **{part: tuple(layers) for part, layers in _PARTS.items()}}
)
"""Linear layers by PEFT's names of target modules, and by names for several."""
_KEYS: Final = ("r", "alpha", "targets", "dropout", "modules_to_save")
TABLE: Final = "embed_tokens"
HEAD: Final = "lm_head"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Low-rank adapters (LoRA) of frozen weights."""

    rank: int  # r
    targets: frozenset[str] = frozenset((ALL,))  # names in `TARGETS`, or ``all-linear``
    dropout: float = 0.0  # of the adapters' input
    base: Base = Base.PLAIN  # storage of frozen matrices
    inputs_need_gradients: bool = False  # the first layer's input has a gradient although the embedding is frozen
    follows_recompute: bool = False  # that depends on the recompute mode: see `Run.recomputed`
    upcast: Upcast = Upcast.NONE  # parts of a quantized base in fp32
    wide: bool = False  # fp32 adapters in every precision: PEFT's ``autocast_adapter_dtype``
    full: frozenset[str] = frozenset()  # `TABLE`, `HEAD`: NOTE [ Modules trained in full ]

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError(f"got --lora r={self.rank}; expected a rank of 1 or more")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"got --lora dropout={self.dropout}; expected a probability of at least 0 and below 1")
        for word in sorted(self.targets - {ALL}):
            if word not in TARGETS:
                raise UsageError(f"got --lora targets={word}; expected {ALL} or some of {', '.join(TARGETS)}")
        for word in sorted(self.full - {TABLE, HEAD}):
            raise UsageError(f"got --lora modules_to_save={word}; expected {TABLE}, {HEAD} or {TABLE}+{HEAD}")

    def adapts(self, name: str) -> bool:
        """Whether the linear layer of this name has an adapter."""
        return ALL in self.targets or any(name in TARGETS[word] for word in self.targets)

    def __str__(self) -> str:
        drop = f", dropout {self.dropout:g}" if self.dropout else ""
        full = f", {' and '.join(sorted(self.full))} in full" if self.full else ""
        return f"LoRA r={self.rank} on {'+'.join(sorted(self.targets))}{drop}{full}, base {self.base}"

    @classmethod
    def parse(cls, text: str, **more: Any) -> Tuning:
        """Read ``16``, or ``r=16,targets=qkv+o_proj,dropout=0.05``; ``more``: other fields; or raise a `UsageError`."""
        given = {"r": text} if text.isdecimal() else {}
        for part in () if given else text.split(","):
            key, equals, value = part.partition("=")
            if key not in _KEYS or not equals or key in given:
                raise UsageError(
                    f"got --lora {text!r}; expected r=16, optionally with alpha=32,targets=qkv+mlp,dropout=0.05,"
                    f"modules_to_save={TABLE}+{HEAD}"
                )
            given[key] = value
        if "r" not in given:
            raise UsageError(f"got --lora {text!r} without a rank; expected one, such as r=16,{text}")
        _number(text, given.get("alpha", "1"), float)
        full = frozenset(given.get("modules_to_save", "").split("+")) - {""}
        if TABLE in full:  # its output has a gradient in any case
            more |= {"inputs_need_gradients": True, "follows_recompute": False}
        return cls(
            rank=int(_number(text, given["r"], int)),
            targets=frozenset(given.get("targets", ALL).split("+")),
            dropout=_number(text, given.get("dropout", "0"), float),
            full=full,
            **more,
        )


def _number(text: str, value: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(value)
    except ValueError:
        raise UsageError(f"got --lora {text!r}; expected a number instead of {value!r}, such as --lora r=16") from None


# Frozen models, of which a step runs the forward only -----------------------------------------------------------------
#
# NOTE [ When a frozen model runs ]
# The reference model runs while the policy's saved tensors live. TRL's ``trl/trainer/dpo_trainer.py``,
# ``DPOTrainer._compute_loss``: ``outputs = model(...)`` first, then ``self.ref_model(...)`` under ``torch.no_grad()``,
# then the loss and its backward; torchtune's ``recipes/full_dpo_distributed.py`` and LLaMA-Factory's
# ``train/dpo/trainer.py`` likewise. So its transient memory adds to all that the policy saves. Where rewards and
# reference log-probabilities are computed with the completions, before any training forward (``trl/trainer/
# grpo_trainer.py``, ``_generate_and_score_completions``), it adds to weights and state only: ``when=before``, the
# default of reward models.
#
# Its weights are sharded where the policy's are (ZeRO 3, FSDP), otherwise replicated; ``trl/models/utils.py``,
# ``prepare_deepspeed``: "If ZeRO-3 is used, we shard both ... Otherwise ... ZeRO disabled". Their dtype is the policy's
# by default (``setdefault("dtype", self.model.dtype)``). Adapters need no second model: they are disabled for a forward
# (``use_adapter``): ``base``.


SAME: Final = "same"
BASE: Final = "base"
_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_WORDS: Final = {"yes": True, "no": False}


class Role(StrEnum):
    """Role of a frozen model."""

    REFERENCE = "reference"  # log-probabilities of the batch's tokens
    REWARD = "reward"  # one number a token: a head of one column


class When(StrEnum):
    """Order of its forward in a micro-batch. See NOTE [ When a frozen model runs ]."""

    AFTER = "after"  # between the policy's forward and its backward
    BEFORE = "before"  # before the policy's forward


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenModel:
    """A frozen model of a training step."""

    role: Role
    model: ModelSpec | None  # None: the policy's frozen weights with adapters disabled
    dtype: str = ""  # of its weights; "": the policy's
    sharded: bool = True  # over the policy's ranks
    when: When = When.AFTER

    def __str__(self) -> str:
        name = "the policy with its adapters off" if self.model is None else self.model.name
        dtype = f", {self.dtype}" if self.dtype else ""
        whole = "" if self.sharded or self.model is None else ", replicated"
        return f"{self.role}: {name}{dtype}{whole}, {self.when} the policy's forward"


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenModelOptions:
    """Values of ``--reference`` and ``--reward``: a model, optionally with ``dtype``, ``sharded`` and ``when``."""

    model: str
    dtype: str = ""
    sharded: bool | None = None
    when: When | None = None

    @classmethod
    def parse(cls, text: str, flag: str) -> FrozenModelOptions:
        """Read ``same``, or ``same,dtype=bf16,sharded=no,when=before``; a `UsageError` for other words."""
        model, *parts = text.split(",")
        given = dict(part.partition("=")[::2] for part in parts)
        example = f"expected {flag} same or a model, optionally with ,dtype=bf16,sharded=no,when=before"
        if not model or "=" in model or len(given) < len(parts) or set(given) - {"dtype", "sharded", "when"}:
            raise UsageError(f"got {flag} {text!r}; {example}")
        for key, words in (("dtype", _DTYPES), ("sharded", _WORDS), ("when", set(When))):
            if key in given and given[key] not in words:
                raise UsageError(f"got {flag} {text!r}: {key}={given[key]}; expected one of {', '.join(sorted(words))}")
        return cls(
            model=model,
            dtype=_DTYPES[given["dtype"]] if "dtype" in given else "",
            sharded=_WORDS[given["sharded"]] if "sharded" in given else None,
            when=When(given["when"]) if "when" in given else None,
        )
