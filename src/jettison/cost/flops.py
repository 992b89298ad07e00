"""FLOPs of a training step, counted from the ops of a run; arXiv 2205.05198 Appendix A prints the same for its GPTs.

B sequences in a step · s, h, L, V as everywhere. A multiply-add is two. Both count matmuls alone, and attention in
full: `causal` halves it by name. Backward is twice the forward. The ledger's count holds for any architecture, and
equals the appendix for its GPTs; a mixture of experts counts its router and the rows that its experts receive.

For selective recomputation the appendix adds the attention core's forward and backward (12Bs^2hL), although only one
forward (4Bs^2hL) is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from jettison.cost.kernel import BATCHED, FLASH
from jettison.formula.region import Region, active_parameter_count, embedding_region, head_region, layer_region
from jettison.spec.kernels import AttentionKernel, Documents, Loss
from jettison.spec.layout import Layout
from jettison.spec.model import AnyLayer, ModelSpec
from jettison.spec.run import RegionSignature, Run

PASSES = 3
"""A forward, and a backward of twice its FLOPs."""


class Counting(StrEnum):
    """Definition of the model FLOPs in a utilisation."""

    LEDGER = "ledger"  # three times the matmuls of a forward, attention in full
    CAUSAL = "causal"  # as `LEDGER`, with only the unmasked scores of attention
    PALM = "palm"  # 6N + 12Lhs a token (arXiv 2204.02311 Appendix B), N the active parameters
    PARAMETERS = "6n"  # 6N a token


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionFlops:
    """FLOPs of one micro-batch's forward through a region, summed over all ranks."""

    gemms: int
    attention: int  # q k^T and its product with v, masked scores included
    frozen: int = 0  # part of ``gemms`` whose weights have no gradient

    def forward(self, visible: float = 1.0) -> float:
        """FLOPs of the forward alone."""
        return self.gemms + self.attention * visible

    def model(self, visible: float = 1.0) -> float:
        """FLOPs of forward and backward, without gradients of frozen weights."""
        return PASSES * self.forward(visible) - self.frozen


def region_flops(region: Region) -> RegionFlops:
    """Count a region's matmuls."""
    steps = region.tape.steps
    attention = sum(step.flops for step in steps if step.name in (FLASH, BATCHED))
    frozen = sum(step.flops for step in steps if step.weights and not step.learned)
    return RegionFlops(gemms=sum(step.flops for step in steps) - attention, attention=attention, frozen=frozen)


@lru_cache(maxsize=4096)
def visible_share(layer: AnyLayer, seq: int) -> float:
    """Share of a layer's attention scores that are not masked."""
    causal, window = layer.causal, layer.window
    reach = seq if window is None else min(window, seq)
    if causal:
        return reach / seq - (reach * (reach - 1)) / (2 * seq * seq)
    return min(1.0, 2 * reach / seq) if reach < seq else 1.0


def computed_share(run: Run, layer: AnyLayer) -> float:
    """Share of the attention scores of a layer that its kernels compute."""
    seq, masked = run.packed or run.seq, run.kernels.documents is Documents.MASK
    if masked and run.packed:
        return 1.0
    # kernels with a mask tensor skip no blocks; flash-attn and FlexAttention skip those outside the window
    if masked and run.kernels.tensor_masks and layer.window is not None and layer.window <= seq:
        return 1.0
    return visible_share(layer, seq)


def unsharded(run: Run) -> RegionSignature:
    """Return the run's region signature on one rank, full logits included, for model FLOPs.

    Packed runs count scores within documents only.
    """
    kernels = replace(run.kernels, loss=Loss.UPCAST)
    if run.packed:
        kernels = replace(kernels, attention=AttentionKernel.FLASH, documents=Documents.BLOCKS)
    return replace(run.signature, layout=Layout().within_stage, kernels=kernels)


@lru_cache(maxsize=1024)
def _forward(signature: RegionSignature) -> tuple[RegionFlops, tuple[tuple[AnyLayer, RegionFlops], ...]]:
    ends = [region_flops(region) for region in (embedding_region(signature), head_region(signature))]
    layers = tuple((layer, region_flops(layer_region(signature, layer))) for layer in signature.model.kinds)
    gemms, frozen = sum(end.gemms for end in ends), sum(end.frozen for end in ends)
    return RegionFlops(gemms=gemms, attention=0, frozen=frozen), layers


def forward_flops(run: Run) -> float:
    """FLOPs of one micro-batch's forward through the entire model."""
    return _micro_batch_flops(unsharded(run), causal=False)[0]


@lru_cache(maxsize=4096)
def _micro_batch_flops(signature: RegionSignature, causal: bool) -> tuple[float, float]:
    """FLOPs of a forward, and of forward and backward."""
    ends, layers = _forward(signature)
    counts = {layer: signature.model.layers.count(layer) for layer, _ in layers}
    reach = signature.packed or signature.seq
    shares = {layer: visible_share(layer, reach) if causal else 1.0 for layer, _ in layers}
    return (
        ends.forward() + sum(counts[layer] * flops.forward(shares[layer]) for layer, flops in layers),
        ends.model() + sum(counts[layer] * flops.model(shares[layer]) for layer, flops in layers),
    )


@lru_cache(maxsize=1024)
def _token_flops(model: ModelSpec, seq: int, attention: bool, tuned: bool) -> float:
    width = sum(layer.attended_width for layer in model.layers)
    return (4 if tuned else 6) * active_parameter_count(model) + (12 * width * seq if attention else 0)


def sequences(run: Run) -> int:
    """Sequences of a step, on all ranks."""
    return run.micro_batch * run.micro_batches * run.layout.dp


def tokens(run: Run) -> int:
    """Tokens of a step, on all ranks."""
    return sequences(run) * run.seq


def model_flops(run: Run, counting: Counting = Counting.LEDGER) -> float:
    """Model FLOPs of a step on all ranks, by one definition. Frozen models add their forward."""
    models = [run.model if frozen.model is None else frozen.model for frozen in run.frozen]
    if counting in (Counting.PALM, Counting.PARAMETERS):
        attention = counting is Counting.PALM
        reach = run.packed or run.seq
        each = _token_flops(run.model, reach, attention, run.tuning is not None)
        return tokens(run) * (each + sum(_token_flops(model, reach, attention, False) / PASSES for model in models))
    signature, causal = unsharded(run), counting is Counting.CAUSAL
    total = _micro_batch_flops(signature, causal)[1]
    total += sum(_micro_batch_flops(replace(signature, model=model, tuning=None), causal)[0] for model in models)
    return total * run.micro_batches * run.layout.dp


@lru_cache(maxsize=4096)
def recompute_flops(region: Region, again: frozenset[int]) -> int:
    """FLOPs that one micro-batch's backward recomputes on one rank."""
    steps = region.tape.steps
    return sum(steps[i].flops for i in again) if again != everything(region) else region.flops


# recomputed steps of a region's tape ----------------------------------------------------------------------------------


@lru_cache(maxsize=16384)
def repeated(region: Region, kept: frozenset[int]) -> frozenset[int]:
    """Fewest recomputed steps: those between the kept buffers and the ones that backward needs."""
    return frozenset(region.program.recompute_set(kept))


@lru_cache(maxsize=16384)
def to_the_end(region: Region, kept: frozenset[int]) -> frozenset[int]:
    """`repeated`, and the matmul that reads the result: a checkpointed attention core is recomputed to its end."""
    again = repeated(region, kept)
    made = {b for o in again for b in region.program.ops[o].outputs}
    ends = {op.index for op in region.program.ops if op.name == BATCHED and not made.isdisjoint(op.inputs)}
    return again | ends


@lru_cache(maxsize=4096)
def everything(region: Region) -> frozenset[int]:
    """Every step of the forward."""
    return frozenset(range(len(region.tape.steps)))


# utilisation ----------------------------------------------------------------------------------------------------------
#
# MFU and HFU: FLOPs that the model needs, or that the hardware runs, over the peak FLOPs of the same time. Authors
# differ only in how they count model FLOPs: `Counting`.


def utilisation(flops: float, *, seconds: float, devices: int, peak_flops_per_second: float) -> float:
    """Share of all devices' peak: MFU for model FLOPs, HFU for hardware FLOPs."""
    return flops / (seconds * devices * peak_flops_per_second)
