"""Tensors of one region that Python or autograd hold while others run, of transformers' code.

NOTE [ What a model's forward names ]
What a model's own forward has a name for is there until it returns, read or not. Of GPT-2 that is the rows of both of
its tables and their positions, beside every layer's forward (``modeling_gpt2.py``, ``GPT2Model.forward``:
``inputs_embeds``, ``position_embeds``, ``position_ids``). Of an encoder beside a decoder it is the encoder's output, to
the end of the loss (``modeling_t5.py``, ``T5ForConditionalGeneration.forward``: ``hidden_states``;
``modeling_whisper.py``, ``WhisperModel.forward``: ``encoder_outputs``): without autocast the decoder's products keep it
anyway. A loop that works its loss out of what the model returned comes when these names are gone. Of what was returned
the encoder's output is a part (``Seq2SeqLMOutput``, ``encoder_last_hidden_state``), as long as the loop holds that; and
each checkpoint of the decoder was given it.
In backward, gradients of what a whole stack reads are added up from its last layer to its first: of the encoder's
output, of biases by distance, and of the zeros in their place.
What ``enable_input_require_grads`` asks a gradient of, the rows of the table, becomes a leaf (``modeling_utils.py``,
``make_inputs_require_grads``), and the graph has it at the node that adds up its gradient
(``torch/csrc/autograd/functions/accumulate_grad.h``, ``variable``) until its backward is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.embedding import POSITIONS
from jettison.formula.region import EMBEDDING, Region
from jettison.memory.unit import Unit
from jettison.predict.passes import passes_of, sums_apart, tied_table
from jettison.predict.stage_buffers import CHECKPOINTS, hidden, input_kept
from jettison.predict.stages import RegionGroup
from jettison.spec.kernels import Loss
from jettison.spec.model import AnyLayer, Attention, Biases, Layer
from jettison.spec.run import Run

ROWS = "aten.embedding.default"


def with_names(run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit]) -> Sequence[Unit]:
    """Units of a chunk with what is held beside them: NOTE [ What a model's forward names ]."""
    if not run.kernels.forward_names or run.layout.pp > 1 or run.model.recorder is not None:
        return made
    read = _read_bytes(run)
    made = list(_with_gradients(run, groups, made)) if run.model.source is not None else made
    made = _with_read(run, groups, made, read) if read else made
    made = _with_loss(run, groups, made, read)
    leaf = _leaf(run, groups)
    named = _named(groups[0].part.region, leaf) if run.kernels.named_embeddings else 0
    if not leaf and not named:
        return made
    return [
        replace(unit, resident=unit.resident + _leaf_bytes(groups, leaf))
        if EMBEDDING in unit.names
        else unit
        if unit.is_loss
        else replace(unit, forward_peak=unit.forward_peak + named)
        for unit in made
    ]


def _read_bytes(run: Run) -> int:
    """Of an encoder's output that a decoder beside it reads copies of; 0: there is none, or it is kept anyway."""
    if run.model.source is None or not run.scene.precision.casts:
        return 0
    return run.micro_batch * run.source_seq * run.model.hidden * DTYPE_BYTES[run.scene.precision.compute]


def _with_read(run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit], read: int) -> Sequence[Unit]:
    """With the encoder's output beside each forward of the decoder, and its loss; and in what the model returned."""
    own = {name for group in groups if _asks(group.part.layer) for name in group.names}
    found = []
    for unit in made:
        beside = read if unit.is_loss or own.intersection(_names(unit)) else 0
        held = read if run.holds_output else beside if run.recompute.mode in CHECKPOINTS else 0
        backward, adding = unit.backward_peak + held, unit.adding_peak + held
        forward = unit.forward_peak + beside
        found.append(replace(unit, forward_peak=forward, backward_peak=backward, adding_peak=adding))
    return found


def _with_gradients(run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit]) -> Iterator[Unit]:
    """With what layers behind have left of gradients of what each layer of a stack is given."""
    stacks: dict[bool, list[str]] = {True: [], False: []}
    layers: dict[str, Layer] = {}
    for group in groups:
        if isinstance(layer := group.part.layer, Layer):
            stacks[bool(layer.source)] += group.names
            layers |= dict.fromkeys(group.names, layer)
    last = {names[-1] for names in stacks.values() if names}
    rows = _rows_gradient(run, groups) if stacks[False] else 0
    for unit in _split(made, stacks[False][0]) if rows else made:
        if rows and unit.names == (stacks[False][0],):  # behind this layer's backward come the decoder's rows
            passed = unit.gradient - unit.resident, -unit.resident
            highest = max(unit.backward_peak, rows + passed[0]), max(unit.adding_peak, rows + passed[1])
            unit = replace(unit, backward_peak=highest[0], adding_peak=highest[1])
        ends = unit.names[-1].rpartition(" to ")[2]
        if ends not in layers:
            yield unit
            continue
        more = _given_bytes(run, layers[ends])
        beside = replace(unit, backward_peak=unit.backward_peak + more, adding_peak=unit.adding_peak + more)
        if ends not in last:
            yield beside
            continue
        if len(unit.names) > 1:
            yield replace(beside, names=unit.names[:-1])
        yield replace(unit, names=unit.names[-1:])


def _split(made: Sequence[Unit], name: str) -> Iterator[Unit]:
    """With the layer of this name, the first of its unit, alone."""
    for unit in made:
        if unit.names[0] == name and len(unit.names) > 1:
            yield replace(unit, names=(name,))
            unit = replace(unit, names=unit.names[1:])
        yield unit


def _rows_gradient(run: Run, groups: Sequence[RegionGroup]) -> int:
    """Of a tied table's, with the gradient of its rows, where the decoder looks them up: before the encoder's backward.

    Beside it there may be its sum with the head's: `predict.passes.sums_apart`.
    """
    if not run.model.tied_embeddings:
        return 0
    table, _ = tied_table(groups[0].part.region, DTYPE_BYTES[run.gradient_rule.added])
    return (1 + sums_apart(run)) * table + groups[0].part.region.output.nbytes


def _given_bytes(run: Run, layer: Layer) -> int:
    """Of gradients of the encoder's output and of biases that a layer is given, or hands on."""
    each, rows = DTYPE_BYTES[run.scene.precision.compute], run.source_seq if layer.source else run.seq
    keys = {id(layer.attention): rows, id(layer.cross): run.source_seq}
    total = 0 if layer.source else run.micro_batch * run.source_seq * run.model.hidden * each
    for asked in (layer.attention, layer.cross):
        if not isinstance(asked, Attention) or asked.biases not in (Biases.FIRST, Biases.GIVEN):
            continue
        if asked.buckets or run.scene.kernels.learned_zeros:
            total += asked.heads * rows * keys[id(asked)] * each
    return total


def _names(unit: Unit) -> Sequence[str]:
    return unit.names[-1].split(" to ")


def _with_loss(run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit], read: int) -> Sequence[Unit]:
    """With what the head was given gone when its norm has read it, or the model returned."""
    outside = run.kernels.loss is Loss.OUTSIDE
    if not outside and run.model.final_norm is None:
        return made
    part = groups[-1].part
    before, behind = passes_of(part, run.gradient_rule).around.forward
    goes = part.region.program.kept_bytes(hidden(part.region) - part.kept)
    stays = read if not outside or run.holds_output or run.recompute.mode in CHECKPOINTS else 0
    highest = max(before + read, behind - goes + stays)
    return [replace(unit, forward_peak=highest) if unit.is_loss else unit for unit in made]


def _asks(layer: AnyLayer | None) -> bool:
    """Is it the decoder's?"""
    return isinstance(layer, Layer) and not layer.source


def _leaf(run: Run, groups: Sequence[RegionGroup]) -> frozenset[int]:
    """The buffer of what a frozen table's module returns, its scale included, where a gradient of it is asked for."""
    if run.tuning is None or not run.tuning.inputs_need_gradients:
        return frozenset()
    region = groups[0].part.region
    at = next((at for at, step in enumerate(region.tape.steps) if step.name == ROWS), None)
    if at is None:
        return frozenset()
    made = region.tape.steps[at + run.model.embedding_scale].outputs[0]
    return frozenset({region.buffers[made.storage]})


def _leaf_bytes(groups: Sequence[RegionGroup], leaf: frozenset[int]) -> int:
    """Of it, what no layer keeps as its input."""
    part = groups[0].part
    handed = leaf & set(part.region.program.outputs)
    if handed and len(groups) > 1 and input_kept(groups[1].part):
        return 0
    return part.region.program.kept_bytes(leaf - part.kept)


def _named(region: Region, leaf: frozenset[int]) -> int:
    """Rows of tables, and ids of positions, that the region keeps none of and does not hand on."""
    program = region.program
    rows = {region.buffers[v.storage] for step in region.tape.steps if step.name == ROWS for v in step.outputs}
    ids = {region.buffers[at] for at, (_, name, free) in region.tape.sources.items() if name == POSITIONS and not free}
    held = program.saved_buffers() | leaf | set(program.outputs)
    return program.kept_bytes(frozenset((rows | ids) - held))
