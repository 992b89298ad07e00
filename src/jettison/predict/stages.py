"""Regions of each pipeline stage of a run, with their policies and cached replays, for bytes and for seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby
from math import prod

from jettison.core.units import GIB
from jettison.formula.liveness import Passes, replay
from jettison.formula.model_states import ModelStates, declared, model_states
from jettison.formula.region import EMBEDDING, HEAD, Region, embedding_region, head_region, layer_region
from jettison.formula.tape import Weight
from jettison.ledger.program import Program
from jettison.memory.schedule import PipelineShape
from jettison.solve.checkpoint_policy import (
    COMPILED,
    COMPILED_QUANTIZED,
    NAMED,
    OWN,
    Compiled,
    Recomputed,
    SelectiveOp,
    is_mtp,
    kept_apart,
    ops_of_parts,
    policy_named,
    recomputed,
    sent,
)
from jettison.spec.fine_tuning import Upcast
from jettison.spec.hardware import hardware, hardware_names
from jettison.spec.layout import Layout, Schedule
from jettison.spec.model import AnyLayer, Layer, ModelSpec
from jettison.spec.precision import GradientRule, Optimizer, OptimizerOffload
from jettison.spec.recompute import Mode
from jettison.spec.run import RegionSignature, Run

NONE, FULL, PARTS = "none", "full", "parts"
MTP_FULL = "modules:mtp"
"""Policy of a full checkpoint of a multi-token prediction (MTP) layer."""
CONTEXTS = frozenset(word for word, policy in NAMED.items() if isinstance(policy, SelectiveOp))
"""Policies of torch's selective checkpoint contexts in eager mode."""
COMPILERS = frozenset({COMPILED, COMPILED_QUANTIZED})
"""Policies of compiled layers without a checkpoint."""
_BY_POSITION = (Mode.BLOCK, Mode.INTERVAL)
"""Modes under which equal layers have different policies."""


@dataclass(frozen=True, slots=True)
class KeptBuffers:
    """Buffers of a layer that a planner keeps between its passes; those in ``offloaded`` are offloaded.

    In a segment of several ``layers`` only the first one's, at ``place`` 0, are kept: NOTE [ Segments ].
    """

    buffers: frozenset[int]
    offloaded: frozenset[int] = frozenset()
    place: int = 0
    layers: int = 1


Chosen = Sequence[KeptBuffers | None]
"""A planner's kept buffers of each layer; None: the run's recompute mode decides."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageRegion:
    """A region of a stage and its policy; equal regions share one object.

    Args:
        layer: of the model; None: the embedding or the head.
        policy: name of the policy; that of layers without a checkpoint where ``chosen`` decides.
        chosen: a planner's kept buffers.
        held: buffers that the model's caller references until its backward ends.
        place: its position in a segment of ``layers``, which keeps the first one's input; 1: no segment.
    """

    name: str
    region: Region
    policy: str
    static: ModelStates
    layer: AnyLayer | None = None
    chosen: KeptBuffers | None = None
    held: frozenset[int] = frozenset()
    place: int = 0
    layers: int = 1

    @property
    def is_layer(self) -> bool:
        """Whether it is a layer, not the embedding or the head."""
        return self.layer is not None

    @property
    def program(self) -> Program:
        """The program that a planner decides over."""
        return planned_program(self.region, self.policy)

    @property
    def kept(self) -> frozenset[int]:
        """Buffers that are kept between forward and backward."""
        kept = kept_by(self.region, self.policy) if self.chosen is None else self.chosen.buffers
        return kept | self.held if self.held else kept

    @property
    def first(self) -> bool:
        """Whether it is the first of its segment, whose input is kept, or in none."""
        return self.place == 0

    @property
    def inner(self) -> bool:
        """Whether its segment recomputes its output for a next layer."""
        return self.place < self.layers - 1

    def under(self, kept: KeptBuffers | None) -> StageRegion:
        """Return the region with a planner's kept buffers; None: the run's recompute mode decides."""
        return self if kept is None else replace(self, chosen=kept, place=kept.place, layers=kept.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionGroup:
    """Consecutive regions that are equal except for their names; ``part`` is one of them, by any name."""

    part: StageRegion
    names: tuple[str, ...]

    def parts(self) -> Iterator[StageRegion]:
        """Yield each region under its name."""
        return (replace(self.part, name=name) for name in self.names)


Chunk = tuple[RegionGroup, ...]
"""Regions of one virtual stage on one rank, in the order of the forward."""


@lru_cache(maxsize=65536)
def kept_by(region: Region, policy: str) -> frozenset[int]:
    """Buffers that a named policy keeps."""
    if policy in COMPILERS:
        return Compiled(word=policy).kept(region.program)
    if policy == PARTS:
        return kept_apart(region.program)
    if policy.startswith(f"{COMPILED} "):
        return policy_named(policy.removeprefix(f"{COMPILED} ")).kept(region.program)
    found = again_by(region, MTP_FULL if policy == FULL and is_mtp(region.program) else policy)
    if found is not None:
        return found.kept
    named = policy_named(policy)
    return named.cached(region.program) if isinstance(named, SelectiveOp) else named.kept(region.program)


@lru_cache(maxsize=65536)
def planned_program(region: Region, policy: str) -> Program:
    """Return the program that a planner decides over, by the policy of layers without a checkpoint."""
    return Compiled(word=policy).read(region.program) if policy in COMPILERS else region.program


@lru_cache(maxsize=4096)
def again_by(region: Region, policy: str) -> Recomputed | None:
    """Recomputed ops of a policy that is a list of modules; None: another policy."""
    word, _, names = policy.partition(":")
    return recomputed(region.program, tuple(names.split("+"))) if word == Mode.MODULES else None


@lru_cache(maxsize=4096)
def sent_by(region: Region, policy: str, modules: tuple[str, ...]) -> frozenset[int]:
    """Kept buffers of a policy that a list of modules offloads to CPU."""
    return sent(region.program, kept_by(region, policy), modules)


def names_of(run: Run, modules: tuple[str, ...]) -> tuple[str, ...]:
    """Names of modules by the library of a run's GEMMs: NOTE [ Norms of their own ] in `solve.checkpoint_policy`."""
    return tuple(OWN.get(name, name) for name in modules) if run.workspaces.library_bytes else modules


def walk(run: Run, chosen: Chosen | None = None) -> tuple[tuple[Chunk, ...], ...]:
    """Return a rank's regions, by stage and virtual stage. `UsageError` if layers do not divide over the stages."""
    starts = [0, *accumulate(run.layout.layers_per_chunk(run.model.depth))]
    return tuple(
        tuple(_named(run, chunk, starts[place]) for place, chunk in zip(run.layout.places(index), chunks, strict=True))
        for index, chunks in enumerate(outline(run, chosen))
    )


def _named(run: Run, chunk: Chunk, at: int) -> Chunk:
    """Rename a chunk whose first layer is number ``at`` of the model."""
    for group in chunk[:2]:  # of the embedding and a layer, or of layers
        if group.part.layer is not None and group.names[0] == run.model.layer_names[at]:
            return chunk
    found = []
    for group in chunk:
        if group.part.layer is not None:
            stop = at + len(group.names)
            group, at = RegionGroup(part=group.part, names=run.model.layer_names[at:stop]), stop
        found.append(group)
    return tuple(found)


def outline(run: Run, chosen: Chosen | None = None, *, only: int | None = None) -> tuple[tuple[Chunk, ...], ...]:
    """Return `walk` with one object for equal chunks, under the first one's names. Raise `UsageError` if layers do not
    divide over the stages.

    Args:
        only: index of the only stage to return.
    """
    layout, sizes = run.layout, run.layout.layers_per_chunk(run.model.depth)
    wanted = range(layout.pp) if only is None else (only,)
    parts: dict[Kind, StageRegion] = {}
    if chosen is None and run.recompute.mode not in _BY_POSITION:
        same, stages = _same_places(run.model, sizes, tuple(layout.places(index) for index in range(layout.pp)))
        policy = _policy(run, 0)
        made = [
            _chunk(run, place, [((number, policy, None), members) for number, members in own], parts)
            for place, own in same
        ]
        return tuple(tuple(made[i] for i in stages[index]) for index in wanted)
    known: dict[object, Chunk] = {}
    starts, last = [0, *accumulate(sizes)], len(sizes) - 1
    found = []
    for index in wanted:
        chunks, position = [], 0
        for place in layout.places(index):
            kinds = list(_alike(run, starts[place], starts[place + 1], position, chosen))
            alike = place == 0, place == last, tuple((kind, len(members)) for kind, members in kinds)
            if alike not in known:
                known[alike] = _chunk(run, place, kinds, parts)
            chunks.append(known[alike])
            position += sizes[place]
        found.append(tuple(chunks))
    return tuple(found)


@lru_cache(maxsize=4096)
def _same_places(
    model: ModelSpec, sizes: tuple[int, ...], stages: tuple[tuple[int, ...], ...]
) -> tuple[list[tuple[int, list[tuple[int, range]]]], list[list[int]]]:
    """Distinct positions of chunks, each the first of equal ones, and their indices by stage, for uniform policies.

    Args:
        sizes: layers of each place.
        stages: places of each stage.
    """
    found: dict[object, tuple[int, int, list[tuple[int, range]]]] = {}
    which = []
    for place, stop in enumerate(accumulate(sizes)):
        start = stop - sizes[place]
        own = [
            (number, range(max(first, start), min(last, stop)))
            for number, first, last in model.layer_runs
            if first < stop and start < last and start < stop  # none in a stage without layers
        ]
        alike = place == 0, place == len(sizes) - 1, tuple((number, len(members)) for number, members in own)
        which.append(found.setdefault(alike, (len(found), place, own))[0])
    return [(place, own) for _, place, own in found.values()], [[which[place] for place in own] for own in stages]


Kind = tuple[int, str, KeptBuffers | None]
"""Key of a layer: index in `ModelSpec.kinds`, policy, and a planner's kept buffers."""


def _chunk(run: Run, place: int, kinds: Sequence[tuple[Kind, range]], parts: dict[Kind, StageRegion]) -> Chunk:
    """Regions of one chunk.

    Args:
        parts: cache over chunks, cheaper than a hash of the run.
    """
    groups = [RegionGroup(part=_end(run, EMBEDDING), names=(EMBEDDING,))] if place == 0 else []
    for kind, members in kinds:
        if kind not in parts:
            parts[kind] = _layer(run, kind)
        groups.append(RegionGroup(part=parts[kind], names=run.model.layer_names[members.start : members.stop]))
    if place == run.layout.pp * run.layout.virtual_stages - 1:
        groups.append(RegionGroup(part=_end(run, HEAD), names=(HEAD,)))
    return tuple(groups)


def pipeline_shape(run: Run) -> PipelineShape:
    """Return a pipeline's schedule; without one, micro-batches take turns. `UsageError` if it cannot have them."""
    layout = run.layout
    return PipelineShape(
        layout.schedule if layout.pp > 1 else Schedule.ONE_F_ONE_B,
        stages=layout.pp,
        micro_batches=run.micro_batches,
        virtual_stages=layout.virtual_stages,
        group=layout.micro_batch_group,
    )


def segment_ends(run: Run, groups: Iterable[RegionGroup]) -> Iterator[list[bool]]:
    """Yield, for each group of a chunk, whether each of its regions ends a segment; an MTP layer is one of its own."""
    for in_segments, same in groupby(groups, lambda group: group.part.layer is not None and not group.part.layer.ahead):
        own = [len(group.names) for group in same]
        for count, stop in zip(own, accumulate(own), strict=True):
            places = range(stop - count + 1, stop + 1)
            yield [not in_segments or place % run.recompute.segment == 0 or place == sum(own) for place in places]


def local_shape(run: Run, weight: Weight) -> tuple[int, ...]:
    """Return a weight's sizes on one rank of tensor parallelism; sizes that do not divide are rounded up."""
    sizes = run.layout.mesh_sizes
    return tuple(
        -(-size // prod(sizes[axis] for axis, dim in weight.places if dim == i)) for i, size in enumerate(weight.shape)
    )


def _policy(run: Run, position: int) -> str:
    """Policy of the layer at ``position`` of its stage; segments are full."""
    mode, number, recipe = run.recompute.mode, run.recompute.number, run.precision.recipe
    compiled = COMPILED if recipe is None or recipe.high_precision_weight_gradient else COMPILED_QUANTIZED
    whole = compiled if run.compiled else NONE  # of a layer without checkpoint
    match mode:
        case Mode.EVERY:
            return FULL
        case Mode.BLOCK:
            return FULL if position < number else whole
        case Mode.INTERVAL:
            return FULL if position % number == 0 else whole
        case Mode.NONE | Mode.AUTO:
            return whole
        case Mode.MODULES:
            return f"{mode}:{'+'.join(names_of(run, run.recompute.modules))}"
        case Mode.SELECTIVE_OP | Mode.SELECTIVE_OP_ALTERNATE if run.compiled:
            return f"{COMPILED} {mode}"
        case _:
            return str(mode)


def _alike(run: Run, start: int, stop: int, position: int, chosen: Chosen | None) -> Iterator[tuple[Kind, range]]:
    """Yield consecutive layers of ``start .. stop - 1`` with equal keys.

    Args:
        position: position of the first of them in its stage.
    """
    numbers = run.model.kind_numbers

    def key(index: int) -> Kind:
        picked = None if chosen is None else chosen[index]
        return numbers[index], _policy(run, position + index - start), picked

    for kind, same in groupby(range(start, stop), key):
        members = list(same)
        yield kind, range(members[0], members[-1] + 1)


def _layer(run: Run, kind: Kind) -> StageRegion:
    number, policy, picked = kind
    table = run.layout.pp > 1 and not run.model.tied_embeddings  # otherwise the stage has one already
    found = _region(run.signature, number, run.optimizer, run.layout.sharding, table, run.optimizer_offload)
    return replace(found, policy=policy).under(picked)


def _end(run: Run, name: str) -> StageRegion:
    """The embedding; or final norm, head and loss, with a second copy of a tied weight under pipelines."""
    twice = name == EMBEDDING or run.layout.pp > 1
    found = _region(run.signature, name, run.optimizer, run.layout.sharding, twice, run.optimizer_offload)
    return replace(found, held=found.region.returned) if run.keep_logits and name == HEAD else found


@lru_cache(maxsize=65536)
def _region(
    signature: RegionSignature,
    which: int | str,
    optimizer: Optimizer,
    sharding: Layout,
    tied: bool,
    on_host: OptimizerOffload,
) -> StageRegion:
    """Region of an end by name, or of a layer by the number of its kind; ``tied``: with its copy of tied weights."""
    layer = signature.model.kinds[which] if isinstance(which, int) else None
    if layer is None:
        name, region = str(which), embedding_region(signature) if which == EMBEDDING else head_region(signature)
    else:
        name = signature.model.layer_names[signature.model.kind_numbers.index(which)]
        region = layer_region(signature, layer)
        tied = tied and not (isinstance(layer, Layer) and layer.repeats)  # weights of the layer before, on its stage
    weights = declared([w for w in region.weights if tied or not w.tied], signature.kernels.declared)
    in_layer, precision = layer is not None, signature.precision
    held = model_states(
        weights, precision=precision, optimizer=optimizer, layout=sharding, in_layer=in_layer, on_host=on_host
    )
    return StageRegion(name=name, region=region, policy=NONE, static=held, layer=layer)


def passes_of(part: StageRegion, rule: GradientRule, *, accumulates: bool = False) -> Passes:
    """Return a region's replay under its policy."""
    if part.held:
        return replay(part.region, part.kept, rule, accumulates=accumulates, held=part.held)
    if part.chosen is None:
        return named_passes(part.region, part.policy, rule, accumulates)
    return chosen_passes(part.region, part.chosen.buffers, rule, accumulates)


@lru_cache(maxsize=65536)
def named_passes(region: Region, policy: str, rule: GradientRule, accumulates: bool) -> Passes:
    kept = kept_by(region, policy)
    frames, reentrant = named_frames(region, policy), rule.reentrant and policy == FULL
    return replay(region, kept, rule, accumulates=accumulates, frames=frames, reentrant=reentrant)


def named_frames(region: Region, policy: str) -> Sequence[frozenset[int]]:
    """Ops of each checkpoint of a named policy."""
    if policy == PARTS:
        return ops_of_parts(region.program)
    return (frozenset(range(len(region.program.ops))),) if policy == FULL or policy in CONTEXTS else ()


@lru_cache(maxsize=4096)
def chosen_passes(region: Region, kept: frozenset[int], rule: GradientRule, accumulates: bool) -> Passes:
    return replay(region, kept, rule, accumulates=accumulates)


def most_of_passes(run: Run, part: StageRegion) -> int:
    """Most bytes that both passes of a region under its policy have at once."""
    passes = named_passes(part.region, part.policy, run.gradient_rule, False)
    return max(passes.forward_peak, passes.resident + passes.backward_peak)


@lru_cache(maxsize=1024)
def cached_segments(run: Run) -> int:
    """Bytes that the caching allocator has in segments, and that are unallocated at the peak: NOTE [ Cached segments ]
    in `device_allowance`. A plan that is yet to be chosen is taken for full recomputation."""
    logits, layer = 0, 0
    for part in {group.part for chunks in outline(run) for chunk in chunks for group in chunk}:
        policy = FULL if part.is_layer and run.recompute.mode is Mode.AUTO else part.policy
        passes = named_passes(part.region, policy, run.gradient_rule, False)
        if part.is_layer:
            layer = max(layer, passes.forward_peak - passes.resident + part.static.gathered)
        elif part.name == HEAD:
            logits = 2 * most_of_passes(run, part) if run.outgrows_segments else passes.forward_peak // 5
    return logits + layer


@lru_cache(maxsize=1024)
def other_streams(run: Run) -> int:
    """Bytes in segments of FSDP's streams: NOTE [ Cached segments ] in `device_allowance`."""
    if not run.layout.is_fsdp:
        return 0
    stages = [[group for chunk in chunks for group in chunk] for chunks in outline(run)]
    reduced = [sum(group.part.static.gradients * len(group.names) for group in groups) for groups in stages]
    gathered = max(group.part.static.gathered for groups in stages for group in groups)
    return gathered + max(reduced) * (run.micro_batches == 1)


@lru_cache(maxsize=1024)
def segments_before_training(run: Run, device: str = "") -> int:
    """Bytes that the caching allocator has in segments when training begins: NOTE [ Before training ] in `tuning`.

    ``device``: name of the accelerator; of one that does not ship, nothing is allocated ahead.
    """
    tuning = run.tuning
    if tuning is None or tuning.upcast is Upcast.NONE or run.layout.pp > 1:
        return 0
    chunks = outline(replace(run, tuning=replace(tuning, upcast=Upcast.NONE)))[0]
    groups = [(group.part, len(group.names)) for chunk in chunks for group in chunk]
    frozen = [(part, n, w) for part, n in groups for w in part.region.weights if w.frozen and not w.tied]
    used = segments = sum(part.static.parameters * n for part, n in groups)
    if tuning.upcast is Upcast.NORMS and run.kernels.loads_ahead and device in hardware_names():
        half = sum(w.numel * n for _, n, w in frozen if not w.head)
        segments = max(used, min(half, (hardware(device).usable_bytes - 12 * GIB // 10) // 2))
    for nbytes in (4 * w.numel for part, _, w in frozen if not part.is_layer and len(w.shape) > 1):
        segments += nbytes * (nbytes > segments - used)
        used += nbytes
    return segments
