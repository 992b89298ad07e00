"""Seconds of a region: forward, recomputation, backward and exposed transfers; and what its weights take in a step.

NOTE [ Overlap of transfers ]
Within a layer every forward transfer is exposed: the next kernel needs it. In backward an execution may overlap the
reduction of a column-parallel layer's input gradient with the weight-gradient GEMM, and the all-gather of a saved shard
with the input-gradient GEMM. An all-gather in backward that mirrors a forward reduce-scatter brings the gradient itself
and is exposed. If GEMMs are cut into t pieces, all of these overlap with GEMMs except for the first piece. An
overlapped transfer still takes `Reached.shared` of the device while it lasts.

NOTE [ Launch-bound ]
The device waits if the host takes longer to launch kernels than they run: `Delays.dispatch` each. A Megatron layer of
experts takes the host `Delays.experts`: modules, quantisers and tensors of each expert are Python objects, and the host
waits for the count of each expert's rows. TransformerEngine's issue 2897 measured 1.2 ms for a forward and 2.1 ms for a
backward of the newest fused experts; fp8 costs the host twice what bf16 does (issue 761). CUDA graphs need no host.
Where kernels are waited for (CUDA_LAUNCH_BLOCKING=1) the device idles for all of the host's time: `Delays.waited`.

NOTE [ Expert by expert ]
TransformerEngine launches a grouped GEMM as a loop of cuBLASLt calls (``multi_stream_cublas_gemm``): a descriptor, a
heuristic search and a launch for each expert, two in forward and four in backward. Rows are quantised expert by expert,
too (``multi_tensor_quantize_impl``), except under NVFP4 (``split_quantize_nvfp4_impl``). Eight GEMMs of 128 × 2048 ×
2048, a few microseconds of arithmetic, took 267 µs on Blackwell (pull request 3134): `Delays.expert_gemm` is 33 µs.

NOTE [ Outside CUDA graphs ]
A graph is captured for fixed sizes. With dropless routing the host reads the number of rows of each expert and launches
GEMMs of that size: recipes capture ``attn``, ``moe_router`` and ``moe_preprocess`` (NVIDIA-NeMo/Megatron-Bridge v0.2.0
to v0.6.0, ``cuda_graph_scope``). Full iterations are captured if every expert has a fixed number of rows
(``moe_pad_expert_input_to_capacity``: Qwen3 in v0.1.0), or if fused experts read the numbers on the device and
HybridEP does not wait for them (``_enable_deepseek_full_iteration_mxfp8`` in v0.6.0).

Weights are all-gathered, their gradients accumulated and reduced, and the optimizer reads and writes all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from operator import add
from typing import Final, NamedTuple

from jettison.core.dtypes import DTYPE_BYTES
from jettison.cost.collective import bandwidth, group, transfer_seconds
from jettison.cost.execution import Execution
from jettison.cost.flops import recompute_flops
from jettison.cost.fp8 import LowPrecisionGemms
from jettison.cost.kernel import (
    BATCHED,
    GEMMS,
    GROUPED,
    IN_ORDER,
    Half,
    Kernel,
    KernelWork,
    kernel_seconds,
    memory_seconds,
)
from jettison.cost.region_kernels import work
from jettison.formula.model_states import state_bytes
from jettison.formula.region import Region
from jettison.formula.tape import Collective
from jettison.spec.fp8 import BF16_GEMMS, FP4, Library
from jettison.spec.hardware import Hardware
from jettison.spec.layout import Layout
from jettison.spec.precision import Optimizer, Precision

FUSED_EXPERTS: Final = 3.3e-3
"""Host seconds of a layer of fused experts, forward and backward, on a GB200: NOTE [ Launch-bound ]."""
FORWARD_OF_EXPERTS: Final = 1.2 / 3.3
"""Forward's share of the host time of a layer of experts: NOTE [ Launch-bound ]."""


class PassSeconds(NamedTuple):
    """Seconds of compute, of exposed transfers, and of waiting for the host to launch kernels."""

    compute: float = 0.0
    transfers: float = 0.0
    dispatch: float = 0.0

    @property
    def seconds(self) -> float:
        """Sum of the three."""
        return self.compute + self.transfers + self.dispatch

    def __add__(self, other: PassSeconds) -> PassSeconds:  # type: ignore[override]  # not a longer tuple
        """Add two passes that follow each other."""
        return PassSeconds(*map(add, self, other))

    def __mul__(self, times: float) -> PassSeconds:  # type: ignore[override]
        """Repeat a pass."""
        return PassSeconds(*(each * times for each in self))


class RegionSeconds(NamedTuple):
    """Seconds of one micro-batch through one region on one rank.

    ``again`` is recomputation; ``inputs`` and ``weights`` are the gradients of inputs and of weights.
    """

    forward: PassSeconds = PassSeconds()
    again: PassSeconds = PassSeconds()
    inputs: PassSeconds = PassSeconds()
    weights: PassSeconds = PassSeconds()

    @property
    def backward(self) -> PassSeconds:
        """Recomputation and both kinds of gradients."""
        return self.again + self.inputs + self.weights

    @property
    def backward_seconds(self) -> float:
        """`backward.seconds`, without objects in between: the most frequent request."""
        again, inputs, weights = self.again, self.inputs, self.weights
        return (
            (again.compute + inputs.compute + weights.compute)
            + (again.transfers + inputs.transfers + weights.transfers)
            + (again.dispatch + inputs.dispatch + weights.dispatch)
        )

    def __add__(self, other: RegionSeconds) -> RegionSeconds:  # type: ignore[override]
        """Add two regions."""
        return RegionSeconds(*map(add, self, other))

    def __mul__(self, times: float) -> RegionSeconds:  # type: ignore[override]
        """Repeat a region."""
        return RegionSeconds(*(each * times for each in self))


NOTHING = RegionSeconds()


class Class(StrEnum):
    """Kinds of kernels in a breakdown of a step's time."""

    GEMMS = "GEMMs with weights"
    ATTENTION = "attention"
    MEMORY = "norms, activations, sums and losses"


@dataclass(frozen=True, kw_only=True)
class PriceModel:
    """Seconds of a run's kernels and transfers on a device, for `plan`, `estimate` and `search` alike."""

    hardware: Hardware
    execution: Execution
    precision: Precision
    layout: Layout  # within a stage
    visible: float  # share of attention's scores that are not masked

    @cached_property
    def _hash(self) -> int:
        return hash((self.hardware, self.execution, self.precision, self.layout, self.visible))

    def __hash__(self) -> int:
        return self._hash

    def seconds(self, region: Region, again: frozenset[int] = frozenset(), *, planned: bool = False) -> RegionSeconds:
        """Seconds of a region.

        Args:
            again: steps of its tape that backward recomputes.
            planned: its saved tensors go through hooks, if the execution has them; hooks take host time.
        """
        return _timer(self, region).seconds(again, hooked=planned and self.execution.hooks)

    def by_class(self, region: Region) -> dict[Class, float]:
        """Seconds of a forward and a backward by kind of kernel."""
        timer, found = _timer(self, region), dict.fromkeys(Class, 0.0)
        for kernel in (*timer.listed.forward, *timer.listed.backward):
            found[timer.kind(kernel)] += timer.kernel(kernel)
        return found

    def op_seconds(self, region: Region) -> tuple[float, ...]:
        """Least seconds that each op adds to recomputation, whatever else is recomputed."""
        return _timer(self, region).op_seconds


class _Timer:
    """Times of one region under one price model."""

    def __init__(self, prices: PriceModel, region: Region) -> None:
        self.region, self.tape = region, region.tape
        self.hardware, self.execution = prices.hardware, prices.execution
        self.precision, self.layout, self.visible = prices.precision, prices.layout, prices.visible
        self._recipe = prices.precision.recipe or prices.execution.recipe
        self._known: dict[tuple[frozenset[int], bool], RegionSeconds] = {}

    @cached_property
    def listed(self) -> KernelWork:
        """Kernels of the region's forward and backward."""
        precision = self.precision
        return work(self.region, self.execution, precision.gradient, precision.gemm_inputs, recipe=self._recipe)

    @cached_property
    def op_seconds(self) -> tuple[float, ...]:
        """Each op of a fused kernel takes an equal part of it: recomputing one recomputes the entire kernel."""
        # a transfer that overlaps with recomputation costs less than alone
        exposed, shared = self.execution.exposed(self.layout.tp), self.hardware.reached.shared
        least = exposed + (1 - exposed) * shared
        overlapped = {c.step for c in self.region.collectives if c.axis == "ep" and self.execution.hides_experts}
        found = [
            self._again(frozenset((i,))).transfers * (min(least, shared) if i in overlapped else least)
            for i in range(len(self.tape.steps))
        ]
        for kernel in self.listed.forward:
            for i in kernel.steps:
                found[i] += self.kernel(kernel) / len(kernel.steps)
        return tuple(found)

    def seconds(self, again: frozenset[int], *, hooked: bool = False) -> RegionSeconds:
        """Seconds of both passes; see `PriceModel.seconds`."""
        if (again, hooked) not in self._known:
            self._known[again, hooked] = self._seconds(again, hooked)
        return self._known[again, hooked]

    def _seconds(self, again: frozenset[int], hooked: bool) -> RegionSeconds:
        listed = self.listed
        halves = {half: [k for k in listed.backward if k.half is half] for half in Half}
        hooks = (
            len(self.region.program.slots) * self.hardware.delays.hook if hooked and not self.execution.graphed else 0.0
        )
        experts = self._expert_host_seconds
        return RegionSeconds(
            forward=self._pass(
                listed.forward,
                self._transfers(listed.forward, backward=False) + self._ring(listed.forward),
                host=hooks + experts * FORWARD_OF_EXPERTS,
            ),
            again=self._again(again),
            inputs=self._pass(
                halves[Half.INPUTS],
                self._transfers(listed.backward, backward=True) + self._ring(listed.backward),
                host=experts * (1 - FORWARD_OF_EXPERTS) / 2,
            ),
            weights=self._pass(halves[Half.WEIGHTS], 0.0, host=experts * (1 - FORWARD_OF_EXPERTS) / 2),
        )

    def _again(self, again: frozenset[int]) -> PassSeconds:
        """Seconds of recomputing these steps."""
        repeated = [k for k in self.listed.forward if not again.isdisjoint(k.steps)]
        return self._pass(repeated, self._transfers(repeated, again, backward=False) + self._ring(repeated))

    def _pass(self, kernels: Sequence[Kernel], transfers: float, host: float = 0.0) -> PassSeconds:
        """Args: host: seconds of host work in addition to launches."""
        compute = sum(self.kernel(k) for k in kernels)
        launches = 0 if self.execution.graphed else sum(k.launches for k in kernels)
        delays, waits = self.hardware.delays, self.execution.waits_for_kernels
        handed = launches * (delays.waited if waits else delays.dispatch) + self._expert_launches(kernels)
        hides = 0.0 if self.hardware.synchronous or waits else compute + transfers
        return PassSeconds(compute=compute, transfers=transfers, dispatch=max(0.0, handed + host - hides))

    def kernel(self, kernel: Kernel) -> float:
        """Seconds of one kernel."""
        return kernel_seconds(
            kernel,
            self.hardware,
            visible=self.visible,
            dtype=self.precision.compute,
            attention=self.execution.attention,
        )

    def kind(self, kernel: Kernel) -> Class:
        """Kind of a kernel. Matmuls of eager attention count as attention."""
        name = self.tape.steps[kernel.steps[0]].name
        if kernel.attention_flops or name == BATCHED:
            return Class.ATTENTION
        if "softmax" in name and name != "aten._log_softmax.default":
            return Class.ATTENTION
        return Class.GEMMS if kernel.gemm is not None else Class.MEMORY

    # transfers --------------------------------------------------------------------------------------------------------

    def _collective(self, c: Collective) -> float:
        ranks = group(self.layout, c.axis, self.hardware.node)
        copies = c.copies if self.execution.once_to_node else 1
        nbytes = c.nbytes * self._low_precision.gathered_share(c) if c.axis == "tp" else c.nbytes
        return transfer_seconds(c.kind, nbytes, ranks, self.hardware, copies=copies)

    @cached_property
    def _low_precision(self) -> LowPrecisionGemms:
        return LowPrecisionGemms(
            tape=self.tape, how=self.execution, gemm=self.precision.gemm_inputs, recipe=self._recipe
        )

    def _overlapped_gemms(self, c: Collective, kernels: Sequence[Kernel], half: Half | None) -> float:
        """Seconds of the GEMMs that a transfer overlaps with: NOTE [ Overlap of transfers ]."""
        own = self._gemms_of_transfer[c.step]
        steps = self.tape.steps
        return sum(
            self.kernel(k)
            for k in kernels
            if k.gemm and ((k.steps[0] in own and k.half is half) if own else steps[k.steps[0]].name in GEMMS)
        )

    @cached_property
    def _gemms_of_transfer(self) -> dict[int, frozenset[int]]:
        """GEMMs that read what a transfer gathers or write what it reduces, by the transfer's step."""
        steps = self.tape.steps
        found = {}
        for at in {c.step for c in self.region.collectives}:
            given, made = {v.storage for v in steps[at].inputs}, {v.storage for v in steps[at].outputs}
            following = steps[at + 1] if at + 1 < len(steps) else None
            if following is not None and following.name == IN_ORDER and made & {v.storage for v in following.inputs}:
                made |= {v.storage for v in following.outputs}
            found[at] = frozenset(
                i
                for i, step in enumerate(steps)
                if step.name in GEMMS
                and (made & {v.storage for v in step.inputs} or given & {v.storage for v in step.outputs})
            )
        return found

    def _overlap_cost(self, seconds: float, work: float) -> float:
        """Cost of transfers that overlap with this many seconds of compute."""
        out = max(0.0, seconds - work)
        return out + (seconds - out) * self.hardware.reached.shared

    def _transfers(self, kernels: Sequence[Kernel], steps: frozenset[int] | None = None, *, backward: bool) -> float:
        """Cost of a pass's transfers, or of those of recomputed steps, which launch ``kernels``."""
        own = [c for c in self.region.collectives if c.backward is backward and (steps is None or c.step in steps)]
        other_batch = 0.0  # experts' all-to-alls, which overlap with another micro-batch
        waited, hidden = 0.0, []
        mirrored = [(c.axis, c.nbytes) for c in self.region.collectives if not c.backward and "scatter" in c.kind]
        for c in own:
            seconds = self._collective(c)
            if c.axis == "ep" and self.execution.hides_experts:
                other_batch += seconds
                continue
            late, half = True, None
            if backward:
                half = Half.INPUTS if "gather" in c.kind else Half.WEIGHTS
                mirror = half is Half.INPUTS and (c.axis, c.nbytes) in mirrored
                if mirror:
                    mirrored.remove((c.axis, c.nbytes))
                late = mirror or c.axis != "tp" or not self.execution.hides_tensor
            apart = self.execution.exposed(self.layout.tp) if c.axis == "tp" else 1.0
            exposed = apart if late else 0.0  # NOTE [ Overlap of transfers ]
            waited += seconds * exposed
            if exposed < 1:
                hidden.append(self._overlap_cost(seconds * (1 - exposed), self._overlapped_gemms(c, kernels, half)))
        among = self._overlap_cost(other_batch, sum(self.kernel(k) for k in kernels)) if other_batch else 0.0
        return waited + sum(hidden) + among

    def _ring(self, kernels: Sequence[Kernel]) -> float:
        """Exposed seconds of the ring of keys and values under context parallelism."""
        if self.layout.cp == 1:
            return 0.0
        total = 0.0
        ranks = group(self.layout, "cp", self.hardware.node)
        delays = self.hardware.delays
        step = delays.start + (delays.link if ranks.nodes == 1 else delays.network)
        for kernel in kernels:
            if kernel.attention_flops:
                inputs = self.tape.steps[kernel.steps[0]].inputs
                moved = sum(v.nbytes for v in inputs[1:3]) * (ranks.size - 1) * (1 if kernel.half is None else 2)
                around = moved / bandwidth(ranks, self.hardware) + (ranks.size - 1) * step
                total += self._overlap_cost(around, self.kernel(kernel) if self.execution.hides_data else 0.0)
        return total

    # host time: NOTE [ Launch-bound ] ---------------------------------------------------------------------------------

    @cached_property
    def _expert_host_seconds(self) -> float:
        """Host seconds of experts' forward and backward in addition to launches."""
        if self._replayed or not self._grouped:
            return 0.0
        if self.execution.fuses_experts:
            return FUSED_EXPERTS
        low_precision = self.precision.gemm_inputs is not None
        return self.hardware.delays.experts * (1.0 if low_precision else 0.5) if self.execution.loops_experts else 0.0

    @cached_property
    def _grouped(self) -> bool:
        """Whether the region has grouped GEMMs of experts."""
        return any(step.name == GROUPED for step in self.tape.steps)

    @property
    def _replayed(self) -> bool:
        """Whether CUDA graphs replay experts. See NOTE [ Outside CUDA graphs ]."""
        return self.execution.graphed and self.execution.graphs_experts

    def _expert_launches(self, kernels: Sequence[Kernel]) -> float:
        """Seconds of NOTE [ Expert by expert ], without the first quantisation, which is counted as a launch."""
        delays = self.hardware.delays
        if not delays.expert_gemm or self._replayed or not (self._grouped and self.execution.loops_experts):
            return 0.0
        total = 0.0
        for kernel in kernels:
            step = self.tape.steps[kernel.steps[-1]]
            if kernel.gemm is not None and kernel.gemm.grouped:
                total += kernel.gemm.batch * delays.expert_gemm
            elif step.name == GROUPED and kernel.gemm is None and self._low_precision.dtype != FP4:
                total += (step.weights[0].shape[0] // self.layout.ep - 1) * kernel.launches * delays.dispatch
        return total


_timer = lru_cache(maxsize=4096)(_Timer)


OPTIMIZER_PASSES = 3
"""Memory traffic of an unfused AdamW over a fused one's: 80 bytes of fp32 a parameter, and 28."""
GRADIENT_PASSES = 3
"""Passes over gradients before the optimizer: a read for the norm, a read and a write for clipping."""
BUCKET_BYTES = 25 << 20
"""Bucket size of gradient reductions: ``bucket_cap_mb`` of PyTorch's DistributedDataParallel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """``count`` equal consecutive regions; seconds and FLOPs are of one.

    Args:
        gathered: seconds of ZeRO 3's all-gather.
        reduced: seconds of the reduction of the region's gradients.
        added: the part of ``seconds`` that accumulates weight gradients, or copies weights and gradients for FSDP.
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
    added: float
    recomputed_flops: float
    optimizer_bytes: float
    in_layer: bool
    prices: PriceModel
    offloaded: float = 0.0
    segment: int = 1
    groups: int = 0


price_model = lru_cache(maxsize=4096)(PriceModel)


@lru_cache(maxsize=65536)
def item_of(
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
    precision, seconds = prices.precision, prices.seconds(region, again, planned=planned)
    added = _adding_seconds(region, sharding, precision, prices.execution, prices.hardware) if adds else 0.0
    if adds:
        seconds = seconds._replace(weights=seconds.weights + PassSeconds(compute=added))
    gathered, reduced = _shared_seconds(region, replace(sharding, tp=prices.layout.tp), prices)
    return Item(
        count=1,
        region=region,
        seconds=seconds,
        gathered=gathered,
        reduced=reduced,
        added=added,
        recomputed_flops=recompute_flops(region, again),
        optimizer_bytes=_optimizer_traffic(region, sharding, precision, optimizer, in_layer),
        in_layer=in_layer,
        prices=prices,
    )


# weights --------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def pending_share(region: Region) -> float:
    """Share of a region's backward that remains when its first bucket of gradients is full."""
    gradients = sum(w.numel for w in region.weights if not w.tied and not w.frozen) * 4
    return max(0.0, 1 - BUCKET_BYTES / gradients) if gradients else 0.0


def _shared_seconds(region: Region, layout: Layout, prices: PriceModel) -> tuple[float, float]:
    """Seconds of a region's all-gather of weights and reduction of gradients."""
    precision, hardware, execution = prices.precision, prices.hardware, prices.execution
    gathered = reduced = 0.0
    whole = layout.zero == 0 or (layout.zero < 3 and execution.reduces_whole)
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
    unsharded = layout.zero == 3 and not execution.reduces_each  # NOTE [ Unsharded gradients ] in `predict.fsdp`
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
def quantized_bytes(region: Region, precision: Precision, execution: Execution) -> int:
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


def _optimizer_traffic(
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
