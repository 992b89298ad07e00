"""What is set aside on a stage beside the tensors of the model: workspaces, gradients that stand for none, masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from jettison.dtypes import DTYPE_BYTES
from jettison.formula.region import HEAD
from jettison.formula.tape import Weight
from jettison.predict.stages import Chunk, StageRegion
from jettison.spec.kernels import AttentionKernel, Dispatcher, Documents
from jettison.spec.model import Attention, Layer
from jettison.spec.precision import Adding
from jettison.spec.run import Mode, Run


def set_aside(run: Run, chunks: Sequence[Chunk]) -> tuple[int, int]:
    """Bytes from the first forward on, and from the first backward on. See NOTE [ Workspaces ] in `spec.workspaces`."""
    if not run.workspaces.torch_bytes and run.adding is not Adding.DUMMY:
        return 0, 0
    parts = [group.part for chunk in chunks for group in chunk]
    spaces = run.workspaces
    experts = any(part.layer is not None and part.layer.experts for part in parts)
    own = spaces.torch_bytes if _has_torch_products(run, parts, experts) else 0
    library = spaces.library_bytes if experts or not spaces.router_alone else 0
    if not spaces.own_layers:
        library += spaces.grouped_bytes if experts and not run.kernels.sequential_experts else 0
        library += spaces.overlapped_bytes if run.tp_comm_overlap and run.layout.tp > 1 else 0
    library += gathering_buffer(run, chunks) if run.kernels.name == "megatron" and spaces.torch_bytes else 0
    dummies = dummy_gradients(run, parts) if run.adding is Adding.DUMMY else 0
    return own + library, own + dummies


def gathering_buffer(run: Run, chunks: Sequence[Chunk]) -> int:
    """The buffer into which Megatron gathers over ranks, for good: the largest of what comes through it.

    ``GlobalMemoryBuffer.get_tensor`` under the name "mpu": the head's input under sequence parallelism, in
    ``megatron/core/tensor_parallel/layers.py``, ``LinearWithGradAccumulationAndAsyncCommunication``; tokens of all
    ranks that share experts, in ``megatron/core/transformer/moe/token_dispatcher.py``, ``MoEAllGatherTokenDispatcher``,
    with ``use_global_buffer=True``. Rows are taken from it and kept; it is not. Without TransformerEngine also what
    ``megatron/core/transformer/dot_product_attention.py`` gives the scores' product to add to, times 0, and every
    sharded layer's input. Counted where workspaces are.
    """
    layout, parts = run.layout, [group.part for chunk in chunks for group in chunk]
    tokens, width = 0, DTYPE_BYTES[run.precision.compute]
    own = run.workspaces.own_layers  # all products are Megatron's own, not the head's alone
    if layout.tp > 1 and layout.sp and (own or any(part.name == HEAD for part in parts)):
        tokens = run.micro_batch * run.seq // layout.cp
    experts = any(part.layer is not None and part.layer.experts for part in parts)
    if experts and run.kernels.dispatcher is Dispatcher.ALLGATHER and layout.tp * layout.ep > 1:
        tokens = run.micro_batch * run.seq // layout.cp * layout.ep
    scores = 0
    if own and run.kernels.attention is AttentionKernel.EAGER:
        scores = run.micro_batch * _heads(run) // layout.tp * run.seq * run.seq
    return width * max(tokens * run.model.hidden, scores)


def _heads(run: Run) -> int:
    """Of the layer that has most."""
    kinds = [kind.attention for kind in run.model.kinds if isinstance(kind, Layer)]
    return max((attention.heads for attention in kinds if isinstance(attention, Attention)), default=0)


def loader_mask(run: Run) -> int:
    """The mask that comes with a micro-batch, b × 1 × s × s booleans, of which fused attention has no use.

    ``megatron/core/datasets/gpt_dataset.py`` makes it unless ``--no-create-attention-mask-in-dataloader``, and
    ``get_batch_on_this_tp_rank`` has it on the device on the first and the last stage, while the batch is at work.
    """
    return run.micro_batch * run.seq * run.seq // run.layout.cp if run.loader_masks else 0


BLOCK = 128
"""Of FlexAttention's masks: torch, ``flex_attention.py``, ``_DEFAULT_SPARSE_BLOCK_SIZE``."""


def packed_batch(run: Run) -> int:
    """What comes with packed documents while a micro-batch is at work: positions, and where documents end.

    Masks of s × s are one for all layers, b × 1 × s × s (``transformers/masking_utils.py``): booleans, and numbers for
    eager attention; the forward lets go of them, unless layers that are computed again hold them. FlexAttention's
    ``BlockMask`` has two int32 for each pair of blocks and each row of them, for whole and for partial blocks, by
    queries and by keys.
    """
    if not run.packed:
        return 0
    batch, seq = run.micro_batch, run.seq
    positions = 0 if run.model.learned_positions else 8 * batch * seq
    match run.kernels.documents:
        case Documents.MASK:
            eager = run.kernels.attention is AttentionKernel.EAGER
            each = DTYPE_BYTES[run.precision.compute] if eager else 1
            return positions + (0 if run.recompute.mode is Mode.NONE else each * batch * seq * seq)
        case Documents.BLOCKS:
            blocks = -(-seq // BLOCK)
            return positions + 4 * 4 * batch * (blocks + blocks * blocks)
        case _:
            return positions + 4 * (batch * -(-seq // run.packed) + 1)


def dummy_gradients(run: Run, parts: Sequence[StageRegion]) -> int:
    """One tensor for each shape of a layer's matrices, in the dtype of parameters.

    ``transformer_engine/pytorch/module/base.py``, ``get_dummy_wgrad`` (from version 2.3 on, of grouped products from
    2.10): where the product has added to ``main_grad``, autograd is still given a tensor of the weight's shape, one for
    each shape and dtype, which is kept for the next. The head's product, Megatron's own, takes it from there as well.
    """
    shapes = {
        shape
        for part in parts
        for weight in part.region.weights
        if weight.product and not weight.frozen
        for shape in _shape(run, weight)
    }
    return sum(map(prod, shapes)) * DTYPE_BYTES[run.precision.compute]


def _shape(run: Run, weight: Weight) -> Iterator[tuple[int, ...]]:
    """On one rank; of experts that of one."""
    sizes = run.layout.mesh_sizes
    local = [
        -(-size // prod(sizes[axis] for axis, dim in weight.places if dim == i)) for i, size in enumerate(weight.shape)
    ]
    yield tuple(local[1:] if weight.expert else local)


def _has_torch_products(run: Run, parts: Sequence[StageRegion], experts: bool) -> bool:
    """Where a library has the layers' products, the head's, a router's and eager attention's are still torch's."""
    if run.workspaces.own_layers:
        return True
    return experts or run.kernels.attention is AttentionKernel.EAGER or any(part.name == HEAD for part in parts)
