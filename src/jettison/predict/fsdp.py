"""FSDP: unsharded weights and gradients that live during each unit of a chunk.

NOTE [ What FSDP2 holds ]
``torch/distributed/fsdp/_fully_shard``, of 2.13: ``_fsdp_param_group.py``; for buffers, ``_fsdp_collectives.py``.
A group is one call of ``fully_shard``: here the embedding, each layer, and the final norm with the head. Its streams
overlap, but allocations follow the host, which goes from group to group.

Forward. ``wait_for_unshard`` copies a group's weights out of the all-gather's output, which lives until the next group
has copied out its own (``AllGatherState``): twice the group's weights during all of its forward, and before it those of
the previous group as well. ``reshard`` frees the weights after it.

Backward. ``pre_backward`` copies out, frees the all-gather's output, and all-gathers the previous group
(``_backward_prefetch``). Gradients are unsharded, in the weights' dtype; ``post_backward`` frees the weights and the
next group's reduce-scatter input, and copies its own gradients into a new one (``reduce_scatter_input``, in the reduce
dtype), which lives until the previous group's ``post_backward``. Then the gradients are freed, except the last one,
which a loop variable of ``foreach_reduce`` references: small in a layer, the embedding or the head at a model's ends.
Each further micro-batch has unsharded gradients again, whose reduced shards are accumulated.

A segment of several groups all-gathers each again when it is recomputed, and ``post_forward`` does not reshard then
(``is_bw``): each is unsharded from there to its own backward. Its last was prefetched by the next group. Outputs of the
other all-gathers are freed once copied: each group is the root of a forward of its own (``iter_forward_root``). Each
group is reduced after its own backward, while earlier layers' saved tensors live.

Weights that stay unsharded after a forward (``reshard_after_forward=False``) are freed by ``post_backward`` too. With
fewer ranks (an ``int``) a larger shard lives from ``reshard`` until the weights have been copied out for backward.
Weights of a pipeline stage that are not resharded live while any micro-batch is in flight. A loss outside the model
runs after norm and head are resharded, in forward and backward. transformers' loss is inside: the root group's weights
are live, and in its backward those of the last layer.

If a model's ends have no groups of their own (`has_outer_ends`) they belong to the root group: unsharded from before
the first layer, and in backward until the engine's final callback, as are the gradients of both. There is no all-gather
for the head, and no prefetch for the embedding. The engine sums both gradients of a tied embedding before any hook,
into a third tensor: the head's is a view, in which it does not accumulate.

NOTE [ Unsharded gradients ]
Some backwards do not reduce gradients (`Run.keeps_unsharded_gradients`). FSDP2 (``reduce_grads`` of a group, set by
``set_requires_gradient_sync``) still reshards weights. It casts gradients to the dtype that is reduced in, one
parameter after the other (``to_accumulated_grad_if_needed``), and adds those of further micro-batches
(``accumulate_unsharded_grad_if_needed``); where compute has that dtype, autograd adds them in place. FSDP1
(``no_sync``: ``_sync_gradients``) keeps them in the dtype of compute: a unit's are concatenated into the gradient of
its flat parameter, which autograd adds to the one of earlier micro-batches.

Loops that accumulate reduce in the last micro-batch (`Run.syncs_last`): each group copies its unsharded gradients into
the buffer that is reduced from, as in any step, and they are freed then. A pipeline of ``torch.distributed.pipelining``
reduces one group after the other when a chunk's last backward is over (`Layout.reduces_chunks`; ``stage.py``,
``backward_maybe_with_nosync``). If its stages reshard after a forward (`Layout.regathers`), weights are unsharded from
a chunk's backward to its next forward. Decisions 0074 and 0110.

NOTE [ Flat parameters ]
FSDP1, ``torch/distributed/fsdp`` of 2.4 and 2.13: ``_runtime_utils.py``, ``_flat_param.py``. A unit is all-gathered
into the storage of its views (``_all_gather_flat_param``): its weights once, not twice. The root unit, with all that no
layer has, stays unsharded from its forward to the end of the backward (``_post_forward_reshard``:
``not state._is_root``). In backward the previous unit is prefetched (``_pre_backward_hook``, ``BACKWARD_PRE``), except
with reentrant checkpoints, whose recomputation all-gathers it. Without an auto-wrap policy the root unit has all
layers: nothing is all-gathered for a backward, and each layer's gradients live until all are concatenated.

PEFT wraps each adapter matrix separately (``peft/utils/other.py``, ``fsdp_auto_wrap_policy``). Their units come between
a layer and the previous one, which is prefetched late in the layer's backward; and a layer's own parameter is frozen.
It is resharded once gradients of its inputs are computed (``_register_post_backward_reshard_only_hook``:
``register_multi_grad_hook``), and the hook's handle lives to the end of the backward
(``_post_backward_final_callback``). A reentrant checkpoint recomputes with leaves as inputs: the hook references the
leaf, the checkpoint's input, and so the leaf's gradient. Neither is freed with its layer: at the end of a backward all
inputs of all layers live, and as many gradients. Counted on models of transformers 4.45, 4.48 and 5.23 with PEFT.

NOTE [ Experts within a layer ]
Under expert parallelism experts are sharded over fewer ranks than the rest of their layer, and a group has one mesh: so
they are a group within the layer's (torchtitan, ``apply_fsdp``: ``fully_shard`` of ``transformer_block.moe.experts``
over the mesh "efsdp"). In backward the layer's own weights come first, with its experts' all-gather output; when
gradients reach the experts, the previous group is prefetched, without its experts. After the experts' backward their
weights are freed, and the next layer's buffer, which has no gradients of experts. Their gradients are copied and
reduced while saved tensors of the layer's part before its experts live, and their buffer lives until the layer's own is
filled. One rank has no all-gather buffer, and the mean is another tensor (``reduce_scatter_input /
gradient_divide_factor`` of ``foreach_reduce``), as gloo's copy is among several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from jettison.core.dtypes import DTYPE_BYTES
from jettison.formula.liveness import Backward, Passes
from jettison.formula.model_states import ModelStates, declared, model_states, together
from jettison.formula.region import EMBEDDING, HEAD, Region
from jettison.memory.stage_unit import Unit
from jettison.predict.live_parameters import Live, live_parameters
from jettison.predict.stages import FULL, NONE, RegionGroup, StageRegion, kept_by, named_frames, named_passes, passes_of
from jettison.spec.kernels import Device
from jettison.spec.layout import Reshard
from jettison.spec.precision import GradientRule
from jettison.spec.run import Run

EXPERTS = "mlp.experts"
NOTHING = ModelStates()

# groups ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpGroups:
    """Regions of a chunk with their FSDP groups.

    Args:
        kept: regions whose weights stay unsharded after a forward.
        ranks: ranks over which the others are resharded until their backward; 0: all.
        in_flight: weights live with micro-batches in flight, see `whole_in_flight`.
        outer: weights of the model's ends in the root group; 0: the ends have groups of their own.
        last: elements of the root group's last gradient.
        tied: gradients of a tied embedding while they are summed, without the head's, which is ``later``.
        later: gradients of later regions, until the embedding's: unsharded, those of another micro-batch, shards.
        live: bytes during each region if parameters are all-gathered by module (`live_parameters`).
    """

    parts: tuple[StageRegion, ...]
    kept: tuple[StageRegion, ...]
    ranks: int = 0
    in_flight: bool = False
    outer: int = 0
    last: int = 0
    tied: int = 0
    later: tuple[tuple[int, int, int], ...] = ()
    live: tuple[Live, ...] = ()

    @classmethod
    def of(cls, run: Run, parts: Sequence[StageRegion]) -> FsdpGroups:
        """Return the groups of a layout."""
        layout = run.layout
        if layout.by_module:
            return cls(parts=tuple(parts), kept=(), live=live_parameters(run, parts))
        if not has_outer_ends(run):
            if layout.reshard is Reshard.ALWAYS:
                return cls(parts=tuple(parts), kept=(), ranks=layout.reshard_ranks)
            kept = parts if not layout.resharded else [part for part in parts[-1:] if part.name == HEAD]
            return cls(parts=tuple(parts), kept=tuple(kept), in_flight=layout.pp > 1 and not layout.resharded)
        late = layout.reshard is Reshard.BUT_FIRST
        own = parts if layout.fsdp_one_unit else (parts[0], parts[-1])
        ends = together([(part.static, 1) for part in own])
        both = replace(parts[0].static, gathered=ends.gathered, reduced=ends.reduced, gradients=ends.gradients)
        first, last = replace(parts[0], static=both), parts[-1]
        *layers, end = [
            replace(p, static=replace(p.static, gathered=0, reduced=0)) if p in own else p for p in parts[1:]
        ]
        tied = sum(w.numel for w in last.region.weights if w.tied and not w.frozen) * DTYPE_BYTES[run.precision.compute]
        if late:
            layers[-1] = replace(layers[-1])  # a new object, unlike its equals
        held = [(_unsharded(run, part), part.static.gradients) if part in own else (0, 0) for part in parts[:0:-1]]
        allocates, shards = run.allocates_unsharded_gradients, not run.keeps_unsharded_gradients
        sums = [*accumulate(held, lambda more, one: (more[0] + one[0], more[1] + one[1]))][::-1]
        return cls(
            parts=(first, *layers, end),
            later=(*((own + tied, own * allocates + tied, of * shards) for own, of in sums), (0, 0, 0)),
            kept=(first, *(layers if not layout.resharded else layers[-1:] if late else ())),
            outer=ends.gathered,
            last=_last_gradient(run, last),
            tied=2 * tied if run.sums_tied_gradients else tied,
        )

    def whole(self, part: StageRegion | None) -> int:
        """Return the weights of a region that stay unsharded after its forward."""
        return part.static.gathered if self.kept and part in self.kept and part is not None else 0

    def left(self, part: StageRegion) -> int:
        """Return the weights of a region that live after its forward: unsharded, or sharded over fewer ranks."""
        return part.static.gathered // self.ranks if self.ranks else self.whole(part)

    def again(self, part: StageRegion | None) -> int:
        """Return the weights of a region that are all-gathered again for its backward."""
        return 0 if part is None else part.static.gathered - self.whole(part)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlace:
    """The regions of a unit, and their neighbours in the chunk."""

    own: tuple[StageRegion, ...]
    before: StageRegion | None
    behind: StageRegion | None
    chunk: FsdpGroups
    later: tuple[int, int, int] = (0, 0, 0)
    live: tuple[Live, ...] = ()

    @property
    def shards(self) -> tuple[object, ...]:
        """Key of all that decides live weights and gradients during the unit."""
        whole, parts = self.chunk.whole, (self.before, *self.own, self.behind)
        alone = (None if part is None else (part.static.gathered, part.static.reduced, whole(part)) for part in parts)
        return (*alone, None if self.before is None else self.before.region.output.nbytes, self.later, self.live)

    @classmethod
    def of(cls, chunk: FsdpGroups, first: int, stop: int) -> GroupPlace:
        """Return the position of parts ``first .. stop - 1`` of a chunk."""
        parts = (None, *chunk.parts, None)
        own, live = chunk.parts[first:stop], chunk.live[first:stop]
        later = chunk.later[first] if chunk.later else (0, 0, 0)
        return cls(own=own, before=parts[first], behind=parts[stop + 1], chunk=chunk, later=later, live=live)


def has_outer_ends(run: Run) -> bool:
    """Whether one group has embedding, norm and head: a tied embedding is one parameter, of one group."""
    layout = run.layout
    outer = layout.fsdp_wrap_layers_only or layout.flat_parameters or run.model.tied_embeddings
    return layout.pp == 1 and outer and run.gathers_parameters and not layout.by_module


def _last_gradient(run: Run, part: StageRegion) -> int:
    """Elements of the last gradient of an end's own group; 0 for a layer's, which is small."""
    twice = run.layout.pp > 1  # a stage has a second copy of a tied embedding
    own = [] if part.is_layer else [w.numel for w in part.region.weights if not w.frozen and (twice or not w.tied)]
    return own[-1] if own else 0


def _unsharded(run: Run, part: StageRegion, apart: int = 0) -> int:
    """Bytes of a region's unsharded gradients in its backward, without those that are reduced ``apart``."""
    precision = run.precision
    return (part.static.reduced - apart) // DTYPE_BYTES[precision.reduce_dtype] * DTYPE_BYTES[precision.compute]


def _accumulated(run: Run, part: StageRegion) -> int:
    """Unsharded gradients of a region from one backward to the next."""
    return _unsharded(run, part) if run.layout.flat_parameters else part.static.reduced


# chunks ---------------------------------------------------------------------------------------------------------------


def with_shards(run: Run, groups: Sequence[RegionGroup], made: Sequence[Unit], *, reducing: bool) -> list[Unit]:
    """Add all-gathered weights and reduced gradients to a chunk's units; the first and last of equal ones are apart.

    Args:
        reducing: for the backward that reduces gradients of several micro-batches.
    """
    layout = run.layout
    alone = layout.shards == 1 and layout.expert_shards == 1 and not run.gathers_parameters
    if not layout.by_module and (alone or layout.zero < 2):
        return list(made)
    chunk = FsdpGroups.of(run, [group.part for group in groups for _ in group.names])
    parts = (None, *chunk.parts, None)
    known: dict[tuple[object, ...], Unit] = {}
    found: list[Unit] = []
    at = 0
    for unit in made:
        count, size = len(unit.names), unit.regions
        begin = 0
        before: tuple[object, ...] = ()
        # the first and the last have different neighbours
        for end in range(1, count + 1) if chunk.live or layout.fsdp_one_unit else (1, count - 1, count):
            if end <= begin:
                continue
            first = at + begin * size
            around = parts[first], parts[first + 1], parts[first + size], parts[first + size + 1]
            key = size, *around, chunk.live[first : first + size], chunk.later[first : first + 1]
            if key not in known:
                known[key] = with_fsdp_buffers(run, unit, GroupPlace.of(chunk, first, first + size), reducing=reducing)
            names, own = unit.names[begin:end], known[key]
            if key == before:
                found[-1] = own.named((*found[-1].names, *names))
            else:
                found.append(own.named(names))
            before, begin = key, end
        at += count * size
    return found


def with_fsdp_buffers(
    run: Run, unit: Unit, place: GroupPlace, treated: StageRegion | None = None, *, reducing: bool = False
) -> Unit:
    """Add all-gathered weights and reduced gradients to a unit. See NOTE [ What FSDP2 holds ].

    Args:
        treated: its region with another policy than in its position.
        reducing: see `with_shards`.
    """
    if place.live:
        return unit.plus(forward=max(f for f, _ in place.live), backward=max(b for _, b in place.live))
    if run.layout.zero < 3:
        return unit.plus(backward=0 if place.behind is None else place.behind.static.reduced)
    reduces, treated = reducing or not run.keeps_unsharded_gradients, treated or place.own[0]
    return _Sharded(run=run, unit=unit, place=place, treated=treated, reducing=reducing, reduces=reduces).whole()


def whole_in_flight(run: Run, groups: Sequence[RegionGroup]) -> int:
    """Return the weights of a pipeline's chunk that are unsharded while micro-batches are in flight."""
    if run.layout.pp == 1 or run.layout.resharded:
        return 0
    return sum(group.part.static.gathered * len(group.names) for group in groups)


def reducing(run: Run, chunk: Sequence[RegionGroup]) -> int:
    """Return the peak of a chunk's reduction, after its last backward, above its unsharded gradients and weights.

    Groups are reduced in turn: a buffer, which gloo copies, and shards of earlier ones.
    """
    there = highest = 0
    for part in (group.part for group in chunk for _ in group.names):
        own = part.static
        named = _last_gradient(run, part) * DTYPE_BYTES[run.precision.reduce_dtype]
        there -= own.gathered
        highest = max(highest, there + own.reduced, there + named + _made_shards(run, part))
        there += own.gradients - own.reduced
    return highest


def freed(run: Run, chunk: Sequence[RegionGroup]) -> int:
    """Return the bytes of a chunk that its reduction frees: unsharded weights, and gradients less their shards."""
    gone = (len(group.names) * (_accumulated(run, group.part) - group.part.static.gradients) for group in chunk)
    return whole_in_flight(run, chunk) + sum(gone)


# units ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sharded:
    run: Run
    unit: Unit
    place: GroupPlace
    treated: StageRegion
    reducing: bool
    reduces: bool  # this backward reduces its gradients

    def whole(self) -> Unit:
        run, unit, own, chunk = self.run, self.unit, self.place.own, self.place.chunk
        layout, unsharded = run.layout, run.keeps_unsharded_gradients
        stays = sum(map(chunk.left, own)) if layout.pp == 1 and (chunk.kept or chunk.ranks) else 0
        forward, backward, adding = self._segment() if len(own) > 1 else self._single(own[0])
        gradient = sum(_accumulated(run, part) for part in own) if unsharded else unit.gradient
        pending, cast = (0, 0) if layout.zero_replicas == 1 else (self._reduced_again(), self._cast_after_all_reduce())
        if self.reducing:
            pending = sum(part.static.gradients for part in own if part.static.reduced) - gradient
        found = unit._replace(
            resident=unit.resident + stays,
            whole=stays,
            forward_peak=forward,
            backward_peak=backward - self.place.later[2],
            adding_peak=adding,
            gradient=gradient,
            pending=unit.pending + pending,
            cached=0,
            weights=sum(part.static.gathered for part in own) if layout.regathers else 0,
            lingering=unit.lingering + cast,
        )
        return self._with_inputs_of_hooks(found)

    def _with_inputs_of_hooks(self, unit: Unit) -> Unit:
        """Add inputs and gradients that hooks of frozen layers reference: NOTE [ Flat parameters ]."""
        run, (part, *more), before, behind = self.run, self.place.own, self.place.before, self.place.behind
        frozen = run.layout.flat_parameters and run.tuning is not None and part.is_layer and not more
        if not frozen or before is None or not (run.recompute.reentrant and part.policy == FULL):
            return unit
        given = before.region.output.nbytes
        # the gradient of its output is counted: the next layer's hook references it
        held = part.region.output.nbytes if behind is not None and behind.is_layer else 0
        return unit._replace(lingering=2 * given, backward_peak=unit.backward_peak - held)

    def _reduced_again(self) -> int:
        """Bytes of another micro-batch's all-reduced shards under HSDP, which each group keeps to the backward's end.

        ``_fsdp_param_group.py``, ``_all_reduce_state``. For the first micro-batch they are the shards themselves, as
        for gradients that are reduced once; the root group's come last.
        """
        once = self.run.layout.zero_replicas == 1 or self.run.keeps_unsharded_gradients
        return 0 if once or self._casts or self._is_last else self.unit.gradient

    def _cast_after_all_reduce(self) -> int:
        """Bytes of all-reduced shards in the reduce dtype, where gradients have another, to the backward's end."""
        if not self._casts or not self.reduces or self._is_last:
            return 0
        return sum(part.static.reduced for part in self.place.own) // self.run.layout.shards

    @property
    def _casts(self) -> bool:
        precision = self.run.precision
        return precision.reduce_dtype != precision.gradient and not self.run.layout.flat_parameters

    @property
    def _is_last(self) -> bool:
        return bool(self.place.chunk.outer) and self.place.own[0].name == HEAD

    def _single(self, part: StageRegion) -> tuple[int, int, int]:
        """Peaks of a forward, of the first backward, and of one that finds gradients."""
        run, unit, chunk = self.run, self.unit, self.place.chunk
        before, behind = self.place.before, self.place.behind
        head, layout = part.name == HEAD, run.layout
        passes = passes_of(self.treated, run.gradient_rule)
        # up to the last step that reads weights, and after it; weights of layers live until their forward returns
        forward, loss = passes.around.forward if head else (passes.forward_peak, 0)
        gathered = 0 if chunk.in_flight else part.static.gathered
        after = 0 if chunk.in_flight else chunk.whole(part)
        shard = chunk.left(part) if chunk.ranks else 0
        there = gathered - after  # the rest counts as resident in backward
        outer = chunk.outer if head else 0  # weights of the ends in the root group
        flat = layout.flat_parameters
        lingering = before.static.gathered if outer and before is not None and not flat else 0
        within = run.kernels.model_code and not run.kernels.loss.in_loop  # the model's own loss
        freed = outer if layout.reshard is Reshard.ALWAYS and not within and not flat else 0
        waiting = 0 if behind is None or flat or not self.reduces else behind.static.reduced
        ahead, experts, twice = chunk.again(before), NOTHING, gathered if flat else 2 * gathered
        if flat and (run.recompute.reentrant or not (head or run.tuning is None)):
            ahead = 0  # a recomputation all-gathers it, or adapters' units come between
        if layout.ep > 1:
            waiting -= own_experts(run, behind).reduced
            ahead -= own_experts(run, before).gathered if ahead else 0
            experts = own_experts(run, part)
        entering = twice
        if flat or part.static.host_parameters:  # else two copies are more
            entering = max(entering, gathered + _on_its_way(run, part))
        if before is not None:  # the previous group's output and all-gather
            entering += before.region.output.nbytes + (0 if chunk.in_flight or flat else before.static.gathered)
        late, at_end = self.place.later[0], bool(chunk.outer) and part.name == EMBEDDING

        def rise(own: Passes) -> int:
            backward, differentiated = own.around.backward if head else (own.backward_peak, 0)
            opens = part.region.output.grad or head
            return waiting + max(
                backward + there + ahead - shard,
                own.opening + (there + ahead if flat else 2 * there) + freed if opens else 0,
                own.opening + there + ahead + _on_its_way(run, before) if ahead else 0,
                differentiated - freed + (ahead if outer and within else 0),
                there + chunk.tied if at_end else 0,
            )

        highest = rise(passes)
        if experts.gathered:
            layer = self.treated
            frames = () if layer.held or layer.chosen is not None else tuple(named_frames(layer.region, layer.policy))
            phases = _phases(layer.region, layer.kept, run.gradient_rule, frames, layer.held)
            highest = _rise_of_experts(run, experts, phases, there=there, ahead=ahead, waiting=waiting)
            twice = gathered + max(gathered - experts.gathered, experts.gathered if layout.expert_shards > 1 else 0)
        kept_buffers = after + shard if layout.pp == 1 else 0
        level = ahead - unit.resident - kept_buffers
        closing = self._closing(part, before, there + kept_buffers) + level
        moved = unit.forward_peak - passes.forward_peak, unit.backward_peak - passes.backward_peak
        first = max(highest + late + moved[1], closing if at_end else closing + late)
        adding = first + unit.adding_peak - unit.backward_peak
        if run.keeps_unsharded_gradients:
            late, own = self.place.later[1], passes
            if not run.allocates_unsharded_gradients:
                own = passes_of(self.treated, run.gradient_rule, accumulates=True)
            highest = rise(own) + unit.adding_peak - own.backward_peak
            closing = self._closing(part, before, there + kept_buffers, again=True) + level
            adding = max(highest + late, closing if at_end else closing + late)
        return max(forward + twice + lingering, loss + after - freed, entering) + moved[0], first, adding

    def _closing(self, part: StageRegion, before: StageRegion | None, weights: int, *, again: bool = False) -> int:
        """Live bytes while a group's gradients are reduced or kept, with the gradient of its input.

        Args:
            weights: unsharded weights of the group.
            again: unsharded gradients of earlier micro-batches exist, and are not counted.
        """
        run, flat = self.run, self.run.layout.flat_parameters
        given = 0 if before is None or not before.region.output.grad else before.region.output.nbytes
        if not part.static.reduced:  # nothing of it is trained, or the outermost group has it
            return 0
        apart = own_experts(run, part) if run.layout.ep > 1 else NOTHING
        made, buffer = _unsharded(run, part, apart.reduced), part.static.reduced - apart.reduced
        if flat:  # a unit's are concatenated while its weights live, and reduced from there
            buffer = 0 if run.precision.reduce_dtype == run.precision.compute else buffer
            reduced = made + buffer + _made_shards(run, part)
            return given + max(2 * made + weights, reduced if self.reduces else 0)
        if not self.reduces:
            return 0 if again or not run.allocates_unsharded_gradients else given + self._turned(part)
        there, dtype = (buffer, run.precision.reduce_dtype) if self.reducing else (0, run.precision.compute)
        of_root = bool(self.place.chunk.outer) and not part.is_layer
        named = (self.place.chunk.last if of_root else _last_gradient(run, part)) * DTYPE_BYTES[dtype]
        most = max(0 if self.reducing else made, named + _made_shards(run, part, apart) - there)
        return given + apart.gradients + buffer + most

    def _turned(self, part: StageRegion) -> int:
        """Peak of a group's gradients while they are cast, one by one, to the dtype that they are kept in."""
        run, precision = self.run, self.run.precision
        weights = [w for w in declared(list(part.region.weights), run.kernels.declared) if not w.frozen]
        if self.place.chunk.outer and not part.is_layer:
            weights += [w for w in self.place.chunk.parts[-1].region.weights if not w.frozen and not w.tied]
        narrow, wide = (DTYPE_BYTES[dtype] for dtype in (precision.compute, precision.reduce_dtype))
        level = highest = narrow * sum(w.gradient_numel for w in weights)
        for weight in weights:
            highest = max(highest, level + wide * weight.gradient_numel)
            level += (wide - narrow) * weight.gradient_numel
        return highest

    def _segment(self) -> tuple[int, int, int]:
        unit, own, chunk = self.unit, self.place.own, self.place.chunk
        highest = 0 if chunk.in_flight else max(part.static.gathered for part in own)
        earlier = 0 if chunk.in_flight else sum(map(chunk.left, own[:-1]))
        entering = unit.resident + own[0].region.output.nbytes + 3 * highest
        forward = max(unit.forward_peak + 2 * highest, entering) + earlier
        kept, later = int(self.run.keeps_unsharded_gradients), self.place.later
        return forward, self._segment_backward(again=False) + later[0], self._segment_backward(again=True) + later[kept]

    def _segment_backward(self, *, again: bool) -> int:
        """Peak of recomputed forwards, with weights all-gathered so far, and backwards, with a reduction after each.

        Args:
            again: gradients of earlier micro-batches exist.
        """
        run, place, chunk, own = self.run, self.place, self.place.chunk, self.place.own
        plain = [named_passes(part.region, NONE, run.gradient_rule, False) for part in own]
        adding = plain
        if again and not run.allocates_unsharded_gradients:
            adding = [named_passes(part.region, NONE, run.gradient_rule, True) for part in own]
        first, there = own[0].region, not chunk.in_flight
        level = -first.program.kept_bytes(kept_by(first, FULL) & kept_by(first, NONE))
        waiting = place.behind.static.reduced if place.behind is not None and self.reduces else 0
        gathered = [there * part.static.gathered for part in own]
        left = [there * chunk.left(part) for part in own]
        fetched = there * chunk.again(own[-1])  # by the group behind
        peak, before = 0, 0
        for number, (part, passes) in enumerate(zip(own, plain, strict=True)):
            weights = sum(gathered[: number + 1]) - sum(left[: number + 1])
            weights += 0 if number == len(own) - 1 else fetched
            rise = max(passes.forward_peak, before + there * chunk.again(part))
            peak = max(peak, level + plain[-1].output + waiting + weights + rise)
            level += passes.resident
            before = part.region.output.nbytes
        for number in reversed(range(len(own))):
            ahead = 0 if number else there * chunk.again(place.before)
            weights = sum(gathered[: number + 1]) - sum(left) + ahead
            peak = max(peak, level + waiting + weights + adding[number].backward_peak)
            level -= plain[number].resident
            source = own[number - 1] if number else place.before
            closing = self._closing(own[number], source, gathered[number], again=again)
            peak = max(peak, level + weights - gathered[number] + closing)
            waiting = own[number].static.reduced if self.reduces else 0
            level += self._stays(own[number], again=again)
        return peak

    def _stays(self, part: StageRegion, *, again: bool) -> int:
        """Return how many bytes of a region's gradients its backward adds, until its segment's ends."""
        if self.reducing:
            return part.static.gradients - _accumulated(self.run, part)
        if self.run.keeps_unsharded_gradients:
            return 0 if again else _accumulated(self.run, part)
        return 0 if again and not self._reduced_again() else part.static.gradients


def _on_its_way(run: Run, part: StageRegion | None) -> int:
    """Bytes of a group's shards that are fetched from the host, until they are in the all-gather's buffer.

    They are not counted in segments of several groups.
    """
    if part is None:
        return 0
    cast = 0
    if run.precision.parameter != run.precision.compute:  # frozen weights are in the compute dtype already
        learned = sum(w.numel for w in part.region.weights if not w.frozen)
        cast = learned * DTYPE_BYTES[run.precision.compute] // run.layout.shards
    return part.static.host_parameters + cast


def _made_shards(run: Run, part: StageRegion, apart: ModelStates = NOTHING) -> int:
    """Peak of a group's reduced shards and gloo's copy, without the shards that are ``apart``.

    They are reduced in one dtype and cast to another (``foreach_reduce``: ``_to_dtype_if_needed``). gloo reduces a copy
    of the buffer (``ProcessGroupGloo.cpp``, ``reduce_scatter_tensor_coalesced``: ``clone``).
    """
    precision, shard, reduced = run.precision, part.static.gradients, run.precision.reduce_dtype
    if run.optimizer_offload.copies_shards:  # reduced on the device, then copied
        shard = made = part.static.reduced // run.layout.shards
    else:
        shard -= apart.gradients
        made = shard // DTYPE_BYTES[precision.gradient] * DTYPE_BYTES[reduced]
    if run.kernels.device is Device.CPU:
        return made + max(part.static.reduced - apart.reduced, 0 if reduced == precision.gradient else shard)
    return made if reduced == precision.gradient else made + shard


# experts within a layer -----------------------------------------------------------------------------------------------


class Phases(NamedTuple):
    """Peaks of a layer's backward before, within and after its experts; bytes alive at its end, gradients too."""

    until: int
    within: int
    behind: int
    done: int


def own_experts(run: Run, part: StageRegion | None) -> ModelStates:
    """Return the totals of the group of a layer's experts; `NOTHING` without one."""
    layout = run.layout
    if part is None or layout.ep == 1 or layout.shards == 1 or layout.zero < 3 or run.keeps_unsharded_gradients:
        return NOTHING
    found = [weight for weight in part.region.weights if weight.expert]
    return model_states(found, precision=run.precision, optimizer=run.optimizer, layout=layout, in_layer=part.is_layer)


@lru_cache(maxsize=4096)
def _phases(
    region: Region, kept: frozenset[int], rule: GradientRule, frames: Sequence[frozenset[int]], held: frozenset[int]
) -> Phases:
    return PhasedBackward(region, kept, rule, frames=frames, held=held).phases()


class PhasedBackward(Backward):
    """A backward in three phases: until gradients reach experts, within them, and after them."""

    def phases(self) -> Phases:
        output, steps = self.region.output, self.region.tape.steps
        own = [number for number, step in enumerate(steps) if step.path.startswith(EXPERTS)]
        self._give(output.storage, output.nbytes)
        until = within = done = 0
        for number in reversed(range(len(steps))):
            if number == own[-1]:
                until, self.peak = self.peak, self.live
            if self._runs(steps[number]):
                self._visit(steps[number])
            for b in self.leaving.get(number, ()):
                self._release(b)
            if number == own[0]:
                within, done, self.peak = self.peak, self.live, self.live
        return Phases(until=until, within=within, behind=self.peak, done=done)


def behind_experts(run: Run, own: ModelStates) -> int:
    """Return the change by a reduction of experts' gradients: its input and shards, less the gradients."""
    precision = run.precision
    gradients = own.reduced // DTYPE_BYTES[precision.reduce_dtype] * DTYPE_BYTES[precision.compute]
    return own.reduced + own.gradients - gradients


def _rise_of_experts(run: Run, own: ModelStates, phases: Phases, *, there: int, ahead: int, waiting: int) -> int:
    """Peak of a layer's backward, without the reduction of its own group.

    Args:
        own: totals of its experts.
        there: unsharded weights of the layer that are not resident.
        ahead: weights of the previous group; ``waiting``: reduce-scatter input of the next layer.
    """
    # shards are as large as all on one rank
    copied = own.reduced if run.kernels.device is Device.CPU or run.layout.expert_shards == 1 else 0
    done, behind = phases.done + there - own.gathered + ahead, behind_experts(run, own)
    return max(
        phases.until + there + waiting,
        phases.within + there + ahead + waiting,
        done + own.reduced,
        done + behind + copied,
        phases.behind + there - own.gathered + ahead + behind,
    )
