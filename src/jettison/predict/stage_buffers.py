"""Buffers of a pipeline stage: allocations of libraries, frameworks and schedules in addition to the model's tensors.

Most are data, ``frameworks/NAME/buffers.toml``. A row is allocated if its ``when`` holds, which begins with an option,
from one `memory.step.Event` to another, or forever. Its expressions are Python's, of the letters of docs/symbols.md, a
run's options by their flags, and these: ``stage``; ``first``, ``last``: it has the model's embedding or head;
``stream``: bytes of a stage's output for one micro-batch; ``transfers``: outputs and gradients that its chunks receive
for a micro-batch; ``inputs``: chunks that receive an input from another device; ``compute``: bytes of an element.

NOTE [ Buffers of torch.distributed.pipelining ]
``torch/distributed/pipelining/stage.py``, of 2.13. An input in flight is a receive buffer, and so is the gradient that
a backward starts from. A chunk's output is in ``fwd_cache`` from its forward to the end of its backward
(``backward_one_chunk``), on the last stage as well, where it is the logits. The input's gradient that
``get_bwd_send_ops`` sends is referenced by the ops until the next is sent (``Schedule1F1B``);
``_PipelineScheduleRuntime``, which runs interleaved schedules, and ``ScheduleGPipe`` reference the works of all sends
until the step ends, and with them the tensors (gloo; NCCL of 2.7 and later keeps them until a wait for the work).
Between two chunks of one device nothing is sent: an output replaces the other's receive buffer
(``set_local_fwd_input``), as does the gradient on its way back (``set_local_bwd_input``), until the same micro-batch of
the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from types import CodeType
from typing import Any, Final, NamedTuple

from jettison.core.dtypes import DTYPE_BYTES
from jettison.core.files import read_table
from jettison.formula.attention import MASK
from jettison.formula.region import HEAD
from jettison.ledger.program import Program
from jettison.memory.step import Event
from jettison.predict.stage_units import stream_bytes
from jettison.predict.stages import Chunk, StageRegion, local_shape
from jettison.spec.frameworks import FOLDER
from jettison.spec.kernels import GROUPED_STREAMS, OVERLAP_STREAMS, AttentionKernel, Dispatcher, Documents
from jettison.spec.layout import Schedule
from jettison.spec.model import Layer, Scan
from jettison.spec.precision import Accumulation
from jettison.spec.recompute import Mode
from jettison.spec.run import Run

# buffers of frameworks ------------------------------------------------------------------------------------------------


class FrameworkBuffer(NamedTuple):
    """A row of a framework's table; ``until`` is None for a permanent buffer."""

    name: str
    when: CodeType
    nbytes: CodeType
    begin: Event
    until: Event | None


@cache
def framework_buffers() -> tuple[FrameworkBuffer, ...]:
    """Return the rows of all frameworks' tables."""
    tables = map(read_table, sorted(FOLDER.glob("*/buffers.toml")))
    return tuple(
        FrameworkBuffer(
            name=row["name"],
            when=compile(row["when"], row["name"], "eval"),
            nbytes=compile(row["bytes"], row["name"], "eval"),
            begin=Event[row["from"].upper()],
            until=None if row["until"] == "forever" else Event[row["until"].upper()],
        )
        for table in tables
        for row in table["buffer"]
    )


def buffers_of(run: Run, index: int) -> list[tuple[FrameworkBuffer, int]]:
    """Return the buffers of a stage with their bytes."""
    layout, model, buckets = run.layout, run.model, run.layout.buckets
    letters: dict[str, Any] = {
        "dataloader_attention_mask": run.dataloader_attention_mask,
        "keep_batches": run.keep_batches,
        "wgrad_deferral_limit": layout.wgrad_deferral_limit,
        "keep_received": layout.keeps_received,
        "stage_buffers": layout.stage_buffers,
        "zero_buckets": buckets is not None,
        "gradient_bucket": buckets.buckets and buckets.reduce if layout.by_module and buckets else 0,
    }
    rows = [row for row in framework_buffers() if letters[row.when.co_names[0]]]  # a ``when`` begins with an option
    if not rows:
        return []
    places, neighbours = layout.places(index), layout.neighbours(index)
    letters |= {
        "b": run.micro_batch,
        "s": run.seq,
        "h": model.hidden,
        "V": model.vocab,
        "t": layout.tp,
        "sp": layout.sp,
        "cp": layout.cp,
        "p": layout.pp,
        "zero": layout.zero,
        "micro_batches": run.micro_batches,
        "virtual_stages": layout.virtual_stages,
        "schedule": layout.schedule,
        "stage": index,
        "first": 0 in places,
        "last": layout.pp * layout.virtual_stages - 1 in places,
        "splits": layout.schedule.splits,
        "transfers": sum(_transfers(run, index)),
        "inputs": sum(place > 0 and not before for place, (before, _) in zip(places, neighbours, strict=True)),
        "stream": stream_bytes(run),
        "compute": DTYPE_BYTES[run.precision.compute],
        "min": min,
    }
    there = [row for row in rows if eval(row.when, {"__builtins__": {}}, letters)]  # of files of this package
    return [(row, eval(row.nbytes, {"__builtins__": {}}, letters)) for row in there]


def _transfers(run: Run, index: int) -> tuple[int, ...]:
    """Number of tensors that each chunk receives, and sends, for a micro-batch: outputs and gradients."""
    layout = run.layout
    last = layout.pp * layout.virtual_stages - 1
    return tuple((place > 0) + (place < last) for place in layout.places(index))


def sending(run: Run, index: int) -> tuple[int, ...]:
    """Return the transfers of each chunk for a micro-batch whose tensors are kept until the step ends."""
    layout = run.layout
    waits = layout.schedule is Schedule.ONE_F_ONE_B and layout.virtual_stages == 1
    if not layout.stage_buffers or layout.pp == 1 or waits:
        return ()
    return tuple(n - sum(near) for n, near in zip(_transfers(run, index), layout.neighbours(index), strict=True))


# workspaces -----------------------------------------------------------------------------------------------------------


def workspace_bytes(run: Run, chunks: Sequence[Chunk]) -> tuple[int, int]:
    """Return the bytes from the first forward on, and from the first backward on.

    See NOTE [ Workspaces ] in `spec.kernels`.
    """
    spaces, dummies = run.workspaces, run.accumulation is Accumulation.DUMMY
    if not spaces.torch_bytes and not dummies:
        return 0, 0
    parts = [group.part for chunk in chunks for group in chunk]
    experts = any(part.layer is not None and part.layer.experts for part in parts)
    grouped, overlapped = experts and not run.kernels.sequential_experts, run.tp_comm_overlap and run.layout.tp > 1
    library = spaces.library_bytes * (1 + GROUPED_STREAMS * grouped + OVERLAP_STREAMS * overlapped)
    if run.kernels.global_buffer and spaces.torch_bytes:
        library += _shared_buffer(run, parts, experts) + (spaces.router_bytes if experts else 0)
    # where a library has the layers' matmuls, the head's, a router's and eager attention's are still torch's
    eager = run.kernels.attention is AttentionKernel.EAGER
    torchs = not spaces.library_bytes or experts or eager or any(part.name == HEAD for part in parts)
    own = spaces.torch_bytes if torchs else 0
    return own + library, own + (_dummy_gradients(run, parts) if dummies else 0)


def _shared_buffer(run: Run, parts: Sequence[StageRegion], experts: bool) -> int:
    """Bytes of Megatron's permanent buffer "mpu" (``GlobalMemoryBuffer.get_tensor``), of its largest use.

    All-gathered inputs: of the head under sequence parallelism, and of layers whose matmuls are Megatron's own, in
    ``megatron/core/tensor_parallel/layers.py``, ``LinearWithGradAccumulationAndAsyncCommunication``; tokens of all
    expert-parallel ranks, in ``megatron/core/transformer/moe/token_dispatcher.py``, ``MoEAllGatherTokenDispatcher``,
    with ``use_global_buffer=True``, of which only selected rows are saved. And the input of the scores' ``baddbmm``,
    with beta 0, in ``megatron/core/transformer/dot_product_attention.py``. Counted with workspaces.
    """
    layout, own, each = run.layout, not run.workspaces.library_bytes, run.micro_batch * run.seq // run.layout.cp
    tokens = 0
    if layout.tp > 1 and layout.sp and any(part.name == HEAD or (own and part.layer is not None) for part in parts):
        tokens = each
    if experts and run.kernels.dispatcher is Dispatcher.ALLGATHER and layout.tp * layout.ep > 1:
        tokens = each * layout.ep
    scores = max((_scores(run, part.layer) for part in parts), default=0) if own else 0
    return max(tokens * run.model.hidden, scores) * DTYPE_BYTES[run.precision.compute]


def _scores(run: Run, layer: object) -> int:
    """Elements of eager attention scores of one layer on one rank: b x a/t x s x s; of two stacks, the longer's."""
    if not isinstance(layer, Layer) or run.kernels.attention is not AttentionKernel.EAGER:
        return 0
    if layer.attention is None or isinstance(layer.attention, Scan):
        return 0
    seq = max(run.seq, run.source_seq)
    return run.micro_batch * layer.attention.heads // run.layout.tp * seq * seq // run.layout.cp


def _dummy_gradients(run: Run, parts: Sequence[StageRegion]) -> int:
    """Bytes of dummy gradients, one for each shape of a layer's matrices, in the dtype of parameters.

    ``transformer_engine/pytorch/module/base.py``, ``get_dummy_wgrad`` (since version 2.3, for grouped GEMMs since
    2.10): if the GEMM accumulates into ``main_grad``, autograd still gets a tensor of the weight's shape, cached by
    shape and dtype. The head's GEMM, Megatron's own, uses the same cache.
    """
    weights = (w for part in parts for w in part.region.weights if w.gemm and not w.frozen)
    shapes = {local_shape(run, weight)[weight.expert :] for weight in weights}  # of experts one
    return sum(map(prod, shapes)) * DTYPE_BYTES[run.precision.compute]


# packed documents -----------------------------------------------------------------------------------------------------

BLOCK: Final = 128
"""Block size of FlexAttention's masks: torch, ``flex_attention.py``, ``_DEFAULT_SPARSE_BLOCK_SIZE``."""


def packed_batch(run: Run, chunks: Sequence[Chunk]) -> int:
    """Return the bytes of positions and document boundaries of packed documents, live during a micro-batch.

    FlexAttention's ``BlockMask`` has two int32 for each pair of blocks and each row of blocks, for full and for partial
    blocks, by queries and by keys.
    """
    if not run.packed:
        return 0
    batch, seq = run.micro_batch, run.seq
    positions = 0 if run.model.learned_positions else 8 * batch * seq
    match run.kernels.documents:
        case Documents.MASK:
            layers = [group.part for chunk in chunks for group in chunk if group.part.is_layer]
            again = run.recompute.mode is not Mode.NONE and any(
                part.chosen is None or part.layers > 1 or reads_mask(part.region.program, part.kept) for part in layers
            )
            return positions + (document_mask(run) if again else 0)
        case Documents.BLOCKS:
            blocks = -(-seq // BLOCK)
            return positions + 4 * 4 * batch * (blocks + blocks * blocks)
        case _:
            return positions + 4 * (batch * -(-seq // run.packed) + 1)


def document_mask(run: Run) -> int:
    """Return the bytes of the mask of packed documents, b × 1 × s × s, one for all layers; 0: there is none.

    ``transformers/masking_utils.py``: booleans, and floats for eager attention. It is freed after the forward, unless
    recomputed layers keep it.
    """
    if not run.packed or run.kernels.documents is not Documents.MASK:
        return 0
    eager = run.kernels.attention is AttentionKernel.EAGER
    return (DTYPE_BYTES[run.precision.compute] if eager else 1) * run.micro_batch * run.seq * run.seq


def reads_mask(program: Program, kept: frozenset[int]) -> bool:
    """Whether recomputed ops read the mask that all layers share."""
    given = {buffer.index for buffer in program.buffers if buffer.free and buffer.name == MASK}
    return any(not given.isdisjoint(program.ops[op].inputs) for op in program.recompute_set(kept))
