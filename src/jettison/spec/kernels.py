"""How the mathematics of a layer is carried out: which kernels are one piece, and therefore what they leave behind.

The same layer saves different tensors under different code. A named set of these choices is an entry of a framework's
``defaults.toml``, section ``kernels``; a model family's file overrides fields where its code differs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from jettison.core.errors import UsageError
from jettison.core.units import KIB, MIB
from jettison.spec.frameworks import named


class AttentionKernel(StrEnum):
    """How scores become outputs."""

    EAGER = "eager"  # scores, probabilities and masks are tensors
    FLASH = "flash"  # one kernel that keeps query, key, value, output and a log-sum-exp a row (arXiv 2205.14135)


class Loss(StrEnum):
    """From logits to a number."""

    UPCAST = "upcast"  # fp32 copy of the logits, log-softmax, nll: torch.nn.functional.cross_entropy
    OUTSIDE = "outside"  # the same of what the model has returned: a loop's own, in fp32 whatever the model's would be
    ROWS = "rows"  # the same over chunks of rows, its gradient in the fp32 logits' place: `auto_checkpoint` has it so
    VOCAB_PARALLEL = "vocab-parallel"  # Megatron's: one fp32 copy of a shard, in place from exponential to gradient
    SHARDED = "sharded"  # nanotron's: the same in a second copy, beside fp32 logits that the caller holds
    NATIVE = "native"  # Megatron's --cross-entropy-fusion-impl native: the same compiled, with a second copy
    TE = "te"  # TransformerEngine's: the gradient is written over the 16-bit logits in the forward
    IN_PLACE = "in-place"  # one kernel that keeps logits; its gradient is written over them in backward
    COMPILED = "compiled"  # cross_entropy under torch.compile: 16-bit logits and two numbers a row
    DTENSOR = "dtensor"  # torch's loss_parallel over a sharded vocabulary: four fp32 copies at its worst moment
    FUSED = "fused"  # head and loss together: gradients are made in the forward, logits never kept
    CHUNKED = "chunked"  # the sequence passes the head and the loss in chunks, each computed again in backward
    LISTED = "listed"  # the same, but 16-bit logits of all chunks stay: torchtune's CEWithChunkedOutputLoss
    TILED = "tiled"  # log-probabilities of tiles of logits, again in backward: TRL's trainers
    DPO = "dpo"  # the same of chosen and rejected sequences


class Documents(StrEnum):
    """How attention stays within documents that are packed into one sequence."""

    MASK = "mask"  # scores of other documents are masked: a mask of s × s for each sequence
    VARLEN = "varlen"  # the kernel is told where each begins, and computes nothing else: flash-attn, thd, varlen_attn
    BLOCKS = "blocks"  # FlexAttention: blocks of 128 × 128 that nothing needs are left out


class ContextExchange(StrEnum):
    """How attention over a sharded sequence gets to see all of it (context parallelism)."""

    RING = "ring"  # keys and values travel, and each rank's own stay as they are
    P2P = "p2p"  # the same by TransformerEngine: own keys and values are first joined in one buffer, which stays
    GATHER = "gather"  # keys and values of all ranks, in each pass: Llama 3 (arXiv 2407.21783 §3.3.2), `jettison train`
    A2A = "a2a"  # all-to-all: whole sequences of a share of the heads, and back (arXiv 2309.14509)


class Dispatcher(StrEnum):
    """How tokens reach the ranks of their experts."""

    ALLTOALL = "alltoall"  # rows travel to the ranks that have their experts, and back
    FLEX = "flex"  # the same by DeepEP or HybridEP: over the network once to each node, which changes times alone
    ALLGATHER = "allgather"  # every rank gathers all tokens in a buffer that stays, and takes rows for its experts


class Scans(StrEnum):
    """How a state is carried along the sequence, in layers that have one."""

    WRITTEN = "written"  # transformers' own code, op by op
    FUSED = "fused"  # one kernel: flash-linear-attention's, or mamba-ssm's with causal-conv1d


class Combine(StrEnum):
    """Where the outputs of a token's experts get their weights, and how they become one row again."""

    ACTIVATION = "activation"  # weights enter the kernel of the activation, before the last product
    ADDED = "added"  # fp32 outputs times weights, added to the rows of their tokens
    SORTED = "sorted"  # outputs times weights, sorted back by token and summed


class Device(StrEnum):
    """Whose kernels: they differ in what fused ones save beside the mathematics."""

    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True, kw_only=True)
class AttentionChoices:
    """Attention, from the joint projection to the output projection."""

    attention: AttentionKernel = AttentionKernel.FLASH
    scores_float32: bool = True  # eager softmax runs on an fp32 copy, and its result is cast back
    uncast_probabilities: bool = False  # it stays in the dtype of scores, which an fp32 mask widens under autocast
    wide_scores: bool = False  # eager attention casts query and key to fp32 before their product
    fused_softmax: bool = False  # scale, mask and softmax of eager attention are one kernel
    filled_masks: bool = False  # scores are filled by a boolean mask, which stays; otherwise a mask is added
    copied_attention: bool = False
    """A fused kernel takes b x s and is given copies of query, key and value; its output is copied back.
    TransformerEngine with flash-attn (``backends.py``, ``FlashAttention.forward``), which it prefers before Hopper, and
    later where a run has to be deterministic, but for Hopper itself (``utils.py``, ``get_attention_backend``); cuDNN's
    kernel takes s x b as it is."""
    context_exchange: ContextExchange = ContextExchange.RING  # how attention sees a sequence that cp shards
    documents: Documents = Documents.VARLEN  # how it stays within packed documents
    varlen_random_state: bool = True  # `torch.nn.attention.varlen` keeps its kernel's random state
    tensor_masks: bool = False  # windows and padding reach a fused kernel as a mask, which each layer keeps
    bidirectional_masks: bool = False  # and a mask where attention looks both ways, too
    made_masks: bool = False  # and one whatever it knows; with distances one of its own for each head
    fused_projections: bool = False  # query, key and value are one product, gate and up another
    split_projections: bool = False  # a joint projection is cut by split, chunk or unbind, not by slices
    packed_heads: bool = False  # query, key and value are copied out as one: NOTE [ Packed heads ] in `formula`
    copied_heads: bool = False  # queries are scaled before heads are split, and each head is made contiguous: Whisper
    repeat_kv: bool = False  # key-value heads are copied for every query head, unless a kernel takes groups
    always_repeat_kv: bool = False  # and then as well
    indexed_kv: bool = False  # shared keys and values are copied by an index that stays; no fused kernel takes one head
    learned_zeros: bool = False  # zeros in the place of biases have a gradient


@dataclass(frozen=True, kw_only=True)
class NormChoices:
    """Normalisations."""

    fused_norm: bool = True  # one kernel that saves its input and its statistics
    wide_norm: bool = False  # a written RMSNorm's weight multiplies the fp32 value, not the one cast back
    unwidened_norm: bool = False  # its mean is an fp32 copy's, and the input itself is scaled
    cast_weights: bool = False  # where norms are fp32, the weight is cast, too, and its copy stays
    written_layer_norm: bool = False  # LayerNorm is written out in fp32, op by op
    late_norms: bool = False  # norms of each head's query and key come after their rotation
    inline_norms: bool = False  # they come with their own products, the value's product behind them


@dataclass(frozen=True, kw_only=True)
class RotaryChoices:
    """Rotary positions and their tables."""

    fused_rotary: bool = False  # one kernel that saves nothing but its tables
    wide_rotary: bool = False  # the tables are fp32, and so is the rotation
    narrow_tables: bool = False  # the rotation is fp32, and the tables are not
    paired_rotary: bool = False  # the tables have one column for two elements of a head
    complex_rotary: bool = False  # cosines and sines are one complex fp32 table, of one column for two elements
    batched_rotary: bool = False  # the tables are made for each sequence of a batch
    spread_rotary: bool = False  # each block repeats the columns of the tables for itself
    rotary_apiece: bool = False  # and does so for queries and keys apart, once each
    looked_up_rotary: bool = False  # an fp32 buffer of both, of which packed documents look up rows by position
    rotary_by_window: bool = False  # layers with a window have tables of their own
    wide_positions: bool = False  # the factor of scaled queries is fp32
    joined_rotary: bool = False  # it ends by joining rotated and unrotated parts, which leaves heads outermost


@dataclass(frozen=True, kw_only=True)
class ExpertChoices:
    """Mixtures of experts and their routers."""

    combine: Combine = Combine.ADDED
    dispatcher: Dispatcher = Dispatcher.ALLTOALL
    deterministic: bool = False  # ``index_add_`` adds expert outputs, and keeps them: ``--deterministic-mode``
    every_token: bool = False  # each expert gets all tokens, those it was not chosen for weighted by 0, unless ep > 1
    looped_experts: bool = False  # a loop with gate and up apart, which keeps outputs and rows' places, unless ep > 1
    sequential_experts: bool = False  # one expert after the other, with products of its own
    routers_apart: bool = False  # a router's product is out of autocast's reach
    router_float32: bool = False  # a router's input and weight are cast to fp32 for its product
    narrow_routers: bool = False  # scores are worked out in the dtype of activations; otherwise in fp32
    wide_routers: bool = False  # a router's weight is held in fp32 whatever the others are
    weights_float32: bool = True  # the weights of a token's experts stay fp32; otherwise they are cast back
    softmax_float32: bool = False  # that cast back, after an fp32 softmax, is to the dtype of tokens, not of logits


@dataclass(frozen=True, kw_only=True)
class LossChoices:
    """Logits and their loss."""

    loss: Loss = Loss.UPCAST
    loss_chunks: int = 8
    loss_float32: bool = True  # logits are cast up
    shifted_labels: bool = False  # the model itself moves labels by one position, after padding them
    copied_logits: bool = (
        False  # all of them but a sequence's last are copied for the loss; otherwise labels are padded
    )
    widened_logits: bool = False  # the model itself casts them up, and lets go of what their product returned
    biased_logits: bool = False  # an fp32 buffer is added to logits; what their product returned goes then


@dataclass(frozen=True, kw_only=True)
class FrameworkChoices:
    """What a framework's code does around layers, and what it has at all."""

    model_code: bool = False  # the model's own modules, as its family's file describes them, whose frames hold values
    forward_names: bool = False  # and whose forward makes masks and rotary tables for all layers, and names embeddings
    declared: tuple[str, ...] = ()
    """How names of a layer's weights begin, in the order in which its code declares them; the longest that fits counts,
    and what none fits is behind. Empty: in the order of the forward."""
    builds_mtp: bool = False  # layers for multi-token prediction
    module_lists: bool = False  # recomputes and offloads lists of modules
    shares_scans: bool = False  # tensor parallelism shares the heads of fused scans, whose norm and product stand apart
    global_buffer: bool = False  # gathered inputs have a buffer for good
    upfront_gradients: bool = False  # gradients are one buffer from the start
    te_products: bool = False  # narrow products are TransformerEngine's; otherwise torchao's
    stacks: bool = False  # hardware files tell its software stacks apart
    not_compiled: str = ""  # why nobody compiles its layers, and what to give
    undescribed: str = ""  # of a set that is described for some families: what to give for another, ``{kinds}`` those


@dataclass(frozen=True, kw_only=True)
class Kernels(AttentionChoices, NormChoices, RotaryChoices, ExpertChoices, LossChoices, FrameworkChoices):
    """A set of choices: PyTorch's own fused operators where it has them, the rest written out, unless it says more."""

    name: str = "pytorch"
    scans: Scans = Scans.WRITTEN
    device: Device = Device.CUDA
    batch_first: bool = True  # activations are b x s x h; otherwise s x b x h
    byte_masks: bool = True  # a dropout mask takes one byte an element; otherwise it has the dtype of what it masks
    biases_apart: bool = False  # a product's result gets its bias by a sum, in the wider dtype of both
    widened_down: bool = False  # what a feed-forward block's last product reads is cast to its weight's dtype before
    fused_gate: bool = False  # activation and product of a gated block are one kernel that saves both halves
    fused_adapters: bool = False  # a product and its adapter are one op, which keeps what it reads
    fused_gelu: bool = False  # GPT-2's written GELU is one kernel (``megatron/core/fusions/fused_bias_gelu.py``)
    gelu_function: bool = False  # GELU saves its input; five tensors of its size in backward (``bloom_gelu_back``)
    named_attention: bool = False  # a layer has a name for what its attention returned until it is over
    named_blocks: bool = False  # a block's result and what it is added to have names until the norm behind is over
    named_embeddings: bool = False  # the model names the rows of its tables until its layers are through
    batched_positions: bool = False  # ids of positions and segments are made for each sequence of a batch
    stored_positions: bool = False  # position ids are a buffer of the model

    def with_attention(self, word: str | None) -> Kernels:
        """The same with another attention; None leaves it. "flash-attn" is the library, with what it copies; "flex" is
        torch's, which differs where documents are packed.

        Raises:
            UsageError: no such kernel.
        """
        if word is None:
            return self
        copied = word == "flash-attn"
        documents = _DOCUMENTS.get(word, self.documents)
        word = {"sdpa": "flash", "flash-attn": "flash", "flex": "flash"}.get(word, word)
        if word not in set(AttentionKernel):
            raise UsageError(
                f"got the attention {word!r}; expected one of {', '.join(AttentionKernel)}, flash-attn, flex"
            )
        return replace(
            self, attention=AttentionKernel(word), copied_attention=copied and not self.batch_first, documents=documents
        )

    def on_cpu(self) -> Kernels:
        """The same on PyTorch's CPU kernels."""
        return replace(self, device=Device.CPU, byte_masks=False)


_DOCUMENTS: Final = MappingProxyType(
    {"eager": Documents.MASK, "sdpa": Documents.MASK, "flash-attn": Documents.VARLEN, "flex": Documents.BLOCKS}
)
_TYPES: Final = MappingProxyType(
    {
        "attention": AttentionKernel,
        "loss": Loss,
        "documents": Documents,
        "context_exchange": ContextExchange,
        "combine": Combine,
        "scans": Scans,
        "declared": tuple,
    }
)


def typed(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of `Kernels` as TOML has them, with enum members and tuples in the place of strings and lists."""
    return {key: _TYPES[key](value) if key in _TYPES else value for key, value in fields.items()}


def kernel_names() -> tuple[str, ...]:
    """Names of all sets."""
    return tuple(named("kernels"))


@cache
def kernels(name: str, family: str = "") -> Kernels:
    """A set by name, as code of a model family has it, or a `UsageError`.

    A set says itself where families differ: ``only`` lists those that have a field, ``but`` those that have it not.
    """
    sets = named("kernels")
    if name not in sets:
        raise UsageError(f"got the kernels {name!r}; expected one of {', '.join(sets)}")
    fields = dict(sets[name])
    base = kernels(fields.pop("like"), family) if "like" in fields else Kernels()
    only, but = fields.pop("only", {}), fields.pop("but", {})
    fields |= {field: True for field, families in only.items() if family in families}
    fields |= {field: False for field, families in but.items() if family in families}
    for key in ("order", "folder"):
        fields.pop(key)
    return replace(base, name=name, **typed(fields))


# workspaces -----------------------------------------------------------------------------------------------------------
#
# What libraries of matrix products set aside for themselves. They are tensors, and count as allocated
# NOTE [ Workspaces ]
# torch gives cuBLAS one for each handle and stream (``aten/src/ATen/cuda/CublasHandlePool.cpp``,
# ``getChosenWorkspaceSize``): 32 MiB on Hopper, 8.125 MiB elsewhere, or what ``CUBLAS_WORKSPACE_CONFIG`` says; 32 MiB
# on Blackwell as well from pull request 175344 on, of February 2026 (NVIDIA's containers from 26.04 on). Handles belong
# to threads, and autograd's backward has a thread of its own: two, the second from the first backward on.
# TransformerEngine has one for all its products (``get_cublas_workspace_size_bytes``): 32 MiB and 1 KiB on Hopper and
# later, 4 MiB before; and one for each of four streams of its grouped products (``get_cublas_workspace`` with
# ``grouped_gemm``), where there are experts; and three in one for products whose transfers run beside them (``ub``
# there, ``_NUM_MAX_UB_STREAMS``; Megatron's ``--tp-comm-overlap``).


GROUPED_STREAMS: Final = 4
OVERLAP_STREAMS: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspaces:
    """Bytes that are set aside.

    Args:
        router_bytes: by the library, where torch has the layers' products and Megatron gives it a router's:
            ``megatron/core/transformer/moe/moe_utils.py``, ``RouterGatingLinearFunction`` with ``te_general_gemm``.
    """

    name: str
    torch_bytes: int = 0  # by torch for a thread's products
    library_bytes: int = 0  # by the library that has the layers' products; 0: torch has them
    router_bytes: int = 0

    @property
    def grouped_bytes(self) -> int:
        """Of the library's grouped products."""
        return GROUPED_STREAMS * self.library_bytes

    @property
    def overlap_bytes(self) -> int:
        """Of the library's products that transfers run beside."""
        return OVERLAP_STREAMS * self.library_bytes

    def with_torch(self, nbytes: int) -> Workspaces:
        """As ``CUBLAS_WORKSPACE_CONFIG`` changes it: :4096:8 is 32 MiB."""
        return replace(self, torch_bytes=nbytes)


_OLDER, _HOPPER = 8 * MIB + 128 * KIB, 32 * MIB
_TE_OLDER, _TE_HOPPER = 4 * MIB, 32 * MIB + KIB
WORKSPACES: Final = MappingProxyType(
    {
        w.name: w
        for w in (
            Workspaces(name="none"),
            Workspaces(name="torch-ampere", torch_bytes=_OLDER, router_bytes=_TE_OLDER),
            Workspaces(name="torch-hopper", torch_bytes=_HOPPER, router_bytes=_TE_HOPPER),
            Workspaces(name="torch-blackwell", torch_bytes=_OLDER, router_bytes=_TE_HOPPER),
            Workspaces(name="te-ampere", torch_bytes=_OLDER, library_bytes=_TE_OLDER),
            Workspaces(name="te-hopper", torch_bytes=_HOPPER, library_bytes=_TE_HOPPER),
            Workspaces(name="te-blackwell", torch_bytes=_OLDER, library_bytes=_TE_HOPPER),
        )
    }
)
"""By whose products they are and on which GPU; Hopper's are those of Blackwell as well under a torch of this year."""


def workspaces(name: str) -> Workspaces:
    """A set by name, or a `UsageError`."""
    if name not in WORKSPACES:
        raise UsageError(f"got --workspaces {name!r}; expected one of {', '.join(WORKSPACES)}")
    return WORKSPACES[name]
