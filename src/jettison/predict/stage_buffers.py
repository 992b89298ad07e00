"""What a chunk of a pipeline holds of its ends: tables that it makes for itself, and torch's receive buffers.

NOTE [ Buffers of torch.distributed.pipelining ]
``torch/distributed/pipelining/stage.py``, of 2.13. ``_setup_forward_recv_info`` and ``_create_grad_recv_info`` make a
tensor for each micro-batch of a step, for what a chunk is sent and for the gradient that comes back, when a schedule
runs first; they stay. So an input in flight is one of them, and so is the gradient with which a backward starts. A
chunk's output is in ``fwd_cache`` from its forward to the end of its backward (``backward_one_chunk``), on the last
stage as well, where it is the logits. The gradient of the input that ``get_bwd_send_ops`` sends is held by the ops
until the next is sent (``Schedule1F1B``); ``_PipelineScheduleRuntime``, which runs interleaved schedules, and
``ScheduleGPipe`` hold the works of all that was sent until the step ends, and with them the tensors (gloo; NCCL of
2.7 and later keeps what a work sends on a shelf until somebody waits for it). Between two chunks of one device nothing
is sent: an output takes the place of the other's buffer (``set_local_fwd_input``), and so does the gradient that comes
back (``set_local_bwd_input``), until the same micro-batch's of the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeGuard

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.region import EMBEDDING, HEAD, Region, embedding_region
from jettison.formula.tape import GATHER
from jettison.memory.unit import Unit
from jettison.predict.stages import RegionGroup, StageRegion
from jettison.spec.kernels import AttentionKernel
from jettison.spec.layout import Layout, Schedule
from jettison.spec.model import Attention, Layer, ModelSpec
from jettison.spec.recompute import Mode
from jettison.spec.run import RegionSignature, Run

LOGITS = "logits"
GATHERED, JOINED = f"c10d.{GATHER}", "aten.cat.default"
CHECKPOINTS = frozenset(Mode) - {Mode.NONE, Mode.SELECTIVE, Mode.MODULES, Mode.AUTO}
"""Modes under which ``torch.utils.checkpoint`` is given a layer's inputs."""


def stream_bytes(run: Run) -> int:
    """What one stage sends another for one micro-batch."""
    return embedding_region(run.scene).output.nbytes


def buffer_bytes(run: Run, index: int) -> int:
    """Buffers of a stage. See NOTE [ Buffers of torch.distributed.pipelining ]."""
    layout = run.layout
    if not layout.stage_buffers or layout.pp == 1:
        return 0
    return stream_bytes(run) * run.micro_batches * sum(_transfers(layout, index))


def sending(run: Run, index: int) -> tuple[int, ...]:
    """Transfers of each chunk for a micro-batch, where a schedule holds what it has sent until the step ends."""
    layout = run.layout
    if not layout.stage_buffers or layout.pp == 1 or _waits(layout):
        return ()
    both = zip(_transfers(layout, index), layout.neighbours(index), strict=True)
    return tuple(count - sum(beside) for count, beside in both)


def sent_last(run: Run, index: int) -> int:
    """What ``Schedule1F1B`` holds of what it sent.

    ``bwd_sends``, the gradient of the last backward's input; and ``send_work``, of the last but one of the forwards
    before the first backward, which nobody waits for until forwards are over.
    """
    layout, count = run.layout, run.micro_batches
    if layout.pp == 1 or not _waits(layout) or count == 1:
        return 0
    ahead = layout.pp - index
    held = (index > 0) + (1 < ahead <= (count + 1) // 2)
    return held * stream_bytes(run)


def _waits(layout: Layout) -> bool:
    return layout.schedule is Schedule.ONE_F_ONE_B and layout.virtual_stages == 1


def _transfers(layout: Layout, index: int) -> tuple[int, ...]:
    """Of each chunk, what it is sent for a micro-batch, which is as much as it sends: an output and a gradient."""
    return tuple((place > 0) + (place < layout.pp * layout.virtual_stages - 1) for place in layout.places(index))


def with_ends(
    run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit], *, handed_on: bool = False
) -> Iterator[Unit]:
    """Units of a chunk with what it holds of its ends; the first and the last are alone then.

    Args:
        handed_on: the chunk behind it is on the same device, and what this one returns becomes that one's buffer.
    """
    first, last = groups[0].part, groups[-1].part
    own = 0 if first.name == EMBEDDING or not first.is_layer else tables_bytes(run.scene) + mask_bytes(run)
    if not run.layout.stage_buffers:
        yield from made if not own else _with_tables(made, own)
        return
    given = 0 if first.name == EMBEDDING else input_kept(first)
    returned = logits_returned(last) if last.name == HEAD else 0 if handed_on else stream_bytes(run)
    arriving = 0 if last.name == HEAD else stream_bytes(run)
    units = list(_apart(made))
    for number, unit in enumerate(units):
        at_end = number == len(units) - 1
        more = -arriving if at_end else returned
        yield replace(
            unit,
            resident=unit.resident + (own - given if number == 0 else 0) + (returned if at_end else 0),
            forward_peak=unit.forward_peak + (own - given if number == 0 else 0),
            backward_peak=unit.backward_peak + more,
            adding_peak=unit.adding_peak + more,
        )


def _with_tables(made: Sequence[Unit], own: int) -> Iterator[Unit]:
    head, *rest = _apart(made)
    yield replace(head, resident=head.resident + own, forward_peak=head.forward_peak + own)
    yield from rest


def _apart(made: Sequence[Unit]) -> Iterator[Unit]:
    """The first and the last by themselves."""
    for number, unit in enumerate(made):
        names = unit.names
        begin = 1 if number == 0 and len(names) > 1 else 0
        end = len(names) - (1 if number == len(made) - 1 and len(names) - begin > 1 else 0)
        for part in (names[:begin], names[begin:end], names[end:]):
            if part:
                yield replace(unit, names=part)


@lru_cache(maxsize=1024)
def tables_bytes(scene: RegionSignature) -> int:
    """Rotary tables that each stage makes in its forward; the embedding's region has those of the first.

    ``transformers/models/llama/modeling_llama.py``, ``LlamaModel.forward``: ``self.rotary_emb(hidden_states, ...)``.
    Other code has one table for good.
    """
    if not scene.kernels.forward_names:
        return 0
    region = embedding_region(scene)
    held = {s.value.storage for step in region.tape.steps if step.name == "hold" for s in step.saved}
    return sum(region.tape.sizes[storage] for storage in held)


def mask_bytes(run: Run) -> int:
    """What layers are given of who sees whom, where they are checkpoints; of each kind of layer its own.

    ``transformers/masking_utils.py``: made once for all layers, for eager attention what it adds to scores, b × 1 × s ×
    s (``eager_mask``), for a fused kernel booleans, 1 × 1 × s × s without padding (``sdpa_mask``), and none where
    causality says it all (``_ignore_causal_mask_sdpa``). Autograd has no use for it, but each checkpoint holds what it
    was given. Packed documents' stands elsewhere. A plan's blocks are not asked: a described one leaves it out.
    """
    return sum(_masks(run).values()) if run.kernels.forward_names else 0


def _masks(run: Run) -> dict[bool, int]:
    """In transformers' code by kind, with a window (False) or without (True), the bytes of its mask, if it has one."""
    model, kernels = run.model, run.kernels
    if run.packed or run.recompute.mode not in CHECKPOINTS:
        return {}
    eager = kernels.attention is AttentionKernel.EAGER
    if kernels.filled_masks or (kernels.made_masks and not eager) or model.pair or model.audio:
        return {}  # encoders mask padding alone
    each = run.seq * run.seq // run.layout.cp
    if eager:
        return dict.fromkeys(_masked(run.model), run.micro_batch * each * DTYPE_BYTES[run.scene.precision.compute])
    return {
        kind: (run.micro_batch if run.padding else 1) * each for kind in _masked(run.model) if _as_tensor(run, kind)
    }


def _as_tensor(run: Run, whole: bool) -> bool:
    """Is a fused kernel given a mask by layers without a window (``whole``), or by those with one?"""
    windows = [a.window for layer in run.model.described if _adds_mask(a := layer.attention) and a.window is not None]
    windowed = not whole and any(window <= run.seq for window in windows)
    return run.kernels.tensor_masks and (windowed or run.padding)


@lru_cache(maxsize=1024)
def _masked(model: ModelSpec) -> Mapping[bool, int]:
    """By kind of mask, without a window or with one, the first layer that is given it."""
    found: dict[bool, int] = {}
    for number, layer in enumerate(model.kinds):
        if isinstance(layer, Layer) and _adds_mask(layer.attention):
            first = model.kind_numbers.index(number)
            kind = layer.attention.window is None
            found[kind] = min(first, found.get(kind, first))
    return found


def _tables_of_a_kind(run: Run) -> int:
    """Rotary tables of layers with a window, where those have their own, or of those without."""
    return tables_bytes(run.scene) // 2 if run.kernels.rotary_by_window else 0


def without_masks(run: Run, made: Sequence[Unit]) -> Sequence[Unit]:
    """Units of a model on one stage: masks and rotary tables go with the first layer that has them, and are not there
    behind it.

    The model's own dicts of them (``causal_mask_mapping``, ``position_embeddings``) went when its forward returned.
    """
    if not run.kernels.forward_names or len(firsts := _masked(run.model)) < 2:
        return made
    later = max(firsts, key=firsts.__getitem__)
    gone = _masks(run).get(later, 0) + _tables_of_a_kind(run)
    if not gone:
        return made
    earlier = {EMBEDDING, *run.model.layer_names[: firsts[later]]}
    return [
        replace(unit, backward_peak=unit.backward_peak - gone, adding_peak=unit.adding_peak - gone)
        if unit.names[-1].rpartition(" to ")[2] in earlier
        else unit
        for unit in made
    ]


def _adds_mask(attention: object) -> TypeGuard[Attention]:
    return isinstance(attention, Attention) and attention.causal


def input_kept(part: StageRegion) -> int:
    """Of what a region is given, what stays of it until its backward."""
    return part.region.program.kept_bytes(hidden(part.region) & part.kept)


def hidden(region: Region) -> frozenset[int]:
    """The residual stream's buffer: the first that a region is given."""
    return frozenset({region.buffers[next(iter(region.tape.sources))]})


def logits_returned(part: StageRegion) -> int:
    """Logits that the loss does not keep anyway: what the stage returns."""
    region = part.region
    made = [v for step in region.tape.steps if step.path.startswith(LOGITS) for v in step.outputs]
    if not made:
        return 0
    gathered = [step.outputs[0] for step in region.tape.steps if made[-1] in step.inputs and step.name == GATHERED]
    while gathered:  # of a sharded vocabulary, and put in order
        made += gathered
        gathered = [step.outputs[0] for step in region.tape.steps if made[-1] in step.inputs and step.name == JOINED]
    storage = made[-1].storage
    return 0 if region.buffers[storage] in part.kept else region.tape.sizes[storage]
