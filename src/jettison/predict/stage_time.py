"""Seconds of a pipeline stage: its regions, exposed transfers of ZeRO and offloading, and the end of a step.

See NOTE [ A step ] in `predict.time`.

NOTE [ Copies of FSDP ]
``_fsdp_collectives.py`` of torch 2.13: FSDP2 copies a group's weights out of the all-gather's output
(``foreach_all_gather_copy_out``), and its gradients, cast, into the reduction's input (``chunk_cat``), on the stream of
compute. FSDP1's weights are views of what was all-gathered; autograd concatenates its gradients. Not priced: copies of
shards, and before a reduction after the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby, pairwise

from jettison.core.dtypes import DTYPE_BYTES
from jettison.cost.collective import cpu_seconds, group, host_seconds, point_seconds, transfer_seconds
from jettison.cost.execution import Execution
from jettison.cost.flops import everything, recompute_flops, repeated, to_the_end, visible_share
from jettison.cost.layer import NOTHING, PassSeconds, PriceModel, RegionSeconds
from jettison.cost.matmul import memory_seconds
from jettison.formula.region import Region, embedding_region
from jettison.formula.split_backward import computing_groups
from jettison.formula.static import Static, state_bytes, static, together
from jettison.predict.frozen_models import frozen_groups, frozen_run
from jettison.predict.optimizer_state import offloaded_optimizer
from jettison.predict.stages import COMPILERS, FULL, NONE, RegionGroup, StageRegion, again_by, kept_by, segment_ends
from jettison.predict.units import by_torch, moved_bytes, splits
from jettison.spec.fp8 import BF16_GEMMS, Library
from jettison.spec.hardware import Hardware
from jettison.spec.kernels import Documents
from jettison.spec.layout import Layout
from jettison.spec.model import AnyLayer
from jettison.spec.precision import Optimizer, Precision
from jettison.spec.recompute import Mode, Recompute
from jettison.spec.run import Run

OPTIMIZER_PASSES = 3
"""Memory traffic of an unfused AdamW over a fused one's: 80 bytes of fp32 a parameter, and 28."""
GRADIENT_PASSES = 3
"""Passes over gradients before the optimizer: a read for the norm, a read and a write for clipping."""
BUCKET_BYTES = 25 << 20
"""Bucket size of gradient reductions: ``bucket_cap_mb`` of PyTorch's DistributedDataParallel."""


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """Seconds of a pipeline stage: of one micro-batch in each of its chunks, and of the end of a step.

    Args:
        chunks: seconds of their regions, transfers within them included.
        sent: exposed seconds of sending outputs and their gradients, by chunk.
        end: exposed reduction of gradients after the last backward, and all-gather of updated parameters.
        hideable: the part of ``end`` that a longer last backward would hide.
        optimizer: optimizer step with clipping.
        recomputed_flops: of one micro-batch on one rank.
        repeated: recomputation for gradients of weights in a split backward, by chunk.
        late: whether that pass computes the gradients of inputs as well, by chunk.
    """

    chunks: tuple[RegionSeconds, ...]
    sent: tuple[tuple[float, float], ...]
    end: float
    hideable: float
    optimizer: float
    recomputed_flops: float
    repeated: tuple[PassSeconds, ...]
    late: tuple[bool, ...]

    @cached_property
    def forward(self) -> list[float]:
        """Seconds of a forward, by chunk."""
        return [c.forward.seconds + s for c, (s, _) in zip(self.chunks, self.sent, strict=True)]

    @cached_property
    def backward(self) -> list[float]:
        """Seconds of a backward with recomputation, by chunk."""
        every = zip(self.chunks, self.sent, self.repeated, strict=True)
        return [c.backward_seconds + s + r.seconds for c, (_, s), r in every]

    @cached_property
    def weights(self) -> list[float]:
        """Seconds of the backward's gradients of weights, by chunk."""
        halves = zip(self.chunks, self.repeated, self.backward, self.late, strict=True)
        return [b if late else c.weights.seconds + r.seconds for c, r, b, late in halves]

    @cached_property
    def inputs(self) -> list[float]:
        """Seconds of the backward's gradients of inputs, by chunk."""
        return [b - w for b, w in zip(self.backward, self.weights, strict=True)]

    @cached_property
    def again(self) -> list[PassSeconds]:
        """Seconds of recomputation, by chunk."""
        return [c.again + r for c, r in zip(self.chunks, self.repeated, strict=True)]

    @property
    def total(self) -> RegionSeconds:
        """Seconds of one micro-batch in all chunks."""
        return sum(self.chunks, NOTHING)


# regions --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """``count`` equal consecutive regions; seconds and FLOPs are of one.

    Args:
        gathered: seconds of ZeRO 3's all-gather.
        reduced: seconds of the reduction of the region's gradients.
        offloaded: seconds of copying its kept tensors to the host, one way.
        optimizer_bytes: memory traffic of the optimizer step.
        prices: price model of its kernels.
        segment: number of items, from this one on, that a planner has put into one segment.
        groups: groups of weights for each of which torch's checkpoint recomputes the region in a split backward.
    """

    count: int
    region: Region
    seconds: RegionSeconds
    gathered: float
    reduced: float
    recomputed_flops: float
    optimizer_bytes: float
    in_layer: bool
    prices: PriceModel
    offloaded: float = 0.0
    segment: int = 1
    groups: int = 0


_price_model = lru_cache(maxsize=4096)(PriceModel)


@lru_cache(maxsize=65536)
def _one(
    prices: PriceModel,
    region: Region,
    again: frozenset[int],
    planned: bool,
    adds: bool,
    sharding: Layout,
    optimizer: Optimizer,
    in_layer: bool,
) -> Item:
    """Item of one region without offloading.

    Args:
        adds: weight gradients are accumulated over micro-batches.
    """
    precision, hardware = prices.precision, prices.hardware
    seconds = prices.seconds(region, again, planned=planned)
    if adds:
        adding = _adding_seconds(region, sharding, precision, prices.execution, hardware)
        seconds = seconds._replace(weights=seconds.weights + PassSeconds(compute=adding))
    gathered, reduced = _shared_seconds(region, replace(sharding, tp=prices.layout.tp), prices)
    return Item(
        count=1,
        region=region,
        seconds=seconds,
        gathered=gathered,
        reduced=reduced,
        recomputed_flops=recompute_flops(region, again),
        optimizer_bytes=_optimizer_bytes(region, sharding, precision, optimizer, in_layer),
        in_layer=in_layer,
        prices=prices,
    )


def _computed_share(run: Run, layer: AnyLayer) -> float:
    seq, masked = run.packed or run.seq, run.kernels.documents is Documents.MASK
    if masked and run.packed:
        return 1.0
    # kernels with a mask tensor skip no blocks; flash-attn and FlexAttention skip those outside the window
    if masked and run.kernels.tensor_masks and layer.window is not None and layer.window <= seq:
        return 1.0
    return _visible_share(layer, seq)


_visible_share = lru_cache(maxsize=4096)(visible_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of one run's stages on given hardware.

    Args:
        planned: it runs under a plan, for every recompute mode.
    """

    run: Run
    hardware: Hardware
    execution: Execution
    planned: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "hardware", self.hardware.under(self.execution.stack))

    def prices(self, layer: AnyLayer | None = None) -> PriceModel:
        """Price model of a layer's kernels; None: of the embedding and the head."""
        run = self.run
        return _price_model(
            hardware=self.hardware,
            execution=self.execution,
            precision=run.precision,
            layout=run.layout.within_stage,
            visible=1.0 if layer is None else _computed_share(run, layer),
        )

    # regions ----------------------------------------------------------------------------------------------------------

    def items(self, chunk: Sequence[RegionGroup]) -> list[Item]:
        """Items of a chunk's regions."""
        found, begun = [], 0
        for same, ends in zip(chunk, segment_ends(self.run, chunk), strict=True):
            part = same.part
            if part.first:  # a segment's copy to the host overlaps with the next segment
                begun = moved_bytes(self.run, part)
            for last, own in groupby(ends):  # every layer of a segment but the last is fully recomputed
                alone = last and not part.inner
                again = self._again(part) if alone else everything(part.region)
                item = self._item(part, len(list(own)), again, begun if alone else 0)
                found.append(replace(item, segment=part.layers) if part.inner and part.first else item)
        return found

    def item(self, part: StageRegion) -> Item:
        """Item of a region on its own."""
        return self.items([RegionGroup(part=part, names=(part.name,))])[0]

    def _item(self, part: StageRegion, count: int, again: frozenset[int], moved: int) -> Item:
        run = self.run
        found = _one(
            self.prices(part.layer),
            part.region,
            again,
            self.planned or run.recompute != Recompute(),
            run.micro_batches > 1,
            run.layout.sharding,
            run.optimizer,
            part.is_layer,
        )
        found = replace(found, seconds=found.seconds + self.copies(part.static)) if run.layout.zero == 3 else found
        if run.optimizer_offload.moves_parameters:  # a shard is copied from the host before its all-gather
            fetched = host_seconds(self._static(found).host_parameters, self.hardware)
            found = replace(found, gathered=found.gathered + fetched)
        groups = computing_groups(part.region) if by_torch(run, part) else found.groups
        offloaded = host_seconds(moved, self.hardware) if moved else found.offloaded
        if (count, groups, offloaded) == (found.count, found.groups, found.offloaded):
            return found
        return replace(found, count=count, groups=groups, offloaded=offloaded)

    def copies(self, of: Static) -> RegionSeconds:
        """Seconds of a region's copies of weights and gradients: NOTE [ Copies of FSDP ]."""
        layout, precision = self.run.layout, self.run.precision
        if not layout.shards_parameters or layout.buckets is not None:
            return NOTHING
        read, flat = DTYPE_BYTES[precision.compute] / DTYPE_BYTES[precision.reduce_dtype], layout.flat_parameters
        moved = 0 if flat or not layout.resharded else 2 * of.gathered
        gradients = of.reduced * (read + (read if flat else 1)) * self.execution.reduces_each
        out, into = (PassSeconds(compute=memory_seconds(nbytes, self.hardware)) for nbytes in (moved, gradients))
        return RegionSeconds(forward=out, inputs=out, weights=into)

    def _again(self, part: StageRegion) -> frozenset[int]:
        if part.chosen is not None:
            return frozenset(part.program.recompute_set(part.chosen.buffers))
        if part.policy == NONE or part.policy in COMPILERS:
            return frozenset()
        if part.policy == FULL and self.execution.repeats_all:
            return everything(part.region)
        parts = again_by(part.region, part.policy)
        if parts is not None:
            return parts.ops
        kept = kept_by(part.region, part.policy)
        if part.policy == Mode.SELECTIVE and self.execution.repeats_all:
            return to_the_end(part.region, kept)
        return repeated(part.region, kept)

    # stages -----------------------------------------------------------------------------------------------------------

    def stage(
        self, index: int, chunks: Sequence[Sequence[Item]], share: float, known: dict[object, RegionSeconds]
    ) -> StageSeconds:
        """Seconds of one stage in a step.

        Args:
            share: share of its micro-batches that recompute.
            known: cache of chunks' seconds by items (object) and share.
        """
        layout = self.run.layout
        seconds = []
        for items in chunks:
            alike = id(items), share
            if alike not in known:
                each = sum((item.seconds * item.count for item in items), NOTHING)
                known[alike] = each._replace(again=each.again * share) + self._exposed_transfers(items) + self._frozen
            seconds.append(known[alike])
        sends = self.sending()
        last = layout.pp * layout.virtual_stages - 1
        both = list(zip(layout.places(index), layout.neighbours(index), strict=True))
        blocks = 0.0 if self.execution.hides_stages else sends
        every = [item for items in chunks for item in items]
        end, hideable = self._end(every)
        late = [place == 0 and splits(self.run) for place, _ in both]
        repeated = [self._repeated([] if first else items) for first, items in zip(late, chunks, strict=True)]
        return StageSeconds(
            chunks=tuple(seconds),
            sent=tuple(
                (blocks if place < last and not behind else 0.0, blocks if place and not before else 0.0)
                for place, (before, behind) in both
            ),
            end=end,
            hideable=hideable,
            optimizer=self.optimizer(every),
            recomputed_flops=share
            * (sum(item.count * item.recomputed_flops for item in every) + sum(flops for _, flops in repeated)),
            repeated=tuple(found * share for found, _ in repeated),
            late=tuple(late),
        )

    def _repeated(self, items: Sequence[Item]) -> tuple[PassSeconds, float]:
        """Seconds and FLOPs of torch's checkpoints that recompute for gradients of weights in a split backward.

        Each group of weights recomputes its full segment: NOTE [ Checkpoints under two halves ] in
        `formula.split_backward`. A model's first stage does not split its backward, and recomputes once.
        """
        size = self.run.recompute.segment
        layers = [item for item in items if item.groups for _ in range(item.count)]
        again, flops = PassSeconds(), 0.0
        for at in range(0, len(layers), size):
            own = layers[at : at + size]
            times = sum(item.groups for item in own)
            for item in own:
                again += item.seconds.again * times
                flops += item.recomputed_flops * times
        return again, flops

    @property
    def _frozen(self) -> RegionSeconds:
        total = NOTHING
        for frozen in self.run.frozen:
            own = Timing(run=frozen_run(self.run, frozen), hardware=self.hardware, execution=self.execution)
            items = own.items(frozen_groups(self.run, frozen))
            total = total + RegionSeconds(forward=own.stage(0, [items], 1.0, {}).total.forward)
        return total

    def sending(self) -> float:
        """Seconds to send a stage's output, or its gradient: of one residual stream."""
        layout = self.run.layout
        if layout.pp == 1:
            return 0.0
        nbytes = embedding_region(self.run.signature).output.nbytes
        if layout.tp == 1 or layout.sp or not self.execution.splits_outputs:
            return point_seconds(nbytes, layout, self.hardware)
        ranks = group(layout, "tp", self.hardware.node)
        gathering = transfer_seconds("all_gather_into_tensor", nbytes, ranks, self.hardware)
        return point_seconds(nbytes / layout.tp, layout, self.hardware) + gathering

    def _exposed_transfers(self, items: Sequence[Item]) -> RegionSeconds:
        """Exposed transfers of ZeRO 2 and 3 and offloading in a chunk's passes."""
        layout, forward, backward = self.run.layout, 0.0, 0.0
        if layout.zero >= 2 and (layout.shards > 1 or self.run.gathers_parameters):
            gathers = layout.zero == 3 and layout.resharded
            if gathers and items:
                forward += items[0].gathered + self._covered(items, gathers=True, reduces=False, forward=True)
            reduces = self.execution.reduces_each
            backward += self._covered(items[::-1], gathers=gathers, reduces=reduces, forward=False)
        if self.run.recompute.to_host:
            pairs = [(item.count - 1, item, item.seconds.backward_seconds, item) for item in items]
            for at, (item, other) in enumerate(pairwise(items), 1):
                if other.in_layer:  # the last layer offloads nothing
                    behind = sum(each.seconds.backward_seconds for each in items[at : at + other.segment])
                    pairs.append((1, item, behind, other))
            forward += sum(n * self._over(i.offloaded, other.seconds.forward.seconds) for n, i, _, other in pairs)
            backward += sum(n * self._over(i.offloaded, work) for n, i, work, _ in pairs)
        return RegionSeconds(forward=PassSeconds(transfers=forward), inputs=PassSeconds(transfers=backward))

    def hideable(self, items: Sequence[Item]) -> float:
        """Exposed ZeRO transfers of a chunk's backward that more compute would hide."""
        layout = self.run.layout
        alone = layout.shards == 1 and not self.run.gathers_parameters
        if not items or layout.zero < 2 or alone or not self.execution.hides_data:
            return 0.0
        gathers, reduces = layout.zero == 3 and layout.resharded, self.execution.reduces_each
        waited, _ = self._loads(items[::-1], gathers=gathers, reduces=reduces, forward=False)
        return waited * (1 - self.hardware.reached.shared)

    def _over(self, transfer: float, work: float) -> float:
        """Exposed seconds of a copy that overlaps with the next region. Copies need no multiprocessors."""
        return max(0.0, transfer - work) if self.execution.hides_offload else transfer

    def _covered(self, items: Sequence[Item], *, gathers: bool, reduces: bool, forward: bool) -> float:
        """Seconds that transfers add: the next region's all-gather and the previous one's reduction overlap with each.

        Without the first all-gather and the last reduction, which do not overlap: the caller adds them.
        """
        waited, every = self._loads(items, gathers=gathers, reduces=reduces, forward=forward)
        return waited + (every - waited) * self.hardware.reached.shared

    def _loads(self, items: Sequence[Item], *, gathers: bool, reduces: bool, forward: bool) -> tuple[float, float]:
        """Exposed seconds of these transfers, and all of them."""
        waited = every = 0.0
        for at, item in enumerate(items):
            work = item.seconds.forward.seconds if forward else item.seconds.backward_seconds
            following = items[at + 1].gathered if gathers and at + 1 < len(items) else 0.0
            before = items[at - 1].reduced if reduces and at else 0.0
            own_gathered, own_reduced = (item.gathered if gathers else 0.0), (item.reduced if reduces else 0.0)
            loads = [(1, following + before)]
            if item.count > 1:
                loads = [
                    (1, own_gathered + before),
                    (item.count - 2, own_gathered + own_reduced),
                    (1, following + own_reduced),
                ]
            for times, load in loads:
                every += times * load
                waited += times * (max(0.0, load - work) if self.execution.hides_data else load)
        return waited, every

    # the end of a step ------------------------------------------------------------------------------------------------

    def _end(self, items: Sequence[Item]) -> tuple[float, float]:
        """Exposed seconds of reductions after the last backward, by region; and what longer backwards would hide."""
        layout = self.run.layout
        if layout.shards == 1 or not items:
            return 0.0, 0.0
        after = sum(item.count * item.gathered for item in items) if self.gathers_after else 0.0
        if layout.zero >= 2 and self.execution.reduces_each:
            return items[0].reduced + after, 0.0
        every = sum(item.count * item.reduced for item in items)
        if not self.execution.hides_data:
            return every + after, 0.0
        now = done = 0.0
        for item in reversed(items):
            took, reduced = item.seconds.backward_seconds, item.reduced
            pending = took * _pending_share(item.region)
            for _ in range(item.count):
                now += took
                done = max(done, now - pending) + reduced
        left = max(0.0, done - now)
        shared = self.hardware.reached.shared
        return left + (every - left) * shared + after, left * (1 - shared)

    @property
    def gathers_after(self) -> bool:
        """Whether a step ends with the all-gather of updated parameters."""
        layout = self.run.layout
        return layout.zero in (1, 2) or (layout.zero == 3 and not layout.resharded)

    def adding(self, region: Region) -> float:
        """Seconds to accumulate a region's weight gradients in a micro-batch's backward."""
        run = self.run
        if run.micro_batches == 1:
            return 0.0
        return _adding_seconds(region, run.layout.sharding, run.precision, self.execution, self.hardware)

    def optimizer(self, items: Sequence[Item], *, least: bool = False) -> float:
        """Seconds of the optimizer step: its traffic over the memory bandwidth, of the device or of the host.

        Args:
            least: a lower bound, without copies that backwards may hide.
        """
        precision, how = self.run.precision, self.execution
        fused = how.fused_optimizer and self.run.optimizer is not Optimizer.ADAMW_FOREACH
        passes = 1 if fused else OPTIMIZER_PASSES
        if self.run.optimizer_offload.steps_on_cpu:
            return self._host_seconds(items, passes=passes, least=least)
        nbytes = sum(item.count * item.optimizer_bytes for item in items)
        again = sum(item.count * _quantised_bytes(item.region, precision, how) for item in items if item.in_layer)
        return memory_seconds(nbytes * passes + again, self.hardware) + self._host_seconds(items)

    def _host_seconds(self, items: Sequence[Item], *, passes: int = 1, least: bool = False) -> float:
        """Exposed copies of optimizer offload, and a step on CPU: only copies of gradients overlap with backwards."""
        run = self.run
        if not run.optimizer_offload.moves:
            return 0.0
        moved = offloaded_optimizer(run, together((self._static(item), item.count) for item in items))
        updated = moved.to_device_bytes - moved.gathered_bytes  # the others are part of `Item.gathered`
        sent, fetched = (host_seconds(n, self.hardware) for n in (moved.to_host_bytes, updated))
        if not run.optimizer_offload.steps_on_cpu:
            return sent + fetched
        fetched += cpu_seconds(moved.stepped_bytes * passes, self.hardware)
        if least:
            return fetched
        work = sum(item.count * item.seconds.backward_seconds for item in items)
        backwards = run.micro_batches * (work + self._exposed_transfers(items).inputs.transfers)
        return max(0.0, sent - backwards) + fetched

    def _static(self, item: Item) -> Static:
        run = self.run
        return static(
            [w for w in item.region.weights if not w.tied],
            precision=run.precision,
            optimizer=run.optimizer,
            layout=run.layout.sharding,
            in_layer=item.in_layer,
            on_host=run.optimizer_offload,
        )


# weights --------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _pending_share(region: Region) -> float:
    """Share of a region's backward that remains when its first bucket of gradients is full."""
    gradients = sum(w.numel for w in region.weights if not w.tied and not w.frozen) * 4
    return max(0.0, 1 - BUCKET_BYTES / gradients) if gradients else 0.0


def _shared_seconds(region: Region, layout: Layout, prices: PriceModel) -> tuple[float, float]:
    """Seconds of a region's all-gather of weights and reduction of gradients."""
    precision, hardware, execution = prices.precision, prices.hardware, prices.execution
    gathered = reduced = 0.0
    whole = layout.zero == 0 or (layout.zero == 1 and execution.reduces_whole)
    kind = "all_reduce" if whole else "reduce_scatter_tensor"
    sent = "float32" if execution.reduces_float32 else precision.reduce_dtype
    for expert in (False, True):
        shared = [w for w in region.weights if w.expert is expert and not w.tied]
        elements = sum(w.numel for w in shared if not w.frozen)
        frozen = sum(w.packed_bytes or w.numel * DTYPE_BYTES[precision.compute] for w in shared if w.frozen)
        ranks = group(layout, "experts" if expert else "shards", hardware.node)
        weights, gradients = (elements * DTYPE_BYTES[dtype] for dtype in (precision.compute, sent))
        gathered += transfer_seconds("all_gather_into_tensor", weights + frozen, ranks, hardware)
        reduced += transfer_seconds(kind, gradients, ranks, hardware)
    return gathered, reduced


def _adding_seconds(
    region: Region, layout: Layout, precision: Precision, execution: Execution, hardware: Hardware
) -> float:
    """Seconds to accumulate a micro-batch's weight gradients, unless their GEMM does."""
    nbytes = 0
    unsharded = layout.zero == 3 and not execution.reduces_each  # NOTE [ Unsharded gradients ] in `fsdp2`
    kept = precision.reduce_dtype if unsharded else precision.accumulator or precision.gradient
    casts = kept != precision.compute if unsharded else execution.casts_gradients and precision.compute != "float32"
    given, into = DTYPE_BYTES[precision.compute if casts or unsharded else precision.gradient], DTYPE_BYTES[kept]
    for weight in region.weights:
        if not weight.tied and not weight.frozen:
            sharded = layout.zero >= 2 and execution.reduces_each
            ranks = layout.expert_shards if weight.expert else layout.shards
            elements = -(-weight.numel // ranks) if sharded else weight.numel
            nbytes += elements * (into if execution.accumulates_in_gemm else given + 2 * into * (1 + casts))
    return memory_seconds(nbytes, hardware)


@lru_cache(maxsize=16384)
def _quantised_bytes(region: Region, precision: Precision, execution: Execution) -> int:
    """Memory traffic of quantizing a layer's weights, where that happens once a step."""
    recipe = precision.recipe or execution.recipe
    if precision.gemm_inputs is None or not (
        execution.delayed_scaling if recipe is None else recipe.library is Library.TE
    ):
        return 0
    each = DTYPE_BYTES[precision.parameter]
    if recipe is None:
        each += DTYPE_BYTES[precision.gemm_inputs]
        return sum(weight.numel * each for weight in region.weights if len(weight.shape) >= 2)
    total = 0
    for w in region.weights:
        own = w.recipe or recipe
        if w.gemm and not w.head and not w.frozen and not w.tied and own != BF16_GEMMS:
            copies = 1 if own.either_way else 2
            total += each * (1 + own.looks) * w.numel + (w.quantized_bytes or copies * w.numel * own.bits // 8)
    return total


def _optimizer_bytes(
    region: Region, layout: Layout, precision: Precision, optimizer: Optimizer, in_layer: bool
) -> float:
    """Memory traffic of the optimizer step on one rank: the norm and clipping of gradients, then the update. A sharded
    optimizer reads shards of gradients only (Megatron-Core, ``DistributedOptimizer._copy_model_grads_to_main_grads``
    and ``MegatronOptimizer.get_main_grads_for_grad_norm``).

    Masters of another dtype than gradients need a copy of these first.
    """
    if optimizer is Optimizer.NONE:
        return 0.0
    total = 0.0
    given = DTYPE_BYTES[precision.accumulator or precision.gradient]
    gradient = max(given, DTYPE_BYTES[precision.master or precision.gradient])
    copied = given + gradient if gradient != given else 0
    parameter = DTYPE_BYTES[precision.parameter] * (1 if precision.master else 2)
    for weight in region.weights:
        if weight.tied or weight.frozen:
            continue
        ranks = layout.expert_shards if weight.expert else layout.shards
        owned = -(-weight.numel // ranks) if layout.zero >= 1 else weight.numel
        state = state_bytes(weight, owned, precision, optimizer, in_layer=in_layer)
        state += owned * (DTYPE_BYTES[precision.master] if precision.master else 0)
        total += owned * (copied + GRADIENT_PASSES * gradient + gradient + parameter) + 2 * state
    return total
