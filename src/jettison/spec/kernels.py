"""Kernels that implement a layer: which ops are fused, and so which tensors autograd saves.

The same layer saves different tensors under different code. A named set of these choices is an entry of a framework's
``defaults.toml``, section ``kernels``; a model family's file overrides fields where its code differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, get_type_hints

from jettison.core.errors import UsageError, known
from jettison.core.files import read_table
from jettison.spec.frameworks import named

FORMER_VALUES: Final = {
    "loss": {"outside": "in-loop", "rows": "chunked-cross-entropy", "listed": "chunked-output"},
    "gradients": {"added": "fp32-accumulator"},
    "accumulation": {"whole": "autograd"},
    "ssm-kernels": {"written": "eager"},
}
"""Present values of renamed ones, by flag; former ones are read until 1.0."""


class AttentionKernel(StrEnum):
    """Attention kernel."""

    EAGER = "eager"  # scores, probabilities and masks are tensors
    FLASH = "flash"  # one kernel saves query, key, value, output and a log-sum-exp a row (arXiv 2205.14135)


class Loss(StrEnum):
    """Cross-entropy implementation."""

    UPCAST = "upcast"  # fp32 copy of the logits, log-softmax, nll: torch.nn.functional.cross_entropy
    IN_LOOP = "in-loop"  # the same in the training loop, on the logits that the model returned, in fp32
    UNCAST = "uncast"  # the same in the dtype of logits, unless autocast casts them
    CHUNKED_CE = "chunked-cross-entropy"  # over chunks of rows, gradients overwrite the fp32 logits: `auto_checkpoint`
    VOCAB_PARALLEL = "vocab-parallel"  # Megatron's: one fp32 copy of a shard, in place from exponential to gradient
    SHARDED = "sharded"  # nanotron's: the same in a second copy, while the caller keeps its fp32 logits
    NATIVE = "native"  # Megatron's --cross-entropy-fusion-impl native: the same compiled, with a second copy
    TE = "te"  # TransformerEngine's: the forward overwrites the 16-bit logits with the gradient
    IN_FORWARD = "in-forward"  # the same on the fp32 copy of the logits that transformers' models make
    IN_PLACE = "in-place"  # one kernel that saves logits; backward overwrites them with the gradient
    COMPILED = "compiled"  # cross_entropy under torch.compile: 16-bit logits and two numbers a row
    DTENSOR = "dtensor"  # torch's loss_parallel over a sharded vocabulary: up to four fp32 copies at once
    FUSED = "fused"  # fused linear cross-entropy: gradients are computed in the forward, logits are not saved
    CHUNKED = "chunked"  # head and loss in chunks of the sequence, each recomputed in backward
    CHUNKED_OUTPUT = "chunked-output"  # the same, but all 16-bit logits are saved: torchtune's CEWithChunkedOutputLoss
    TILED = "tiled"  # log-probabilities of tiles of logits, recomputed in backward: TRL's trainers
    DPO = "dpo"  # the same for chosen and rejected sequences

    @property
    def in_loop(self) -> bool:
        """Whether the training loop computes it, from what the model returned."""
        return self in (Loss.IN_LOOP, Loss.UNCAST)

    @property
    def computes_head(self) -> bool:
        """Whether it computes the head, too, by parts."""
        return self in (Loss.FUSED, Loss.CHUNKED, Loss.CHUNKED_OUTPUT, Loss.TILED, Loss.DPO)


class Documents(StrEnum):
    """Masking of attention between documents that are packed into one sequence."""

    MASK = "mask"  # an s × s mask for each sequence
    VARLEN = "varlen"  # the kernel gets cumulative lengths and skips the rest: flash-attn, thd, varlen_attn
    BLOCKS = "blocks"  # FlexAttention: skips fully masked blocks of 128 × 128


class CpCommType(StrEnum):
    """Communication of attention under context parallelism."""

    RING = "ring"  # keys and values are passed on; each rank saves its own shards as they are
    P2P = "p2p"  # the same by TransformerEngine, which saves a buffer with its own keys and values concatenated
    GATHER = "gather"  # keys and values all-gathered in each pass: Llama 3 (arXiv 2407.21783 §3.3.2), `jettison train`
    A2A = "a2a"  # all-to-all to full sequences of a share of the heads, and back (arXiv 2309.14509)


class Dispatcher(StrEnum):
    """Token dispatcher of expert parallelism."""

    ALLTOALL = "alltoall"  # all-to-all to the ranks of the experts, and back
    FLEX = "flex"  # the same by DeepEP or HybridEP: once over the network for each node; only times differ
    ALLGATHER = "allgather"  # each rank all-gathers all tokens into a saved buffer and selects its experts' rows


class SsmKernels(StrEnum):
    """Kernels of state-space (SSM) and linear-attention layers."""

    EAGER = "eager"  # transformers' own code, op by op
    FUSED = "fused"  # one kernel: flash-linear-attention's, or mamba-ssm's with causal-conv1d


class Combine(StrEnum):
    """Weighted sum of the outputs of a token's experts."""

    ACTIVATION = "activation"  # weights enter the activation's kernel, before the down projection
    ADDED = "added"  # fp32 outputs times weights, index-added to the rows of their tokens
    SORTED = "sorted"  # outputs times weights, sorted back by token and summed


class Device(StrEnum):
    """Device type of the kernels; fused ones save different extra tensors on each."""

    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True, kw_only=True)
class AttentionChoices:
    """Attention, from the QKV projection to the output projection."""

    attention: AttentionKernel = AttentionKernel.FLASH
    scores_float32: bool = True  # eager softmax runs on an fp32 copy, and its result is cast back
    uncast_probabilities: bool = False  # the result keeps the dtype of scores: fp32 under autocast with an fp32 mask
    fp32_scores: bool = False  # eager attention casts query and key to fp32 before QK^T
    fused_softmax: bool = False  # scale, mask and softmax of eager attention are one kernel
    filled_masks: bool = False  # `masked_fill` with a boolean mask, which is saved; otherwise a mask is added
    copied_attention: bool = False
    """The fused kernel reads b x s, so that query, key and value are copied, and its output is copied back.
    TransformerEngine with flash-attn (``backends.py``, ``FlashAttention.forward``), its choice before Hopper and, for
    deterministic runs, after Hopper (``utils.py``, ``get_attention_backend``); cuDNN's kernel reads s x b."""
    cp_comm_type: CpCommType = CpCommType.RING  # communication under context parallelism
    documents: Documents = Documents.VARLEN  # masking between packed documents
    varlen_random_state: bool = True  # `torch.nn.attention.varlen` saves its kernel's random state
    tensor_masks: bool = False  # a fused kernel gets windows and padding as a mask, which each layer saves
    bidirectional_masks: bool = False  # and a mask for bidirectional attention
    always_masks: bool = False  # and a mask in every case; with ALiBi one for each head
    fused_projections: bool = False  # one QKV GEMM, one gate-up GEMM
    joint_qkv: bool = False  # one QKV GEMM, and one adapter for those of its parts that have one: litgpt
    split_projections: bool = False  # a joint projection is cut by split, chunk or unbind, not by slices
    packed_heads: bool = False  # query, key and value are copied as one tensor: NOTE [ Packed heads ] in `formula`
    copied_heads: bool = False  # queries are scaled before heads are split; each head is made contiguous: Whisper
    repeat_kv: bool = False  # repeat_kv, unless the kernel supports grouped-query attention
    always_repeat_kv: bool = False  # repeat_kv even then
    indexed_kv: bool = False  # shared keys and values are copied by a saved index; fused kernels get equal head counts
    learned_zeros: bool = False  # zeros instead of biases, with gradients


@dataclass(frozen=True, kw_only=True)
class NormChoices:
    """Norms."""

    fused_norm: bool = True  # one kernel that saves its input and its statistics
    fp32_norm_scale: bool = False  # an unfused RMSNorm's weight multiplies the fp32 value, before the cast back
    fp32_norm_statistics: bool = False  # its mean is of an fp32 copy; the input itself is scaled
    cast_weights: bool = False  # fp32 norms cast the weight as well, and save the copy
    eager_layer_norm: bool = False  # LayerNorm in fp32, op by op
    norms_after_rotary: bool = False  # query and key norms come after the rotary embedding
    inline_norms: bool = False  # query and key are projected and normed one by one, before the value is projected


@dataclass(frozen=True, kw_only=True)
class RotaryChoices:
    """Rotary embeddings and their tables."""

    fused_rotary: bool = False  # one kernel that saves only its tables
    fp32_rotary: bool = False  # fp32 tables and rotation
    half_rotary_tables: bool = False  # fp32 rotation, tables in the dtype of activations
    paired_rotary: bool = False  # the tables have one column for two elements of a head
    complex_rotary: bool = False  # cosines and sines are one complex fp32 table, one column for two elements
    batched_rotary: bool = False  # tables for each sequence of a batch
    expanded_rotary: bool = False  # each block expands the columns of the tables
    rotary_per_tensor: bool = False  # and does so once for queries and once for keys
    indexed_rotary: bool = False  # one fp32 buffer of both tables, indexed by the positions of packed documents
    rotary_by_window: bool = False  # sliding-window layers have tables of their own
    fp32_position_scales: bool = False  # the scale of queries is fp32
    concatenated_rotary: bool = False  # concatenates rotated and unrotated parts, which leaves heads outermost


@dataclass(frozen=True, kw_only=True)
class ExpertChoices:
    """Mixture of experts (MoE) and its router."""

    combine: Combine = Combine.ADDED
    dispatcher: Dispatcher = Dispatcher.ALLTOALL
    deterministic: bool = False  # ``index_add_`` sums expert outputs, and saves them: ``--deterministic-mode``
    every_token: bool = False  # each expert computes all tokens, with weight 0 if not selected, unless ep > 1
    looped_experts: bool = False  # a loop with separate gate and up, which saves outputs and row indices, unless ep > 1
    fused_experts: bool = False  # one function for all of an expert, which saves tokens and halves, unless ep or tp > 1
    sequential_experts: bool = False  # one expert after the other, each with GEMMs of its own
    router_outside_autocast: bool = False  # the router's GEMM runs outside autocast
    router_float32: bool = False  # the router's input and weight are cast to fp32
    half_router_scores: bool = False  # router scores in the dtype of activations; otherwise in fp32
    fp32_router: bool = False  # the router's weight is fp32 in every precision
    weights_float32: bool = True  # routing weights stay fp32; otherwise they are cast back
    softmax_float32: bool = False  # that cast, after an fp32 softmax, is to the dtype of tokens, not of logits


@dataclass(frozen=True, kw_only=True)
class LossChoices:
    """Logits and their loss."""

    loss: Loss = Loss.UPCAST
    loss_chunks: int = 8
    chunk_gib: int = 0  # of a fused loss's fp32 logits at most; 0: a chunk has about as many logits as inputs
    loss_float32: bool = True  # logits are cast to fp32
    shifted_labels: bool = False  # the model pads labels and shifts them by one position
    copied_logits: bool = False  # logits without a sequence's last are copied for the loss; otherwise labels are padded
    fp32_logits: bool = False  # the model casts them to fp32 and frees the head's output
    biased_logits: bool = False  # an fp32 buffer is added to logits, and the head's output is freed


@dataclass(frozen=True, kw_only=True)
class FrameworkChoices:
    """Framework code around layers, and features that a framework has."""

    model_code: bool = False  # the model's own modules, as in its family's file; local variables keep tensors alive
    forward_names: bool = False  # and its forward makes masks and rotary tables for all layers and keeps embeddings
    declared: tuple[str, ...] = ()
    """Prefixes of a layer's weight names in the order in which its code declares them; the longest match counts, and
    weights without a match come last. Empty: the order of the forward."""
    builds_mtp: bool = False  # layers for multi-token prediction
    module_lists: bool = False  # recomputes and offloads lists of modules
    shards_ssm_heads: bool = False  # tensor parallelism shards the heads of fused scans, with separate norm and GEMM
    global_buffer: bool = False  # all-gathered inputs share a permanent buffer
    upfront_gradients: bool = False  # gradients are one buffer, allocated before the first step
    te_gemms: bool = False  # FP8 and FP4 GEMMs are TransformerEngine's; otherwise torchao's
    stacks: bool = False  # hardware files have figures for its software stacks
    expandable_segments: bool = False  # importing the framework sets them, in PYTORCH_CUDA_ALLOC_CONF
    loads_ahead: bool = True  # a 4-bit base is loaded as transformers 4.51 to 4.57 load it, where TRL casts it
    not_compiled: str = ""  # why its layers are not compiled, and the alternative
    described: str = ""  # of a set for some families: its name in theirs
    undescribed: str = ""  # and the alternative for another; ``{kinds}``: those families


@dataclass(frozen=True, kw_only=True)
class Kernels(AttentionChoices, NormChoices, RotaryChoices, ExpertChoices, LossChoices, FrameworkChoices):
    """A kernel set; by default PyTorch's fused operators where it has them, and eager ops for the rest."""

    name: str = "pytorch"
    ssm_kernels: SsmKernels = SsmKernels.EAGER
    device: Device = Device.CUDA
    batch_first: bool = True  # activations are b x s x h; otherwise s x b x h
    byte_masks: bool = True  # a dropout mask has one byte an element; otherwise the dtype of its input
    separate_biases: bool = False  # a bias is added after the GEMM, in the wider dtype of both
    cast_down_input: bool = False  # the down projection's input is cast to its weight's dtype
    fused_gate: bool = False  # activation and multiplication of a gated MLP are one kernel that saves both halves
    gate_in_place: bool = False  # and whose backward writes their gradients over them
    fused_adapters: bool = False  # a linear layer and its adapter are one op, which saves its inputs
    fused_gelu: bool = False  # GPT-2's tanh GELU is one kernel (``megatron/core/fusions/fused_bias_gelu.py``)
    gelu_function: bool = False  # GELU saves its input; five tensors of its size in backward (``bloom_gelu_back``)
    named_attention: bool = False  # a local variable keeps the attention output alive until the layer returns
    named_blocks: bool = False  # local variables keep a block's output and its residual alive until the next norm ends
    named_embeddings: bool = False  # the model keeps its embeddings alive until its layers have run
    batched_positions: bool = False  # position and segment ids for each sequence of a batch
    stored_positions: bool = False  # position ids are a buffer of the model

    def with_attention(self, word: str | None) -> Kernels:
        """Replace the attention kernel; None: unchanged. "flash-attn" is the library, with the copies that it makes;
        "flex" is torch's, which differs for packed documents. Raise `UsageError` for an unknown kernel.
        """
        if word is None:
            return self
        copied = word == "flash-attn"
        documents = _DOCUMENTS.get(word, self.documents)
        word = {"sdpa": "flash", "flash-attn": "flash", "flex": "flash"}.get(word, word)
        if word not in set(AttentionKernel):
            raise UsageError(
                f"got the attention {word!r}; expected one of {', '.join(AttentionKernel)}, sdpa, flash-attn, flex"
            )
        return replace(
            self, attention=AttentionKernel(word), copied_attention=copied and not self.batch_first, documents=documents
        )

    def on_cpu(self) -> Kernels:
        """Replace CUDA kernels by PyTorch's CPU kernels."""
        return replace(self, device=Device.CPU, byte_masks=False)


_DOCUMENTS: Final = MappingProxyType(
    {"eager": Documents.MASK, "sdpa": Documents.MASK, "flash-attn": Documents.VARLEN, "flex": Documents.BLOCKS}
)


@cache
def _choices(kind: type) -> Mapping[str, type[StrEnum]]:
    """Fields of a dataclass that are a member of an enum."""
    hints = get_type_hints(kind).items()
    return {name: hint for name, hint in hints if isinstance(hint, type) and issubclass(hint, StrEnum)}


def typed(kind: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert fields of a dataclass from TOML: strings to enum members, lists to tuples."""
    lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
    return {**fields, **lists, **{key: made(fields[key]) for key, made in _choices(kind).items() if key in fields}}


def sets_with(choice: str) -> str:
    """Names of the kernel sets that have a choice, for messages."""
    return " or ".join(name for name in named("kernels") if getattr(kernels(name), choice))


@cache
def kernels(name: str, family: str = "") -> Kernels:
    """Return a kernel set by name for a model family; a `UsageError` for an unknown one.

    A set lists where families differ: ``only`` has the families with a field, ``but`` those without it.
    """
    sets = named("kernels")
    fields = dict(sets[known(name, sets, "the kernels")])
    base = kernels(fields.pop("like"), family) if "like" in fields else Kernels()
    only, but = fields.pop("only", {}), fields.pop("but", {})
    fields |= {field: True for field, families in only.items() if family in families}
    fields |= {field: False for field, families in but.items() if family in families}
    for key in ("order", "folder"):
        fields.pop(key)
    return replace(base, name=name, **typed(Kernels, fields))


# workspaces -----------------------------------------------------------------------------------------------------------
#
# Workspaces of GEMM libraries are tensors, and count as allocated
# NOTE [ Workspaces ]
# torch gives cuBLAS one for each handle and stream (``aten/src/ATen/cuda/CublasHandlePool.cpp``,
# ``getChosenWorkspaceSize``): 32 MiB on Hopper, 8.125 MiB elsewhere, or ``CUBLAS_WORKSPACE_CONFIG``; 32 MiB on
# Blackwell as well since pull request 175344 of February 2026 (NVIDIA's containers from 26.04). Each thread has a
# handle, and autograd's backward has its own thread: two workspaces, the second from the first backward on.
# TransformerEngine has one for all its GEMMs (``get_cublas_workspace_size_bytes``): 32 MiB and 1 KiB on Hopper and
# later, 4 MiB before; with experts one for each of the four streams of its grouped GEMMs (``get_cublas_workspace`` with
# ``grouped_gemm``); and one of three times the size for GEMMs that overlap with communication (``ub`` there,
# ``_NUM_MAX_UB_STREAMS``; Megatron's ``--tp-comm-overlap``).


GROUPED_STREAMS: Final = 4
OVERLAP_STREAMS: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspaces:
    """Bytes of GEMM workspaces.

    Args:
        router_bytes: TransformerEngine's, where torch has the layers' GEMMs and TransformerEngine the router's:
            ``megatron/core/transformer/moe/moe_utils.py``, ``RouterGatingLinearFunction`` with ``te_general_gemm``.
    """

    name: str
    torch_bytes: int = 0  # torch's, of one thread
    library_bytes: int = 0  # of the library of the layers' GEMMs; 0: torch has them
    router_bytes: int = 0


WORKSPACES: Final = MappingProxyType(
    {
        name: Workspaces(name=name, **sizes)
        for name, sizes in read_table(Path(__file__).with_suffix(".toml"))["workspaces"].items()
    }
)
"""Workspaces by library and GPU."""


def workspaces(name: str) -> Workspaces:
    """Return workspaces by name, or raise a `UsageError`."""
    return WORKSPACES[known(name, WORKSPACES, "--workspaces")]
