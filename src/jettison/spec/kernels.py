"""How the mathematics of a layer is carried out: which kernels are one piece, and therefore what they leave behind.

The same layer saves different tensors under different code. These choices are the difference between a Hugging Face
model, a Megatron one and plain PyTorch with fused operators, each a named set in `KERNELS`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from jettison.core.errors import UsageError


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
    COMPILED = "compiled"  # cross_entropy under torch.compile: 16-bit logits and two numbers a row
    DTENSOR = "dtensor"  # torch's loss_parallel over a sharded vocabulary: four fp32 copies at its worst moment
    FUSED = "fused"  # head and loss together: gradients are made in the forward, logits never kept
    CHUNKED = "chunked"  # the sequence passes the head and the loss in chunks, each computed again in backward
    LISTED = "listed"  # the same, but 16-bit logits of all chunks stay: torchtune's CEWithChunkedOutputLoss
    DPO = "dpo"  # TRL's log-probabilities of chosen and rejected, made of tiles of logits, again in backward


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """A set of choices.

    Args:
        scores_float32: the softmax of eager attention runs on an fp32 copy and its result is cast back.
        uncast_probabilities: what eager attention's softmax makes stays in the dtype of its scores, which under
            autocast a mask or biases in fp32 make wider than values.
        wide_scores: eager attention casts query and key to fp32 before their product.
        fused_softmax: scale, mask and softmax of eager attention are one kernel.
        named_attention: a layer has a name for what its attention returned until it is over.
        named_blocks: what attention and the feed-forward block returned, and what it is added to, have names until the
            norm behind them is over.
        named_embeddings: the model's forward has names for the rows of its tables until its layers are through.
        filled_masks: eager attention fills scores where a boolean mask says so, which stays; otherwise a mask is added.
        copied_attention: a fused kernel takes b × s and is given copies of query, key and value; its output is copied
            back. TransformerEngine with flash-attn (``backends.py``, ``FlashAttention.forward``), which it prefers
            before Hopper, and later where a run has to be deterministic, but for Hopper itself (``utils.py``,
            ``get_attention_backend``); cuDNN's kernel takes s × b as it is.
        context_exchange: how attention sees a sequence that cp shards.
        documents: how attention stays within documents.
        tensor_masks: a fused attention kernel knows causality and nothing else: a window or padding reaches it as a
            mask, which each layer makes and keeps, as scaled_dot_product_attention does.
        bidirectional_masks: it is given one where attention looks both ways, too.
        made_masks: it is given one whatever it knows, and where scores get distances one of its own for each head.
        fused_norm: a norm is one kernel that saves its input and its statistics.
        wide_norm: where an RMSNorm is written out, its weight multiplies the fp32 value, not the one cast back.
        unwidened_norm: where an RMSNorm is written out, its mean is an fp32 copy's, and the input itself is scaled.
        routers_apart: a router's product is out of autocast's reach.
        late_norms: norms of each head's query and key come after their rotation.
        inline_norms: norms of query and key come with their own products, the value's product behind them.
        biases_apart: what a layer's product returns gets its bias by a sum of its own, in the wider dtype of both.
        widened_down: what a feed-forward block's last product reads is cast to the dtype of its weight before it.
        cast_weights: where norms are fp32, the weight is cast, too, and its copy stays.
        written_layer_norm: LayerNorm is written out in fp32, op by op, and not one kernel.
        fused_projections: query, key and value come out of one product, gate and up out of another, whatever the
            model's code has.
        fused_rotary: rotation is one kernel that saves nothing but its tables.
        wide_rotary: the tables are fp32, and so is the rotation.
        copied_heads: queries are scaled before heads are split, and each head of queries, keys and values is made
            contiguous: Whisper.
        narrow_tables: the rotation is fp32, and the tables are not.
        paired_rotary: the tables have one column for two elements of a head.
        complex_rotary: cosines and sines are one complex fp32 table, of one column for two elements.
        batched_rotary: the tables are made for each sequence of a batch.
        spread_rotary: each block spreads the columns of the tables out for itself, one for each element of a pair.
        rotary_apiece: and does so for queries and keys apart, once each.
        looked_up_rotary: the tables are a buffer of the model, cosines and sines side by side in fp32. Where documents
            are packed, each layer looks up rows of it by position, once for queries and once for keys.
        packed_heads: query, key and value of one product are copied out as one, and query is rotated where it is:
            NOTE [ Packed heads ] in `formula.packed_heads`.
        rotary_by_window: layers with a window have rotary tables of their own.
        wide_positions: the factor of scaled queries is fp32.
        split_projections: a joint projection is cut by split, chunk or unbind, not by slices.
        joined_rotary: rotation ends by joining what is rotated and what is not, however much that is, which leaves
            heads outermost in memory.
        fused_gate: activation and product of a gated block are one kernel that saves both halves.
        fused_gelu: what GPT-2's code writes out of GELU is one kernel (``megatron/core/fusions/fused_bias_gelu.py``).
        gelu_function: GELU is a function of its own that saves its input alone, and whose backward is written out: five
            tensors of its size are there at once, of which one is the gradient's (``bloom_gelu_back``).
        byte_masks: a dropout mask takes one byte an element; otherwise it has the dtype of what it masks.
        repeat_kv: key-value heads are copied until there are as many as query heads, unless a kernel takes them so.
        always_repeat_kv: and then as well.
        indexed_kv: where heads share them, keys and values are copied out of the joint product by an index that stays,
            a group's for each of its heads; those that all heads share no fused kernel takes.
        batched_positions: ids of positions and segments are made for each sequence of a batch.
        stored_positions: position ids are a buffer of the model.
        shifted_labels: the model itself moves labels by one position, after padding them.
        biased_logits: a buffer in fp32 is added to logits; what their product returned goes then.
        loss_float32: logits are cast up for the loss.
        batch_first: activations are b × s × h; otherwise s × b × h.
        combine: how a mixture of experts is weighted and summed.
        dispatcher: how tokens reach experts.
        deterministic: torch's deterministic algorithms, Megatron's ``--deterministic-mode``: expert outputs are added
            by ``index_add_``, for which autograd keeps what is added; for ``scatter_add_`` it keeps the index alone.
        every_token: each expert is given all tokens, those it was not chosen for with a weight of 0, and its outputs
            are summed over experts; where experts are spread over ranks, tokens are sent to those they chose.
        looped_experts: a loop over experts, with gate and up apart, which keeps each output once more and where each
            row is from; where experts are spread over ranks, as if it were none.
        sequential_experts: one expert after the other, each with products of its own, not one grouped product.
        router_float32: a router's input and weight are cast to fp32 for its product.
        narrow_routers: scores of all experts are worked out in the dtype of activations; otherwise in fp32.
        wide_routers: a router's weight is held in fp32 whatever the others are.
        weights_float32: the weights of a token's experts stay fp32; otherwise they are cast back.
        learned_zeros: zeros in the place of biases have a gradient.
        scans: how layers carry a state along the sequence.
        declared: how names of a layer's weights begin, in the order in which its code declares them; the longest that
            fits counts, and what none fits is behind. None: in the order of the forward.
        softmax_float32: that cast back, after a softmax in fp32, is to the dtype of tokens, not to that of logits.
    """

    name: str
    attention: AttentionKernel
    loss: Loss = Loss.UPCAST
    loss_chunks: int = 8
    scores_float32: bool = True
    uncast_probabilities: bool = False
    wide_scores: bool = False
    named_attention: bool = False
    named_blocks: bool = False
    named_embeddings: bool = False
    filled_masks: bool = False
    fused_softmax: bool = False
    copied_attention: bool = False
    context_exchange: ContextExchange = ContextExchange.RING
    documents: Documents = Documents.VARLEN
    tensor_masks: bool = False
    bidirectional_masks: bool = False
    made_masks: bool = False
    fused_norm: bool = True
    wide_norm: bool = False
    unwidened_norm: bool = False
    biases_apart: bool = False
    widened_down: bool = False
    late_norms: bool = False
    inline_norms: bool = False
    routers_apart: bool = False
    cast_weights: bool = False
    written_layer_norm: bool = False
    fused_projections: bool = False
    fused_rotary: bool = False
    wide_rotary: bool = False
    copied_heads: bool = False
    narrow_tables: bool = False
    paired_rotary: bool = False
    complex_rotary: bool = False
    batched_rotary: bool = False
    spread_rotary: bool = False
    rotary_apiece: bool = False
    looked_up_rotary: bool = False
    rotary_by_window: bool = False
    wide_positions: bool = False
    joined_rotary: bool = False
    packed_heads: bool = False
    split_projections: bool = False
    fused_gate: bool = False
    fused_gelu: bool = False
    gelu_function: bool = False
    byte_masks: bool = True
    repeat_kv: bool = False
    always_repeat_kv: bool = False
    indexed_kv: bool = False
    batched_positions: bool = False
    stored_positions: bool = False
    shifted_labels: bool = False
    biased_logits: bool = False
    loss_float32: bool = True
    batch_first: bool = True
    combine: Combine = Combine.ADDED
    dispatcher: Dispatcher = Dispatcher.ALLTOALL
    every_token: bool = False
    looped_experts: bool = False
    sequential_experts: bool = False
    deterministic: bool = False
    router_float32: bool = False
    narrow_routers: bool = False
    wide_routers: bool = False
    weights_float32: bool = True
    softmax_float32: bool = False
    learned_zeros: bool = False
    scans: Scans = Scans.WRITTEN
    device: Device = Device.CUDA
    declared: tuple[str, ...] = ()

    @property
    def of_transformers(self) -> bool:
        """Is it transformers' code, whatever kernels are in it?"""
        return self.name in ("huggingface", "liger")

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
MEGATRON: Final = Kernels(
    name="megatron",
    attention=AttentionKernel.FLASH,
    loss=Loss.VOCAB_PARALLEL,
    scores_float32=False,
    fused_softmax=True,
    fused_projections=True,
    fused_rotary=True,
    fused_gate=True,
    fused_gelu=True,
    context_exchange=ContextExchange.P2P,
    batch_first=False,
    combine=Combine.ACTIVATION,
    scans=Scans.FUSED,
)
"""Fused scale-mask-softmax (16-bit result), norms, rotation and SwiGLU; the form that arXiv 2205.05198 counts."""
PYTORCH: Final = Kernels(name="pytorch", attention=AttentionKernel.FLASH)
"""PyTorch's own fused operators where it has them, the rest written out, as torchtitan's models are."""
PYTORCH_2_8: Final = replace(PYTORCH, name="pytorch-2.8", fused_norm=False, repeat_kv=True, always_repeat_kv=True)
"""The same before PyTorch's pull request 153666 of July 2025: ``rms_norm`` is a sum of other ops, which autograd sees.
torchtitan's ``norm_type`` of that time chooses between it and a Triton kernel of its own (``fused_rmsnorm``), and its
models copy keys and values for every head (``repeat_kv``, until ff0829c of January 2026).
"""
_NORMS_LAST: Final = (
    "attention.",
    "attention.query_norm.",
    "attention.key_norm.",
    "mixer.convolution.",
    "mixer.",
    "mlp.",
)
HUGGINGFACE: Final = Kernels(
    name="huggingface",
    declared=_NORMS_LAST,
    attention=AttentionKernel.FLASH,
    documents=Documents.MASK,
    tensor_masks=True,
    fused_norm=False,
    repeat_kv=True,
    shifted_labels=True,
    combine=Combine.SORTED,
)
"""The code of transformers: norms in fp32 op by op (LayerNorm is fused there too), rotation written out."""

TORCHTUNE: Final = Kernels(
    name="torchtune",
    attention=AttentionKernel.FLASH,
    documents=Documents.BLOCKS,
    fused_norm=False,
    wide_rotary=True,
    looked_up_rotary=True,
    repeat_kv=True,
    always_repeat_kv=True,
)
"""The code of torchtune 0.4, in ``torchtune/modules/``: ``rms_norm.py`` (``x.float()``, and back before the weight),
``attention.py`` (``k.expand(...)`` and ``reshape`` to as many heads as queries have, whatever kernel follows),
``position_embeddings.py`` (``self.cache[input_pos]``), ``transformer.py`` (``self.output(h).float()``), and
FlexAttention over packed documents (``attention_utils.py``).
"""

LIGER: Final = replace(HUGGINGFACE, name="liger", loss=Loss.FUSED, fused_norm=True, fused_rotary=True, fused_gate=True)
"""transformers' code with Liger-Kernel's Triton kernels in it, as a Trainer's ``use_liger_kernel=True`` puts them there
(ead96b6, ``src/liger_kernel/transformers/monkey_patch.py``, ``apply_liger_kernel_to_llama`` and its like).
``ops/rms_norm.py`` saves its input and an fp32 number a row, ``ops/rope.py`` writes over queries and keys and saves the
tables alone, ``ops/swiglu.py`` and ``ops/geglu.py`` save both halves and compute the activation again; head and loss
are one (``ops/fused_linear_cross_entropy.py``). NeMo AutoModel patches so by default, all but the loss: ``--loss
upcast``. Read, not run: they need a GPU.
"""

NANOTRON: Final = replace(
    PYTORCH,
    name="nanotron",
    loss=Loss.SHARDED,
    fused_projections=True,
    fused_rotary=True,
    packed_heads=True,
    split_projections=True,
    batch_first=False,
)
"""The code of nanotron, ``src/nanotron/models/llama.py`` (9055c66): norms are flash-attn's Triton kernel
(``nn/layer_norm.py``), and SwiGLU is written out (until the second half of 2024 it was compiled, which keeps one tensor
less). ``sharded_cross_entropy`` in ``parallel/tensor_parallel/functional.py`` is its loss.
"""

KERNELS: Final = MappingProxyType(
    {k.name: k for k in (MEGATRON, PYTORCH, HUGGINGFACE, TORCHTUNE, LIGER, NANOTRON, PYTORCH_2_8)}
)


def kernels(name: str) -> Kernels:
    """A set by name.

    Raises:
        UsageError: no such set.
    """
    if name not in KERNELS:
        raise UsageError(f"got the kernels {name!r}; expected one of {', '.join(KERNELS)}")
    return KERNELS[name]
