"""Units of a pipeline stage's chunk: saved bytes of each region, and peaks of its forward and backward.

NOTE [ Segments ]
`every:K` saves the input of the first of K layers, as may a plan for consecutive layers of a chunk. Backward recomputes
the K forwards without checkpointing, then runs their backwards. So within a segment the replay without recompute holds,
plus one input.

NOTE [ What a model's forward names ]
Local variables of transformers' forward keep tensors alive until it returns. In GPT-2 these are both embeddings and
the position ids, during every layer's forward (``modeling_gpt2.py``, ``GPT2Model.forward``: ``inputs_embeds``,
``position_embeds``, ``position_ids``). In an encoder-decoder it is the encoder's output, to the end of the loss
(``modeling_t5.py``, ``T5ForConditionalGeneration.forward``: ``hidden_states``; ``modeling_whisper.py``,
``WhisperModel.forward``: ``encoder_outputs``): without autocast the decoder's matmuls save it anyway. A loss in the
training loop runs after these are freed. The model's return value has the encoder's output as well
(``Seq2SeqLMOutput``, ``encoder_last_hidden_state``), while the loop references it; and each checkpoint of the decoder
saves it as an input.
In backward, gradients of inputs that all layers of a stack share accumulate from its last layer to its first: of the
encoder's output, of relative position biases, and of zeros that replace them.
``enable_input_require_grads`` makes the embedding's output a leaf (``modeling_utils.py``,
``make_inputs_require_grads``), which the node that accumulates its gradient references
(``torch/csrc/autograd/functions/accumulate_grad.h``, ``variable``) until its backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.embedding import POSITIONS
from jettison.formula.liveness import Passes
from jettison.formula.region import EMBEDDING, HEAD, Region, cached_bytes, embedding_region, held_over, tied_table
from jettison.formula.split_backward import InputHalf, checkpointed_weight_half, input_half, read_by_groups, weight_half
from jettison.formula.tape import GATHER
from jettison.memory.stage_unit import Halves, Unit, WeightStep
from jettison.predict.frozen_models import highest_forward
from jettison.predict.fsdp import GroupPlace, has_outer_ends, with_fsdp_buffers, with_shards
from jettison.predict.stages import (
    FULL,
    NONE,
    RegionGroup,
    StageRegion,
    kept_by,
    named_passes,
    names_of,
    passes_of,
    sent_by,
)
from jettison.spec.fine_tuning import TABLE, When
from jettison.spec.kernels import AttentionKernel, Documents
from jettison.spec.model import Attention, Biases, Layer, ModelSpec
from jettison.spec.precision import GradientRule, Gradients
from jettison.spec.recompute import Mode
from jettison.spec.run import RegionSignature, Run

ROWS = "aten.embedding.default"
LOGITS = "logits"
GATHERED, JOINED = f"c10d.{GATHER}", "aten.cat.default"
CHECKPOINTS = frozenset(Mode) - {Mode.NONE, Mode.SELECTIVE, Mode.MODULES, Mode.AUTO}
"""Modes under which ``torch.utils.checkpoint`` saves a layer's inputs."""


def units(
    run: Run, groups: Sequence[RegionGroup], neighbours: tuple[bool, bool] = (False, False), *, reducing: bool = False
) -> tuple[Unit, ...]:
    """Return the units of one chunk, in order; none of a stage without layers.

    Args:
        neighbours: whether the previous and the next chunk are on the same device.
        reducing: for the last micro-batch's backward, which reduces gradients that were unsharded until then.
    """
    if not groups:
        return ()
    before, behind = neighbours
    made: Sequence[Unit] = _made(run, groups)
    if run.layout.pp > 1:
        made = _with_ends(run, groups, made, handed_on=behind)
    else:
        made = _with_names(run, groups, _without_masks(run, made))
    if run.keep_logits:  # logits live through all backwards but the head's
        held = groups[-1].part.region.program.kept_bytes(groups[-1].part.held)
        made = [unit.plus(backward=0 if unit.is_loss else held) for unit in made]
    made = with_shards(run, groups, made, reducing=reducing)
    if run.recompute.to_host:  # NOTE [ Offloaded bytes in flight ] in `solve.problem`
        made = [
            unit.plus(resident=-moved, forward=ahead, backward=moved + ahead)
            for unit, moved, ahead in _sending(run, groups, made)
        ]
    if splits(run) and groups[0].part.name != EMBEDDING:  # the model's first chunk has no gradients of inputs
        made = list(_with_halves(run, groups, made, handed_back=before))
    return tuple(map(_with_frozen, made) if run.frozen else made)


def unit_within(run: Run, groups: Sequence[RegionGroup], place: GroupPlace) -> Unit:
    """Return the unit of consecutive regions, with transients by their position in the chunk, without offloading."""
    (unit,) = _made(run, groups)
    found = with_fsdp_buffers(run, unit, place, groups[0].part)
    if run.syncs_last:  # whichever backward rises higher
        reducing = with_fsdp_buffers(run, unit, place, groups[0].part, reducing=True)
        found = found._replace(adding_peak=max(found.adding_peak, reducing.adding_peak))
    return _with_frozen(found)


def _regions(groups: Sequence[RegionGroup]) -> list[StageRegion]:
    return [group.part for group in groups for _ in group.names]


def _apart(made: Sequence[Unit], places: Collection[int]) -> list[Unit]:
    """Split units before these regions of their chunk, except within segments."""
    found, at = [], 0
    for unit in made:
        size, count = unit.regions, len(unit.names)
        cuts = sorted({(p - at) // size for p in places if at < p < at + size * count and (p - at) % size == 0})
        for begin, end in zip([0, *cuts], [*cuts, count], strict=True):
            found.append(unit.named(unit.names[begin:end]))
        at += size * count
    return found


# regions by themselves ------------------------------------------------------------------------------------------------


class _How(NamedTuple):
    """Properties of a run that each of its units needs, computed once."""

    frees: bool
    pile_up: bool
    rule: GradientRule
    caches: bool


def _made(run: Run, groups: Sequence[RegionGroup]) -> list[Unit]:
    size = run.recompute.segment
    how = _How(run.frees_gradients, run.gradients_coexist, run.gradient_rule, run.caches_casts)
    if size > 1 or any(group.part.layers > 1 for group in groups):
        return list(_segments(run, groups, size, how))
    # alternating layers of two kinds have a group each, of the same two regions
    known = {part: _unit(run, group, how) for part, group in {group.part: group for group in groups}.items()}
    return [u if (u := known[group.part]).names is group.names else u.named(group.names) for group in groups]


def _unit(run: Run, group: RegionGroup, how: _How) -> Unit:
    part, rule, each = group.part, how.rule, DTYPE_BYTES[run.precision.gradient]
    passes = passes_of(part, rule)
    adding = passes if how.pile_up else passes_of(part, rule, accumulates=True)
    gradient, backward, pending = part.static.gradients, passes.backward_peak, 0
    added = adding.backward_peak
    if how.frees:  # it is freed like one that was accumulated
        gradient, backward = _left(run, [part]), adding.backward_peak
    if run.model.tied_embeddings and run.tuning is None and run.layout.pp == 1 and not has_outer_ends(run):
        if part.name == HEAD:
            pending = sum(w.numel for w in part.region.weights if w.tied and not w.frozen) * each
            gradient += pending
        if part.name == EMBEDDING:  # the head's backward allocated it
            table, others = tied_table(part.region, each)
            gradient -= table
            summed = table // each * DTYPE_BYTES[rule.added]
            both = 2 * summed if run.sums_tied_gradients else summed  # the engine's sum and its new term
            backward, added = max(adding.backward_peak, others + both), max(adding.backward_peak, both)
            if run.model.source is not None:  # the decoder's embedding came first: `_with_gradients`
                again = 0 if run.model.source.sound else others + summed
                backward, added = max(passes.backward_peak - table, again), adding.backward_peak
    mask = mask_bytes(run) if part.name == EMBEDDING else 0
    when = {EMBEDDING: When.BEFORE, HEAD: When.AFTER}.get(part.name) if run.frozen else None
    return Unit(
        names=group.names,
        resident=passes.resident + mask,
        forward_peak=passes.forward_peak + mask,
        backward_peak=backward,
        adding_peak=added,
        gradient=gradient,
        pending=pending,
        is_loss=part.name == HEAD,
        frozen=0 if when is None else highest_forward(run, when),
        cached=cached_bytes(part.region, part.kept) if how.caches else 0,
    )


def _left(run: Run, parts: Sequence[StageRegion]) -> int:
    return 0 if run.gradients is Gradients.IN_BACKWARD else sum(part.static.gradients for part in parts)


def _with_frozen(unit: Unit) -> Unit:
    """Raise a unit's peaks to that of a frozen model's forward which runs with it."""
    if not unit.frozen:
        return unit
    if not unit.is_loss:
        return unit._replace(forward_peak=max(unit.forward_peak, unit.frozen))
    peaks = max(unit.backward_peak, unit.frozen), max(unit.adding_peak, unit.frozen)
    return unit._replace(backward_peak=peaks[0], adding_peak=peaks[1])


def _segments(run: Run, groups: Sequence[RegionGroup], size: int, how: _How) -> Iterator[Unit]:
    """Yield one unit for consecutive equal segments. See NOTE [ Segments ].

    Args:
        size: of every segment; 1: planned segments, with units of their own for other layers.
    """
    # layers for multi-token prediction (MTP) are checkpoints of their own
    own = groupby(groups, lambda group: group.part.layer is not None and not group.part.layer.ahead)
    for is_own, run_of_groups in own:
        if not is_own:
            yield from (_unit(run, group, how) for group in run_of_groups)
            continue
        parts = [(group.part, name) for group in run_of_groups for name in group.names]
        cut = []
        while parts:
            length = size if size > 1 else parts[0][0].layers
            cut.append(parts[:length])
            parts = parts[length:]
        for _, same in groupby(cut, lambda segment: [part for part, _name in segment]):
            segments = list(same)
            names = tuple(s[0][1] if len(s) == 1 else f"{s[0][1]} to {s[-1][1]}" for s in segments)
            first = segments[0][0][0]
            if size == 1 and first.layers == 1:
                yield _unit(run, RegionGroup(part=first, names=names), how)
            else:
                yield _segment(run, [part for part, _ in segments[0]], names)


def _segment(run: Run, parts: Sequence[StageRegion], names: tuple[str, ...]) -> Unit:
    rule = run.gradient_rule
    full = [passes_of(part, rule) for part in parts]
    plain = [named_passes(part.region, NONE, rule, False) for part in parts]
    adding = plain if run.gradients_coexist else [named_passes(part.region, NONE, rule, True) for part in parts]
    held, nothing = full[0].resident, [0] * len(parts)
    passing = _segment_backward(parts[0].region, adding, nothing)
    kept = [part.kept if number == 0 else frozenset[int]() for number, part in enumerate(parts)]
    return Unit(
        names=names,
        resident=held,
        forward_peak=max(p.forward_peak + (held if i else 0) for i, p in enumerate(full)),
        backward_peak=passing
        if run.frees_gradients
        else _segment_backward(parts[0].region, plain, [part.static.gradients for part in parts]),
        adding_peak=passing,
        gradient=_left(run, parts),
        cached=sum(cached_bytes(p.region, k) for p, k in zip(parts, kept, strict=True)) if run.caches_casts else 0,
        regions=len(parts),
    )


def _forwards_again(first: Region, plain: Sequence[Passes]) -> tuple[int, int]:
    """Peak of a segment's recomputed forwards above its input, and live bytes after them."""
    level = -first.program.kept_bytes(kept_by(first, FULL) & kept_by(first, NONE))  # the saved part of the input
    peak = 0
    for p in plain:
        peak = max(peak, plain[-1].output + level + p.forward_peak)
        level += p.resident
    return peak, level


def _segment_backward(first: Region, plain: Sequence[Passes], gradients: Sequence[int]) -> int:
    peak, level = _forwards_again(first, plain)
    for p, gradient in zip(reversed(plain), reversed(gradients), strict=True):
        peak = max(peak, level + p.backward_peak)
        level += gradient - p.resident
    return peak


# a pipeline's ends ----------------------------------------------------------------------------------------------------


def stream_bytes(run: Run) -> int:
    """Return the bytes of a stage's output for one micro-batch."""
    return embedding_region(run.signature).output.nbytes


def _with_ends(run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit], *, handed_on: bool) -> list[Unit]:
    """Add a chunk's input and output buffers to its units; then the first and the last are separate.

    Args:
        handed_on: the next chunk is on the same device, and this one's output becomes its buffer.
    """
    first, last = groups[0].part, groups[-1].part
    head = last.name == HEAD
    own = tables_bytes(run.signature) + mask_bytes(run) if first.is_layer else 0
    given = returned = arriving = 0
    if run.layout.stage_buffers:  # NOTE [ Buffers of torch.distributed.pipelining ] in `stage_buffers`
        given = 0 if first.name == EMBEDDING else input_kept(first)
        returned = logits_returned(last) if head else 0 if handed_on else stream_bytes(run)
        arriving = 0 if head else stream_bytes(run)
    elif not own:
        return list(made)
    total = sum(unit.regions * len(unit.names) for unit in made)
    *inner, end = _apart(made, (made[0].regions, total - made[-1].regions))
    inner = [unit.plus(backward=returned) for unit in inner]
    found = [*inner, end.plus(resident=returned, backward=-arriving)]
    return [found[0].plus(resident=own - given, forward=own - given), *found[1:]]


@lru_cache(maxsize=1024)
def tables_bytes(signature: RegionSignature) -> int:
    """Return the bytes of rotary tables that a stage computes in its forward; the first stage's are the embedding's.

    ``transformers/models/llama/modeling_llama.py``, ``LlamaModel.forward``: ``self.rotary_emb(hidden_states, ...)``.
    Other code has one permanent table.
    """
    if not signature.kernels.forward_names:
        return 0
    return held_over(embedding_region(signature))


def input_kept(part: StageRegion) -> int:
    """Return the bytes of a region's input that are saved for backward."""
    return part.region.program.kept_bytes(_hidden(part.region) & part.kept)


def _hidden(region: Region) -> frozenset[int]:
    """Buffer of the residual stream: a region's first input."""
    return frozenset({region.buffers[next(iter(region.tape.sources))]})


def logits_returned(part: StageRegion) -> int:
    """Return the bytes of the logits that a stage returns, unless the loss saves them."""
    region = part.region
    made = [v for step in region.tape.steps if step.path.startswith(LOGITS) for v in step.outputs]
    if not made:
        return 0
    following = GATHERED
    while found := [s.outputs[0] for s in region.tape.steps if made[-1] in s.inputs and s.name == following]:
        made, following = found, JOINED  # all-gathered over a sharded vocabulary, and concatenated
    storage = made[-1].storage
    return 0 if region.buffers[storage] in part.kept else region.tape.sizes[storage]


# transformers' forward ------------------------------------------------------------------------------------------------


def mask_bytes(run: Run) -> int:
    """Return the bytes of attention masks that checkpoints save as inputs, one for each kind of layer.

    ``transformers/masking_utils.py``: one for all layers, a term of scores for eager attention, b × 1 × s × s
    (``eager_mask``), booleans for a fused kernel, 1 × 1 × s × s without padding (``sdpa_mask``), and none if attention
    is causal only (``_ignore_causal_mask_sdpa``). Autograd does not save it, but each checkpoint keeps its inputs. The
    mask of packed documents is `stage_buffers.document_mask`. Plans of described models do not count it.
    """
    return sum(_masks(run).values()) if run.kernels.forward_names else 0


def _masks(run: Run) -> dict[bool, int]:
    """Bytes of transformers' masks by kind: with a sliding window (False) or full (True)."""
    model, kernels = run.model, run.kernels
    if run.packed or run.recompute.mode not in CHECKPOINTS:
        return {}
    eager = kernels.attention is AttentionKernel.EAGER
    if kernels.filled_masks or (kernels.always_masks and not eager) or model.pair or model.audio:
        return {}  # encoders mask padding only
    each = run.seq * run.seq // run.layout.cp
    if eager:
        return dict.fromkeys(_masked(model), run.micro_batch * each * DTYPE_BYTES[run.signature.precision.compute])
    if not kernels.tensor_masks or kernels.documents is not Documents.MASK:
        return {}
    windows = [a.window for layer in model.described if (a := _causal(layer.attention)) and a.window is not None]
    windowed = any(window <= run.seq for window in windows)
    batch = run.micro_batch if run.padding else 1
    return {whole: batch * each for whole in _masked(model) if run.padding or (windowed and not whole)}


@lru_cache(maxsize=1024)
def _masked(model: ModelSpec) -> Mapping[bool, int]:
    """First layer of each kind of mask: full (True) or with a window (False)."""
    found: dict[bool, int] = {}
    for number, layer in enumerate(model.kinds):
        if isinstance(layer, Layer) and (attention := _causal(layer.attention)):
            first, whole = model.kind_numbers.index(number), attention.window is None
            found[whole] = min(first, found.get(whole, first))
    return found


def _causal(attention: object) -> Attention | None:
    return attention if isinstance(attention, Attention) and attention.causal else None


def _without_masks(run: Run, made: Sequence[Unit]) -> Sequence[Unit]:
    """Free masks and rotary tables with the backward of the first layer that reads them.

    The model's own dicts of them (``causal_mask_mapping``, ``position_embeddings``) are freed when its forward returns.
    """
    if not run.kernels.forward_names or len(firsts := _masked(run.model)) < 2:
        return made
    later = max(firsts, key=firsts.__getitem__)
    tables = tables_bytes(run.signature) // 2 if run.kernels.rotary_by_window else 0  # of one kind of layer
    gone = _masks(run).get(later, 0) + tables
    found, end = [], 0
    for unit in made:
        end += unit.regions * len(unit.names)
        found.append(unit.plus(backward=-gone) if end <= 1 + firsts[later] else unit)
    return found


def _with_names(run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit]) -> Sequence[Unit]:
    """Add tensors that local variables keep alive: NOTE [ What a model's forward names ]."""
    if not run.kernels.forward_names or run.model.recorder is not None:
        return made
    embedding, read = groups[0].part, 0
    if run.model.source is not None:
        made = list(_with_gradients(run, groups, made))
        if (
            run.signature.precision.casts
        ):  # the decoder saves casts of the encoder's output, otherwise the output itself
            each = DTYPE_BYTES[run.signature.precision.compute]
            read = run.micro_batch * run.source_seq * run.model.hidden * each
            made = list(_with_read(run, groups, made, read))
    made = _with_loss(run, groups, made, read)
    leaf = _leaf(run, embedding.region)
    named = _named(embedding.region, leaf) if run.kernels.named_embeddings else 0
    kept = embedding.region.program.kept_bytes(leaf - embedding.kept)
    if leaf & set(embedding.region.program.outputs) and len(groups) > 1 and input_kept(groups[1].part):
        kept = 0  # a layer keeps it as its input
    return [
        unit.plus(resident=kept) if EMBEDDING in unit.names else unit.plus(forward=0 if unit.is_loss else named)
        for unit in made
    ]


def _with_read(run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit], read: int) -> Iterator[Unit]:
    """Add the encoder's output to each forward of the decoder and the loss, and to the model's return value."""
    parts, at = _regions(groups), 0
    for unit in made:
        at += unit.regions * len(unit.names)
        ends = (parts[at - unit.regions].layer, parts[at - 1].layer)
        decodes = any(isinstance(layer, Layer) and not layer.source for layer in ends)
        there = read if unit.is_loss or decodes else 0
        held = read if run.keep_logits else there if run.recompute.mode in CHECKPOINTS else 0
        yield unit.plus(forward=there, backward=held)


def _with_gradients(run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit]) -> Iterator[Unit]:
    """Add gradients of shared inputs that later layers of a stack have accumulated."""
    parts = _regions(groups)
    layers = [(at, part.layer) for at, part in enumerate(parts) if isinstance(part.layer, Layer)]
    encoder, decoder = ([at for at, layer in layers if layer.source is own] for own in (True, False))
    last = {stack[-1] for stack in (encoder, decoder) if stack}
    rows = _rows_gradient(run, groups) if decoder else 0
    at = 0
    for unit in _apart(made, [decoder[0] + 1]) if rows else made:
        first, at = at, at + unit.regions * len(unit.names)
        if rows and (first, at) == (decoder[0], decoder[0] + 1):  # after its backward: the decoder's embedding
            passed = unit.gradient - unit.resident, -unit.resident
            highest = max(unit.backward_peak, rows + passed[0]), max(unit.adding_peak, rows + passed[1])
            unit = unit._replace(backward_peak=highest[0], adding_peak=highest[1])
        layer = parts[at - 1].layer
        given = _given_bytes(run, layer) if isinstance(layer, Layer) else 0
        inner = unit.names[:-1] if at - 1 in last else unit.names
        if inner:
            yield unit.plus(backward=given).named(inner)
        if at - 1 in last:
            yield unit.named(unit.names[-1:])


def _rows_gradient(run: Run, groups: Sequence[RegionGroup]) -> int:
    """Bytes of the decoder's gradients of a tied embedding and its output, before the encoder's backward.

    With its sum with the head's, if that is a new tensor: `Run.sums_tied_gradients`.
    """
    if not run.model.tied_embeddings:
        return 0
    table, _ = tied_table(groups[0].part.region, DTYPE_BYTES[run.gradient_rule.added])
    return (1 + run.sums_tied_gradients) * table + groups[0].part.region.output.nbytes


def _given_bytes(run: Run, layer: Layer) -> int:
    """Bytes of gradients of the encoder's output and of relative position biases that a layer reads or passes on."""
    each, rows = DTYPE_BYTES[run.signature.precision.compute], run.source_seq if layer.source else run.seq
    total = 0 if layer.source else run.micro_batch * run.source_seq * run.model.hidden * each
    for asked, columns in ((layer.attention, rows), (layer.cross, run.source_seq)):
        if isinstance(asked, Attention) and asked.biases in (Biases.FIRST, Biases.GIVEN):
            learned = (asked.buckets > 0 and run.tuning is None) or run.signature.kernels.learned_zeros
            total += asked.heads * rows * columns * each if learned else 0
    return total


def _with_loss(run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit], read: int) -> Sequence[Unit]:
    """Free the head's input after the final norm, or after the model returned."""
    outside = run.kernels.loss.in_loop
    if not outside and run.model.final_norm is None:
        return made
    part = groups[-1].part
    before, behind = passes_of(part, run.gradient_rule).around.forward
    goes = part.region.program.kept_bytes(_hidden(part.region) - part.kept)
    stays = read if not outside or run.keep_logits or run.recompute.mode in CHECKPOINTS else 0
    highest = max(before + read, behind - goes + stays)
    return [unit._replace(forward_peak=highest) if unit.is_loss else unit for unit in made]


def _leaf(run: Run, region: Region) -> frozenset[int]:
    """Buffer of a frozen embedding's scaled output, if it requires a gradient."""
    if run.tuning is None or not run.tuning.inputs_need_gradients or TABLE in run.tuning.full:
        return frozenset()
    at = next((at for at, step in enumerate(region.tape.steps) if step.name == ROWS), None)
    if at is None:
        return frozenset()
    return frozenset({region.buffers[region.tape.steps[at + run.model.embedding_scale].outputs[0].storage]})


def _named(region: Region, leaf: frozenset[int]) -> int:
    """Bytes of embeddings and position ids that the region neither saves nor returns."""
    program = region.program
    rows = {region.buffers[v.storage] for step in region.tape.steps if step.name == ROWS for v in step.outputs}
    ids = {region.buffers[at] for at, (_, name, free) in region.tape.sources.items() if name == POSITIONS and not free}
    held = program.saved_buffers() | leaf | set(program.outputs)
    return program.kept_bytes(frozenset((rows | ids) - held))


# offload to the host --------------------------------------------------------------------------------------------------


def sent_to_host(run: Run, groups: Sequence[RegionGroup]) -> dict[str, int]:
    """Return the bytes that units of a chunk offload in a forward, by name; without units that offload nothing."""
    if not (groups and run.recompute.to_host):
        return {}
    return {name: n for unit, n, _ in _sending(run, groups, _made(run, groups)) for name in unit.names if n}


def _sending(run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit]) -> Iterator[tuple[Unit, int, int]]:
    """Yield units, their offloaded bytes, and those of the previous one; only layers offload, but not a chunk's last.

    With lists of modules the last layer of a chunk offloads as well, except in the model's last chunk: Megatron keeps
    tensors that the next backward would fetch at once (``fine_grained_activation_offload.py``,
    ``should_bulk_offload``).
    """
    parts, at = _regions(groups), 0
    each: list[tuple[Unit, str, int]] = []
    last = -1  # a stage may have no layers
    for unit in made:
        for name in unit.names:
            whole = unit.regions > 1 and run.recompute.mode is Mode.EVERY
            moved = unit.resident if whole else moved_bytes(run, parts[at])
            if unit.regions > 1 or parts[at].is_layer:
                last = len(each)
            each.append((unit, name, moved))
            at += unit.regions
    if run.recompute.sent and HEAD not in groups[-1].names:
        last = -1
    each = [(unit, name, 0 if i == last else moved) for i, (unit, name, moved) in enumerate(each)]
    before = [0, *(moved for _, _, moved in each)]
    alike = groupby(zip(each, before, strict=False), lambda pair: (id(pair[0][0]), pair[0][2], pair[1]))
    for (_, moved, ahead), pairs in alike:
        found = [entry for entry, _ in pairs]
        yield found[0][0].named(tuple(name for _, name, _ in found)), moved, ahead


def moved_bytes(run: Run, part: StageRegion) -> int:
    """Return the bytes of a region's kept tensors that are offloaded."""
    if not (run.recompute.to_host and part.is_layer and part.first):
        return 0
    if run.recompute.sent:
        return part.region.program.kept_bytes(sent_by(part.region, part.policy, names_of(run, run.recompute.sent)))
    moved = frozenset[int]() if run.recompute.mode is Mode.AUTO else part.kept
    return part.region.program.kept_bytes(moved if part.chosen is None else part.chosen.offloaded)


# split backward -------------------------------------------------------------------------------------------------------
# NOTE [ Two halves ] in `formula.split_backward`. The gradient of a chunk's input, which is sent, is also the ``.grad``
# of the input buffer until the next step begins (``stage.py``, ``clear_runtime_states``).


def splits(run: Run) -> bool:
    """Whether backward is torch's split one."""
    layout = run.layout
    return layout.stage_buffers and layout.pp > 1 and layout.schedule.splits


def by_torch(run: Run, part: StageRegion) -> bool:
    """Whether torch's checkpoint, of one or several layers, recomputes a region in a split backward."""
    return part.chosen is None and part.policy == FULL and splits(run)


def _with_halves(run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit], *, handed_back: bool) -> Iterator[Unit]:
    """Add a split backward to the units of a chunk, whose first and last are separate.

    Args:
        handed_back: the previous chunk is on the same device, and this one's input gradient becomes its buffer.
    """
    parts, at = _regions(groups), 0
    for number, unit in enumerate(made):
        own = parts[at : at + unit.regions]
        at += unit.regions * len(unit.names)
        halves = _halves(run, own, first=number == 0, last=number == len(made) - 1)
        if handed_back and number == 0:
            halves = halves._replace(waiting=halves.waiting - stream_bytes(run))
        yield unit._replace(halves=halves)


def _halves(run: Run, own: Sequence[StageRegion], *, first: bool, last: bool) -> Halves:
    """Split backward of one unit.

    Args:
        first, last: of its chunk. The first one's input is a receive buffer, whose gradient is kept; the gradient of
            the last one's output is a receive buffer.
    """
    torchs = all(by_torch(run, part) for part in own)
    regions, kept, rule = tuple(part.region for part in own), own[0].kept, run.gradient_rule
    halves = _segment_half(regions, rule, torchs) if len(own) > 1 else _alone(regions[0], kept, rule, torchs)
    head, stream = own[-1].name == HEAD, stream_bytes(run)
    arriving = stream if last and not head else 0
    given = input_kept(own[0]) if first else 0
    return Halves(
        waiting=halves.gradients + (stream if first else 0) - (halves.incoming if arriving else 0),
        input_peak=halves.peak - arriving,
        detached=halves.detached + (logits_returned(own[-1]) if head else 0) if last else 0,
        steps=_steps(regions, kept, rule, torchs, last, given),
    )


@lru_cache(maxsize=4096)
def _alone(region: Region, kept: frozenset[int], rule: GradientRule, torchs: bool) -> InputHalf:
    """Gradients of inputs of a region under its policy; recomputed tensors that stay count as ``gradients``."""
    stays = frozenset[int]() if torchs else read_by_groups(region) - kept
    half = input_half(region, kept, rule, stays=stays)
    return replace(half, gradients=half.gradients + region.program.kept_bytes(stays))


@lru_cache(maxsize=4096)
def _segment_half(regions: tuple[Region, ...], rule: GradientRule, torchs: bool) -> InputHalf:
    """Gradients of inputs of a segment: all regions are recomputed, then differentiated from the last to the first."""
    plain = [named_passes(region, NONE, rule, False) for region in regions]
    peak, level = _forwards_again(regions[0], plain)
    there = 0
    for place in reversed(range(len(regions))):
        region = regions[place]
        held = frozenset[int]() if place else kept_by(region, FULL)
        stays = frozenset[int]() if torchs else read_by_groups(region) - held
        half = input_half(region, kept_by(region, NONE), rule, stays=stays, lets_go=True)
        peak = max(peak, level + there + half.peak)
        level -= plain[place].resident
        there += half.gradients + region.program.kept_bytes(stays)
    end = input_half(regions[-1], kept_by(regions[-1], NONE), rule)
    return InputHalf(peak=peak, gradients=there, incoming=end.incoming, detached=0)


@lru_cache(maxsize=4096)
def _steps(
    regions: tuple[Region, ...], kept: frozenset[int], rule: GradientRule, torchs: bool, last: bool, given: int
) -> tuple[WeightStep, ...]:
    if torchs:
        return checkpointed_weight_half(regions, rule, last=last)
    first = weight_half(regions[0], kept, rule, last=last and len(regions) == 1, given=given)
    more = (weight_half(region, frozenset(), rule) for region in regions[1:])
    return first + tuple(step for steps in more for step in steps)
