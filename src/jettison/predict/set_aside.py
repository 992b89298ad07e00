"""What is set aside on a stage beside the tensors of the model: workspaces, gradients that stand for none, masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.attention import MASK
from jettison.formula.region import HEAD
from jettison.formula.tape import Weight
from jettison.ledger.program import Program
from jettison.predict.stages import Chunk, StageRegion
from jettison.spec.kernels import AttentionKernel, Dispatcher, Documents
from jettison.spec.model import Layer, Scan
from jettison.spec.precision import Adding
from jettison.spec.recompute import Mode
from jettison.spec.run import Run


def set_aside(run: Run, chunks: Sequence[Chunk]) -> tuple[int, int]:
    """Bytes from the first forward on, and from the first backward on. See NOTE [ Workspaces ] in `spec.workspaces`."""
    if not run.workspaces.torch_bytes and run.adding is not Adding.DUMMY:
        return 0, 0
    parts = [group.part for chunk in chunks for group in chunk]
    spaces = run.workspaces
    experts = any(part.layer is not None and part.layer.experts for part in parts)
    own = spaces.torch_bytes if _has_torch_products(run, parts, experts) else 0
    grouped = experts and not run.kernels.sequential_experts
    library = spaces.library_bytes + (spaces.grouped_bytes if grouped else 0)
    if run.tp_comm_overlap and run.layout.tp > 1:
        library += spaces.overlap_bytes
    if run.kernels.global_buffer and spaces.torch_bytes:
        library += shared_buffer(run, chunks) + (spaces.router_bytes if experts else 0)
    dummies = dummy_gradients(run, parts) if run.adding is Adding.DUMMY else 0
    return own + library, own + dummies


def shared_buffer(run: Run, chunks: Sequence[Chunk]) -> int:
    """Megatron's buffer of the name "mpu" (``GlobalMemoryBuffer.get_tensor``), for good: the largest of what is in it.

    Inputs gathered over ranks: the head's under sequence parallelism, and those of layers whose products are Megatron's
    own, in ``megatron/core/tensor_parallel/layers.py``, ``LinearWithGradAccumulationAndAsyncCommunication``; tokens of
    all ranks that share experts, in ``megatron/core/transformer/moe/token_dispatcher.py``,
    ``MoEAllGatherTokenDispatcher``, with ``use_global_buffer=True``. Rows are taken from it and kept; it is not.
    And what the scores' product of Megatron's own attention is given to add to, times 0, in
    ``megatron/core/transformer/dot_product_attention.py``. Counted where workspaces are.
    """
    layout, parts = run.layout, [group.part for chunk in chunks for group in chunk]
    own = not run.workspaces.library_bytes
    tokens = 0
    if layout.tp > 1 and layout.sp and any(part.name == HEAD or (own and part.layer is not None) for part in parts):
        tokens = run.micro_batch * run.seq // layout.cp
    experts = any(part.layer is not None and part.layer.experts for part in parts)
    if experts and run.kernels.dispatcher is Dispatcher.ALLGATHER and layout.tp * layout.ep > 1:
        tokens = run.micro_batch * run.seq // layout.cp * layout.ep
    scores = max((_scores(run, part.layer) for part in parts), default=0) if own else 0
    return max(tokens * run.model.hidden, scores) * DTYPE_BYTES[run.precision.compute]


def _scores(run: Run, layer: object) -> int:
    """Of one layer's eager attention on one rank: b x a/t x s x s; of two stacks, the longer's."""
    if not isinstance(layer, Layer) or run.kernels.attention is not AttentionKernel.EAGER:
        return 0
    if layer.attention is None or isinstance(layer.attention, Scan):
        return 0
    seq = max(run.seq, run.source_seq)
    return run.micro_batch * layer.attention.heads // run.layout.tp * seq * seq // run.layout.cp


def loader_mask(run: Run) -> int:
    """The mask that comes with a micro-batch, b × 1 × s × s booleans, of which fused attention has no use.

    ``megatron/core/datasets/gpt_dataset.py`` makes it unless ``--no-create-attention-mask-in-dataloader``, and
    ``get_batch_on_this_tp_rank`` has it on the device on the first and the last stage, while the batch is at work.
    """
    return run.micro_batch * run.seq * run.seq // run.layout.cp if run.loader_masks else 0


def kept_batches(run: Run) -> int:
    """What each micro-batch of a step leaves on the device until the step is over.

    ``megatron/core/rerun_state_machine.py``: ``RerunDataIterator`` saves every micro-batch of an iteration for a replay
    (``--rerun-mode`` is "validate_results" by default). From pull request 4103 (21 May 2026) to 5635 (6 July), and so
    in releases 0.18, ``get_batch`` of ``pretrain_gpt.py`` moves tensors to the device within the very dictionary that
    is saved, on the first rank of tensor parallelism of the first and the last stage: three int64 and an fp32 for each
    token and the masks, whole where context parallelism shards the sequence.
    """
    tokens = run.micro_batch * run.seq
    return (3 * 8 + 4) * tokens + (tokens * run.seq if run.loader_masks else 0)


def deferred_head(run: Run) -> int:
    """What the last stage keeps to make the head's weight gradient of when its pipeline has nothing else to do.

    ``megatron/core/tensor_parallel/layers.py``, ``LinearWithGradAccumulationAndAsyncCommunication.backward``: gradients
    of logits in ``grad_output_buffer``, up to ``wgrad_deferral_limit``, and inputs in ``embedding_activation_buffer``,
    until ``drain_embedding_wgrad_compute``. Of those before the micro-batch at work.
    """
    layout = run.layout
    tokens = run.micro_batch * run.seq // layout.cp
    logits, inputs = run.model.vocab // layout.tp, run.model.hidden // (layout.tp if layout.sp else 1)
    kept = min(layout.deferred_head, run.micro_batches - 1)
    return kept * tokens * (logits + inputs) * DTYPE_BYTES[run.precision.compute]


BLOCK = 128
"""Of FlexAttention's masks: torch, ``flex_attention.py``, ``_DEFAULT_SPARSE_BLOCK_SIZE``."""


def packed_batch(run: Run, chunks: Sequence[Chunk]) -> int:
    """What comes with packed documents while a micro-batch is at work: positions, and where documents end.

    FlexAttention's ``BlockMask`` has two int32 for each pair of blocks and each row of them, for whole and for partial
    blocks, by queries and by keys.
    """
    if not run.packed:
        return 0
    batch, seq = run.micro_batch, run.seq
    positions = 0 if run.model.learned_positions else 8 * batch * seq
    match run.kernels.documents:
        case Documents.MASK:
            parts = (group.part for chunk in chunks for group in chunk)
            return positions + (document_mask(run) if any(map(partial(_holds_mask, run), parts)) else 0)
        case Documents.BLOCKS:
            blocks = -(-seq // BLOCK)
            return positions + 4 * 4 * batch * (blocks + blocks * blocks)
        case _:
            return positions + 4 * (batch * -(-seq // run.packed) + 1)


def document_mask(run: Run) -> int:
    """The mask of packed documents where there is one, b × 1 × s × s, one for all layers.

    ``transformers/masking_utils.py``: booleans, and numbers for eager attention. The forward lets go of it, unless
    layers that are computed again hold it.
    """
    if not run.packed or run.kernels.documents is not Documents.MASK:
        return 0
    eager = run.kernels.attention is AttentionKernel.EAGER
    return (DTYPE_BYTES[run.precision.compute] if eager else 1) * run.micro_batch * run.seq * run.seq


def reads_mask(program: Program, kept: frozenset[int]) -> bool:
    """Does what is computed again read the mask that all layers are given?"""
    given = {buffer.index for buffer in program.buffers if buffer.free and buffer.name == MASK}
    return any(not given.isdisjoint(program.ops[op].inputs) for op in program.recompute_set(kept))


def _holds_mask(run: Run, part: StageRegion) -> bool:
    """A checkpoint holds what it is called with; of what a planner has chosen, what is computed again decides."""
    if not part.is_layer or run.recompute.mode is Mode.NONE:
        return False
    if part.chosen is None or part.segment > 1:
        return True
    return reads_mask(part.region.program, part.kept)


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
    if not run.workspaces.library_bytes:
        return True
    return experts or run.kernels.attention is AttentionKernel.EAGER or any(part.name == HEAD for part in parts)
